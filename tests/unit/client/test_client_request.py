"""From keywords to the wire."""

from __future__ import annotations

from random import Random
from typing import Any

import grpc.aio
import pytest

from diptych.client import (
    DiptychError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    RetryPolicy,
    StreamBrokenError,
)
from diptych.client.exchange import Attempts, Exchange
from diptych.client.request import build_request
from diptych.client.routers import Routers
from diptych.client.wire import metadata, typed
from diptych.rpc.v1 import router_pb2


def test_every_keyword_reaches_its_field() -> None:
    request = build_request(
        {
            "token_ids": [1, 2],
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "seed": 2**64 - 1,
            "stop": ["a", "b"],
            "stop_token_ids": [7],
            "ignore_eos": True,
            "model": "m",
            "request_id": "r",
            "explain": True,
            "local_prefill_max_tokens": 0,
            "failure_policy": "fail",
        }
    )
    sampling = request.sampling
    assert list(request.token_ids.token_ids) == [1, 2]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 3)
    assert (sampling.seed, list(sampling.stop), list(sampling.stop_token_ids)) == (2**64 - 1, ["a", "b"], [7])
    assert (sampling.ignore_eos, request.model, request.request_id, request.explain) == (True, "m", "r", True)
    assert request.HasField("local_prefill_max_tokens")
    assert request.failure_policy == router_pb2.FAILURE_POLICY_FAIL


def test_what_is_not_given_stays_unset() -> None:
    request = build_request({"prompt": "", "stop": "x", "temperature": None})
    assert request.WhichOneof("input") == "prompt"
    assert list(request.sampling.stop) == ["x"]
    for field in ("temperature", "top_p", "top_k", "seed", "max_tokens"):
        assert not request.sampling.HasField(field)
    assert not request.HasField("local_prefill_max_tokens")


def test_an_empty_list_is_still_an_input() -> None:
    assert build_request({"token_ids": []}).WhichOneof("input") == "token_ids"
    assert build_request({"messages": []}).WhichOneof("input") == "chat"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"prompt": "a", "max_tokens": 2**70}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "seed": -(2**63) - 1}, "seed"),
        ({"prompt": "a", "stop": [1]}, "stop"),
        ({"prompt": "a", "stop_token_ids": 3}, "stop_token_ids"),
        ({"prompt": "a", "choice": "yes"}, "choice"),
        ({"prompt": "a", "bad_words": "yes"}, "bad_words"),
        ({"token_ids": b"ab"}, "token_ids"),
        ({"prompt": "a", "failure_policy": "maybe"}, "failure_policy"),
        ({"prompt": "a", "local_prefill_max_tokens": -1}, "local_prefill_max_tokens"),
    ],
)
def test_values_that_cannot_be_sent_are_named(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_request(options)  # type: ignore[arg-type]
    assert caught.value.param == param


HALF = "a\ud800"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages": [{"role": "user", "content": HALF}]}, "messages"),
        ({"messages": [{"role": HALF, "content": "a"}]}, "messages"),
        ({"prompt": "a", "stop": HALF}, "stop"),
        ({"prompt": "a", "bad_words": [HALF]}, "bad_words"),
        ({"prompt": "a", "model": HALF}, "model"),
        ({"prompt": "a", "request_id": HALF}, "request_id"),
        ({"prompt": "a", "idempotency_key": HALF}, "idempotency_key"),
        ({"prompt": "a", "regex": HALF}, "regex"),
        ({"prompt": "a", "ebnf": HALF}, "ebnf"),
        ({"prompt": "a", "choice": [HALF]}, "choice"),
        ({"prompt": "a", "json_schema": {"enum": [HALF]}}, "json_schema"),
        ({"prompt": "a", "json_schema": HALF}, "json_schema"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": HALF}]}, "tools"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "description": HALF}]}, "tools"),
        (
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}], "tool_choice": HALF},
            "tool_choice",
        ),
    ],
)
def test_half_a_surrogate_pair_is_no_text_anywhere(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_request(options)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_compact_json_reaches_its_field() -> None:
    given = {"prompt": "a", "json_schema": {}, "compact_json": True}
    assert build_request(given).sampling.grammar.compact  # type: ignore[arg-type]
    assert not build_request({"prompt": "a", "regex": "a", "compact_json": True}).sampling.grammar.compact


def test_an_unknown_keyword_is_a_bug_of_the_caller() -> None:
    with pytest.raises(TypeError, match="max_token"):
        build_request({"prompt": "a", "max_token": 3})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(("seed", "sent"), [(-1, 2**64 - 1), (-(2**63), 2**63), (0, 0), (2**64 - 1, 2**64 - 1)])
def test_the_seed_takes_signed_and_unsigned_64_bits(seed: int, sent: int) -> None:
    assert build_request({"prompt": "a", "seed": seed}).sampling.seed == sent


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64])
def test_a_seed_beyond_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(InvalidRequestError, match="seed"):
        build_request({"prompt": "a", "seed": seed})


