"""What requests claim of the caches, from the fields of every API."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.client.request import build_request
from diptych.common.errors import InvalidRequestError
from diptych.common.request import CacheClaim
from diptych.common.secret import session_key
from diptych.router.api.grpc.requests import spec_from
from diptych.router.api.openai.fields import UnknownFields
from diptych.router.api.openai.requests import chat_call, completion_call
from diptych.router.api.openai.responses import responses_call
from diptych.router.preprocess.retention import RetentionLimits, retention_of
from diptych.router.requests.messages import ModelFeatures, Retention, UncheckedRequest

FEATURES, REFUSED = ModelFeatures(), UnknownFields(refuse=True)
LIMITS = RetentionLimits(default_ttl_s=300.0)
OWNER = b"o" * 16


def of_http(**fields: Any) -> list[UncheckedRequest]:
    return [
        completion_call({"prompt": "a", **fields}, features=FEATURES, unknown=REFUSED).spec,
        chat_call({"messages": [{"role": "user", "content": "a"}], **fields}, features=FEATURES, unknown=REFUSED).spec,
        responses_call({"input": "a", **fields}, features=FEATURES, unknown=REFUSED).spec,
    ]


def of_sdk(**fields: Any) -> UncheckedRequest:
    return spec_from(build_request({"prompt": "a", **fields}), 5.0, FEATURES)[0]


def claimed(spec: UncheckedRequest, limits: RetentionLimits = LIMITS) -> Retention | None:
    return retention_of(spec, OWNER, limits)


@pytest.mark.parametrize(
    ("fields", "claim"),
    [
        ({}, None),
        ({"cache_ttl_s": 60}, CacheClaim(60.0)),
        ({"cache_priority": 0}, CacheClaim(300.0, 0)),
        ({"session_id": "s/1 é"}, CacheClaim(300.0, session=session_key(OWNER, "s/1 é"))),
        (
            {"cache_ttl_s": 0.5, "cache_priority": 100, "session_id": "s"},
            CacheClaim(0.5, 100, session_key(OWNER, "s")),
        ),
    ],
)
def test_every_api_makes_the_same_claim(fields: dict[str, Any], claim: CacheClaim | None) -> None:
    for spec in (of_sdk(**fields), *of_http(**fields)):
        found = claimed(spec)
        assert (None if found is None else found.claim) == claim
        assert found is None or found.session_id == fields.get("session_id", "")


@pytest.mark.parametrize(
    ("fields", "claim"),
    [
        ({"prompt_cache_key": "0199"}, CacheClaim(300.0, session=session_key(OWNER, "0199"))),
        ({"prompt_cache_key": ""}, None),
        ({"prompt_cache_retention": None}, None),
        ({"prompt_cache_retention": "in_memory"}, CacheClaim(300.0)),
        ({"prompt_cache_retention": "24h"}, CacheClaim(86_400.0)),
        (
            {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "session_id": "s", "cache_ttl_s": 7},
            CacheClaim(7.0, session=session_key(OWNER, "s")),
        ),
    ],
)
def test_openais_fields_are_claims_where_ours_are_not_given(fields: dict[str, Any], claim: CacheClaim | None) -> None:
    for spec in of_http(**fields):
        found = claimed(spec)
        assert (None if found is None else found.claim) == claim


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_ttl_s", 0),
        ("cache_ttl_s", -1.0),
        ("cache_ttl_s", float("nan")),
        ("cache_ttl_s", float("inf")),
        ("cache_ttl_s", 1e9),
        ("cache_priority", -1),
        ("cache_priority", 101),
        ("session_id", "x" * 513),
        ("prompt_cache_key", "x" * 513),
        ("prompt_cache_retention", "forever"),
        ("cache_ttl_s", "60"),
        ("cache_priority", 1.5),
        ("session_id", 7),
        ("prefetch", "yes"),
        ("prompt_cache_key", 7),
    ],
)
def test_a_bad_value_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        [claimed(spec) for spec in of_http(**{name: value})]
    assert caught.value.param == name
    if not name.startswith("prompt_cache") and name != "prefetch":
        with pytest.raises(InvalidRequestError) as caught:
            claimed(of_sdk(**{name: value}))
        assert caught.value.param == name


def test_a_tenants_key_bounds_the_time_and_names_the_rank() -> None:
    limits = RetentionLimits(300.0, most_ttl_s={"short": 60.0, "long": 7200.0}.__getitem__, rank=lambda tenant: 3)
    for tenant, most in (("short", 60.0), ("long", 7200.0)):
        spec = of_sdk(cache_ttl_s=86_400.0)
        spec.tenant = tenant
        found = claimed(spec, limits)
        assert found == Retention(CacheClaim(most, rank=3), 86_400.0)


def test_a_session_is_the_tenants_own() -> None:
    assert session_key(OWNER, "s") != session_key(b"p" * 16, "s")
    assert len(session_key(OWNER, "s")) == 16
