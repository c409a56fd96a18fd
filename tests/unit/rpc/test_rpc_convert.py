"""Received messages are checked, and sent values are received unchanged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from diptych.common.compat import Compat, as_strings, differences, identified
from diptych.common.errors import IncompatibleWorkersError, InternalError, InvalidRequestError
from diptych.common.kv_format import Shard, full_format, windowed_format
from diptych.common.request import Prompt
from diptych.common.sampling import EarlyStopping, FinishReason, SamplingParams, TokenLogprobs
from diptych.rpc import convert
from diptych.rpc.v1 import decode_pb2, prefill_pb2, types_pb2, worker_pb2

KV = windowed_format([0, 8, 0], 2, 4, block_size=16, dtype="float32", shard=Shard(1, 2))
COMPAT = Compat("m", "r1", "t1", KV, "float32", "a1", "s1", b"\x01" * 16, backend="torch")


def test_sampling_there_and_back() -> None:
    params = SamplingParams(5, 2**64 - 1, 0.5, 0.9, 3, True, (1, 2), ("x",))
    assert convert.sampling_from_proto(convert.sampling_to_proto(params), vocab_size=10) == params


def test_every_sampling_field_there_and_back() -> None:
    params = SamplingParams(
        5,
        min_p=0.1,
        presence_penalty=-1.5,
        frequency_penalty=2.0,
        repetition_penalty=1.25,
        logit_bias=((1, -100.0), (7, 0.5)),
        allowed_token_ids=(3, 4),
        bad_words=((1,), (2, 3)),
        min_tokens=2,
        include_stop_str_in_output=True,
        n=2,
        best_of=3,
        logprobs=0,
        prompt_logprobs=4,
    )
    plain = SamplingParams(5)
    changed = {
        field.name for field in dataclasses.fields(params) if getattr(params, field.name) != getattr(plain, field.name)
    }
    assert len(changed) == 13
    assert convert.sampling_from_proto(convert.sampling_to_proto(params), vocab_size=10) == params
    assert convert.sampling_from_proto(convert.sampling_to_proto(plain), vocab_size=10) == plain
    for early in EarlyStopping:
        beams = SamplingParams(5, temperature=0.0, beam_width=4, length_penalty=-0.5, early_stopping=early)
        assert convert.sampling_from_proto(convert.sampling_to_proto(beams), vocab_size=10) == beams


def test_logprobs_there_and_back() -> None:
    message = types_pb2.TokenLogprobs(token_id=3, logprob=-math.inf, rank=9, top_token_ids=[1], top_logprobs=[-0.1])
    entry = convert.logprobs_from_proto(message)
    assert entry == TokenLogprobs(3, -math.inf, 9, ((1, -0.1),))
    message.top_logprobs.append(0.0)
    with pytest.raises(InternalError):
        convert.logprobs_from_proto(message)


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "seed", "max_tokens", "n", "min_p"])
def test_an_unset_field_is_named(field: str) -> None:
    message = convert.sampling_to_proto(SamplingParams(5))
    message.ClearField(field)
    with pytest.raises(InvalidRequestError) as caught:
        convert.sampling_from_proto(message, vocab_size=10)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", math.nan), ("temperature", 3.0), ("top_p", 0.0), ("top_k", -2), ("max_tokens", 0)],
)
def test_a_value_out_of_range_is_named(field: str, value: float) -> None:
    message = convert.sampling_to_proto(SamplingParams(5))
    setattr(message, field, value)
    with pytest.raises(InvalidRequestError) as caught:
        convert.sampling_from_proto(message, vocab_size=10)
    assert caught.value.param == field


def test_compat_there_and_back() -> None:
    assert convert.compat_from_proto(convert.compat_to_proto(COMPAT)) == COMPAT
    assert as_strings(COMPAT)["block_identity_golden"] == "01" * 16


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("model_revision", lambda message: message.ClearField("model_revision")),
        ("protocol_version", lambda message: message.ClearField("protocol_version")),
        ("no KV format", lambda message: message.ClearField("kv")),
        ("layers", lambda message: message.kv.ClearField("groups")),
        ("layers", lambda message: message.kv.groups[0].ClearField("layers")),
        ("layers", lambda message: message.kv.groups[0].layers.append(1)),
        ("more than 4096 layers", lambda message: message.kv.groups[0].layers.extend(range(3, 5000))),
        ("unknown kind", lambda message: setattr(message.kv.groups[0], "kind", 9)),
        ("window", lambda message: setattr(message.kv.groups[1], "window", 0)),
        ("kv_dtype", lambda message: setattr(message.kv.groups[0], "dtype", "int3")),
        ("kv_scale_dtype", lambda message: setattr(message.kv.groups[0], "scale_dtype", "int3")),
        ("num_kv_heads", lambda message: setattr(message.kv.groups[0], "heads", 3)),
        ("head_dim", lambda message: message.kv.groups[0].dims.append(0)),
        ("block_size", lambda message: setattr(message.kv.groups[0], "block_size", 0)),
        ("kv_layout", lambda message: setattr(message.kv, "order", "unheard-of")),
        ("tensor_parallel_size", lambda message: setattr(message.kv, "shard_degree", 0)),
        ("rank", lambda message: setattr(message.kv, "shard_rank", 2)),
    ],
)
def test_senseless_compat_is_refused(field: str, spoil: Callable[[worker_pb2.Compat], object]) -> None:
    message = convert.compat_to_proto(COMPAT)
    spoil(message)
    with pytest.raises(IncompatibleWorkersError, match=field):
        convert.compat_from_proto(message)


def test_a_promise_of_batch_invariance_must_be_made_by_both() -> None:
    """Named where it differs, also in a store and beside a version that does not know it; kept on the wire; and no part of
    what names blocks: the attention version is, where values differ."""
    promised = dataclasses.replace(COMPAT, batch_invariant=True)
    assert convert.compat_from_proto(convert.compat_to_proto(promised)) == promised
    expected = "batch_invariant: mine True, theirs unset"
    assert differences(promised, COMPAT, converting=True) == [expected]
    assert differences(promised, promised) == []
    without = {name for name in as_strings(promised) if name not in as_strings(COMPAT)}
    assert without == {"batch_invariant"}
    assert identified(promised, bytes(32))[0] == identified(COMPAT, bytes(32))[0]


def test_differences_are_readable() -> None:
    one = dataclasses.replace(COMPAT, kv=full_format(2, 1, 4, block_size=16, dtype="float32"))
    other = dataclasses.replace(COMPAT, kv=full_format(2, 1, 4, block_size=32, dtype="float16"))
    named = ["block_size: mine 16, theirs 32", "kv_dtype: mine float32, theirs float16"]
    assert differences(one, other) == named
    assert differences(one, other, converting=True) == []
    windows = dataclasses.replace(COMPAT, kv=windowed_format([0, 16, 0], 2, 4, block_size=16, dtype="float32"))
    assert "window-8.num_layers: mine 1, theirs unset" in differences(COMPAT, windows)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_remaining_must_be_finite_and_positive(value: float) -> None:
    with pytest.raises(InvalidRequestError):
        convert.check_remaining(value)


def test_token_ids_and_finish_reasons() -> None:
    assert convert.check_token_ids([0, 9], vocab_size=10, param="prompt") == (0, 9)
    with pytest.raises(InvalidRequestError):
        convert.check_token_ids([10], vocab_size=10, param="prompt")
    for reason in FinishReason:
        assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason
    with pytest.raises(InvalidRequestError):
        convert.finish_reason_from_proto(types_pb2.FINISH_REASON_UNSPECIFIED)


@pytest.mark.parametrize("message", [decode_pb2.Submit, prefill_pb2.PrefillRequest])
def test_a_prompt_there_and_back(message: Any) -> None:
    prompt = Prompt((1, 2, 9), b"salt", "adapter")
    assert convert.prompt_from_proto(message(**convert.prompt_fields(prompt)), vocab_size=10) == prompt
    assert not message(**convert.prompt_fields(prompt, with_ids=False)).prompt_token_ids
    there = message(**convert.prompt_fields(prompt, adapter_folder="/lora/french"))
    assert convert.adapter_folder_from_proto(there) == "/lora/french"
    assert not message(**convert.prompt_fields(Prompt((1,)), adapter_folder="/lora/french")).adapter_folder
    wrong = ({"adapter_folder": "/a"}, *({"adapter": "a", "adapter_folder": f} for f in ("a/b", "/a\0b", "/" * 4097)))
    for fields in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            convert.adapter_folder_from_proto(message(**fields))
        assert caught.value.param == "adapter_folder"
    for ids in ((), (10,)):
        with pytest.raises(InvalidRequestError) as caught:
            convert.prompt_from_proto(message(prompt_token_ids=ids), vocab_size=10)
        assert caught.value.param == "prompt"


def test_what_the_wire_has_no_field_for_is_not_sent_without_it() -> None:
    with pytest.raises(InternalError):
        convert.prompt_fields(Prompt((1,), media=(b"png",)))
