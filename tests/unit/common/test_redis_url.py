import pytest

from diptych.common.errors import ConfigError
from diptych.common.store.redis_url import SentinelUrl, connect, parse_sentinel_url


def test_other_urls_are_left_to_the_client():
    assert parse_sentinel_url("redis://h:1/0") is None
    assert parse_sentinel_url("unix:///s") is None


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("redis+sentinel://a:1/m", SentinelUrl((("a", 1),), "m", 0, None, None, False)),
        (
            "redis+sentinel://a,b:2,[::1]:3/m/5",
            SentinelUrl((("a", 26379), ("b", 2), ("::1", 3)), "m", 5, None, None, False),
        ),
        ("rediss+sentinel://u:p%40ss@a/m", SentinelUrl((("a", 26379),), "m", 0, "u", "p@ss", True)),
        ("redis+sentinel://:pw@a/m", SentinelUrl((("a", 26379),), "m", 0, None, "pw", False)),
    ],
)
def test_sentinel_urls(url, parts):
    assert parse_sentinel_url(url) == parts


@pytest.mark.parametrize("tail", ["a:1", "a:1/", "a:1/m/x", "a:x/m", "a:99999/m", ",/m", "/m", "a/m?x=1"])
def test_bad_sentinel_urls_name_the_setting_and_not_the_password(tail):
    with pytest.raises(ConfigError) as caught:
        parse_sentinel_url(f"redis+sentinel://user:secret@{tail}")
    assert caught.value.field == "redis_url"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://user:secret@h:1x/0", "redis://user:a/secret@h:1/0", "http://:secret@h"])
def test_a_url_that_cannot_be_read_is_not_shown(url):
    with pytest.raises(ConfigError) as caught:
        connect(url, timeout_s=1.0)
    assert caught.value.field == "redis_url"
    assert "secret" not in str(caught.value)