MIB = 1024 * 1024
TOO_LARGE = [
    ({"prompt": "x" * 9 * MIB}, "prompt", PromptTooLongError),
    ({"token_ids": [100_000] * 4 * MIB}, "token_ids", PromptTooLongError),
    ({"messages": [{"role": "user", "content": "x" * 9 * MIB}]}, "messages", PromptTooLongError),
    ({"prompt": "a", "json_schema": {"title": "x" * 9 * MIB}}, "json_schema", InvalidRequestError),
    (
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "description": "x" * 9 * MIB}]},
        "tools",
        None,
    ),
    ({"prompt": "a", "bad_words": ["x" * MIB] * 9}, "bad_words", InvalidRequestError),
]


@pytest.mark.parametrize(("options", "param", "kind"), TOO_LARGE, ids=[param for _, param, _ in TOO_LARGE])
def test_what_no_message_can_carry_is_named_before_it_is_sent(options: Any, param: str, kind: Any) -> None:
    """Issue 15, 4.14: a prompt that had never left the client was an OverloadedError."""
    with pytest.raises(kind or InvalidRequestError, match=f"^{param} cannot be sent") as caught:
        build_request(options)
    assert caught.value.param == param
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("options", "keyword"),
    [
        ({"json_schema": {}}, "json_schema"),
        ({"regex": "a"}, "regex"),
        ({"choice": ["a"]}, "choice"),
        ({"ebnf": "root ::= x"}, "ebnf"),
        ({"tools": [{"name": "f"}]}, "tools"),
    ],
)
@pytest.mark.parametrize("message", ["grammar: nothing fits it", "no token is left"])
def test_errors_name_the_keyword_that_was_given(options: Any, keyword: str, message: str) -> None:
    """Issue 15, 4.14: they named `grammar`, which no keyword is."""
    request = build_request({"messages": [{"role": "user", "content": "a"}], **options})
    exchange = Exchange(Attempts(9.0, RetryPolicy(), lambda: 0.0, Random(1)), request)
    with pytest.raises(InvalidRequestError) as caught:
        exchange.on_error(InvalidRequestError(message, param="grammar"))
    assert caught.value.param == keyword
    assert str(caught.value) == caught.value.message == f"{keyword}: {message.removeprefix('grammar: ')}"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CLIENT: Sent message larger than max (9000021 vs. 8388608)", InvalidRequestError),
        ("SERVER: Received message larger than max (9000021 vs. 8388608)", InvalidRequestError),
        ("CLIENT: Received message larger than max (9000021 vs. 8388608)", StreamBrokenError),
        ("full", OverloadedError),
    ],
)
def test_a_message_that_grpc_does_not_carry_is_no_overload(message: str, kind: type[DiptychError]) -> None:
    empty = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, empty, empty, details=message)
    assert type(typed(error, "x:1")) is kind


@pytest.mark.parametrize("address", [None, 5, "", (), [None]])
def test_an_address_of_a_wrong_type_is_named(address: Any) -> None:
    """Some were a bare TypeError."""
    with pytest.raises(InvalidRequestError) as caught:
        Routers(address)
    assert caught.value.param == "address"


def test_an_api_key_of_a_wrong_type_is_named() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        metadata(5)  # type: ignore[arg-type]
    assert caught.value.param == "api_key"
