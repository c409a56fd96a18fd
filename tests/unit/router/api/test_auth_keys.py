"""Stored keys: the file's content, authentication, and changes while a router runs."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import AuthenticationError, ConfigError, QuotaExceededError
from diptych.router.api.auth.authenticator import Authenticator, Caller
from diptych.router.api.auth.keys import add_key, load_keys, public_id, revoke_key
from diptych.router.api.auth.limits import MAX_TENANTS, MeteredRouterApi, TenantQuotas
from diptych.router.api.fake import FakeRouterApi
from diptych.router.api.interface import accepted
from diptych.router.config import RouterConfig
from diptych.router.requests.messages import TokenEvent, UncheckedRequest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "keys.json"


def test_the_file_holds_hashes_only_and_is_its_owners(file: Path) -> None:
    key, entry = add_key(file, "acme", now=5.0, tokens_per_minute=100, note="mine")
    text = file.read_text()
    assert key not in text
    assert key.split("-", 2)[2] not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_keys(file).entries == {entry.id: entry}
    assert (entry.tenant, entry.created, public_id(key)) == ("acme", 5, entry.id)


def test_two_files_hash_the_same_key_differently(tmp_path: Path) -> None:
    from diptych.router.api.auth.keys import hash_of

    hashes = set()
    for name in ("a", "b"):
        add_key(tmp_path / name, "t", now=0.0)
        hashes.add(hash_of("dpk-same", load_keys(tmp_path / name).hash_key))
    assert len(hashes) == 2


def test_only_the_whole_key_is_let_in(file: Path) -> None:
    key, _ = add_key(file, "acme", now=0.0)
    other, _ = add_key(file, "else", now=0.0)
    auth = Authenticator(file, now=FakeClock().now)
    assert auth.identify(f"Bearer {key}") == Caller(public_id(key), "acme")
    assert auth.identify(f"bEARER  {other} ").tenant == "else"
    mixed = f"dpk-{public_id(key)}-{other.split('-', 2)[2]}"
    flipped = key[:-1] + ("A" if key[-1] != "A" else "B")
    for bad in ("", "Bearer", "Bearer ", f"Basic {key}", key, f"Bearer {key}x", f"Bearer {flipped}", f"Bearer {mixed}"):
        with pytest.raises(AuthenticationError) as caught:
            auth.identify(bad)
        assert key.split("-", 2)[2] not in caught.value.message
    for odd in ("Bearer é" + key, "Bearer " + "x" * 100_000, f"Bearer {key[:-1]}\n"):
        with pytest.raises(AuthenticationError):
            auth.identify(odd)


def test_changes_count_within_a_second_and_damage_changes_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = add_key(file, "a", now=0.0)
    clock = FakeClock()
    auth = Authenticator(file, now=clock.now)
    second, _ = add_key(file, "b", now=0.0)
    revoke_key(file, public_id(first))
    assert auth.identify(f"Bearer {first}").tenant == "a"
    clock.advance(1.0)
    assert auth.identify(f"Bearer {second}").tenant == "b"
    with pytest.raises(AuthenticationError):
        auth.identify(f"Bearer {first}")
    for damage in ("{", json.dumps({"version": 1, "hash_key": "00", "keys": []})):
        file.write_text(damage)
        clock.advance(1.0)
        assert auth.identify(f"Bearer {second}").tenant == "b"
    file.unlink()
    clock.advance(1.0)
    assert auth.identify(f"Bearer {second}").tenant == "b"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"version": 2}',
        '{"version": 1, "hash_key": "zz", "keys": []}',
        '{"version": 1, "hash_key": "00"}',
    ]
    + [
        json.dumps({"version": 1, "hash_key": "00" * 32, "keys": keys}) for keys in ([1], [{}], [{"id": "a"}], {"a": 1})
    ],
)
def test_a_file_that_is_not_ours_is_a_config_error(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(ConfigError, match="keys_file"):
        load_keys(file)


def test_a_missing_file_says_how_to_make_one(file: Path) -> None:
    with pytest.raises(ConfigError, match="diptych keys add"):
        Authenticator(file, now=FakeClock().now)
    add_key(file, "a", now=0.0)
    with pytest.raises(ConfigError, match="no such key"):
        revoke_key(file, "0" * 12)
    with pytest.raises(ConfigError, match="tenant"):
        add_key(file, "no spaces", now=0.0)


def test_a_quota_is_spent_and_comes_back() -> None:
    clock = FakeClock()
    quotas = TenantQuotas(lambda tenant: 60 if tenant == "a" else 0, now=clock.now)
    quotas.check("a")
    quotas.spend("a", 100)
    with pytest.raises(QuotaExceededError) as caught:
        quotas.check("a")
    assert caught.value.retry_after_s == pytest.approx(41.0)
    assert quotas.headers("a") == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "100.000s",
    }
    clock.advance(41.0)
    quotas.check("a")
    clock.advance(1000.0)
    assert quotas.headers("a")["x-ratelimit-remaining-tokens"] == "60"
    quotas.spend("b", 10**9)
    quotas.check("b")
    assert quotas.headers("b") == {}


async def test_leaving_a_metered_answer_leaves_that_of_the_inner_api() -> None:
    router_api = FakeRouterApi([TokenEvent(0, (1, 2), "a"), None])
    quotas = TenantQuotas(lambda tenant: 60, now=FakeClock().now)
    metered = MeteredRouterApi(router_api, quotas)
    prepared = await metered.prepare(UncheckedRequest(prompt="a", tenant="t"))
    async with accepted(metered, prepared) as (_, events):
        await anext(events)
    assert (router_api.running, router_api.cancelled) == (0, 1)
    assert quotas.headers("t")["x-ratelimit-remaining-tokens"] == "55"


def test_full_buckets_are_forgotten() -> None:
    clock = FakeClock()
    quotas = TenantQuotas(lambda tenant: 60, now=clock.now)
    for i in range(MAX_TENANTS):
        quotas.spend(str(i), 1)
    clock.advance(1.0)
    quotas.spend("one more", 1)
    assert len(quotas._levels) == 1


def test_a_reachable_router_needs_keys_and_tls(tmp_path: Path) -> None:
    key_file = tmp_path / "k"
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1"):
        RouterConfig(host=host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(ConfigError, match="keys_file and tls_cert"):
            RouterConfig(host=host)
        with pytest.raises(ConfigError, match="set tls_cert as well"):
            RouterConfig(host=host, keys_file=key_file)
        RouterConfig(host=host, insecure=True)
        RouterConfig(host=host, keys_file=key_file, tls_cert=key_file, tls_key=key_file)
    with pytest.raises(ConfigError, match="tls_key"):
        RouterConfig(tls_cert=key_file)
