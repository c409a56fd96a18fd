"""Shapes of answers and chunks, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.common.sampling import FinishReason, SamplingParams
from diptych.router.messages import FinishedEvent, PreparedRequest, TokenEvent, UsageInfo
from diptych.router.openai_answers import DONE, AnswerForm, explanation_object
from diptych.rpc.v1 import types_pb2

PREPARED = PreparedRequest(
    request_id="req-1",
    label="",
    model="m",
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(max_tokens=4),
    cache_salt=b"",
    explain=False,
    local_prefill_max_tokens=64,
    failure_policy=0,
    arrived=0.0,
    deadline=1.0,
)
FINISHED = FinishedEvent(FinishReason.LENGTH, UsageInfo(2, 1, 0), "", None, None)


def make_form(*, chat: bool = True, include_usage: bool = False, return_token_ids: bool = False) -> AnswerForm:
    return AnswerForm(PREPARED, chat, 1700000000, include_usage, return_token_ids)


def parsed(chunk: bytes | None) -> dict[str, Any]:
    assert chunk is not None
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    return json.loads(chunk[6:])


def test_chat_chunks() -> None:
    form = make_form()
    head = {"id": "chatcmpl-req-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "m"}

    def choice(delta: dict[str, str], finish: str | None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}

    assert parsed(form.first_chunk()) == head | {"choices": [choice({"role": "assistant", "content": ""}, None)]}
    assert parsed(form.token_chunk(TokenEvent(0, (5,), 'a"\n\u00e9'))) == head | {
        "choices": [choice({"content": 'a"\n\u00e9'}, None)]
    }
    last, rest = form.last_chunks(FINISHED).split(b"\n\n", 1)
    assert parsed(last + b"\n\n") == head | {"choices": [choice({}, "length") | {"stop_reason": None}]}
    assert rest == DONE


def test_usage_chunk_has_no_choices_and_the_others_a_null_usage() -> None:
    form = make_form(include_usage=True)
    assert parsed(form.token_chunk(TokenEvent(0, (5,), "a")))["usage"] is None
    _, usage, done, _ = form.last_chunks(FINISHED).split(b"\n\n")
    chunk = parsed(usage + b"\n\n")
    assert chunk["choices"] == []
    assert chunk["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert done == b"data: [DONE]"


def test_tokens_without_certain_text_are_shown_only_by_id() -> None:
    event = TokenEvent(3, (7,), "")
    assert make_form().token_chunk(event) is None
    assert parsed(make_form(return_token_ids=True).token_chunk(event))["choices"][0]["token_ids"] == [7]


def test_completions_have_text_and_no_role() -> None:
    form = make_form(chat=False)
    assert form.first_chunk() is None
    chunk = parsed(form.token_chunk(TokenEvent(0, (5,), "a")))
    assert (chunk["object"], chunk["choices"][0]["text"]) == ("text_completion", "a")
    whole = make_form(chat=False, return_token_ids=True).whole("ab", [5, 6], FINISHED)
    assert whole["choices"][0] == {
        "index": 0,
        "text": "ab",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [5, 6],
        "prompt_token_ids": [1, 2],
    }


@pytest.mark.parametrize(("stop", "token", "reason"), [("END", None, "END"), ("", 0, 0), ("", None, None)])
def test_stop_reason(stop: str, token: int | None, reason: object) -> None:
    finished = FinishedEvent(FinishReason.STOP, UsageInfo(1, 1, 0), stop, token, None)
    assert make_form().whole("a", [1], finished)["choices"][0]["stop_reason"] == reason


def test_the_explanation_holds_every_field_of_the_message() -> None:
    message = types_pb2.Explanation(notes=["n"], candidates=[types_pb2.PlacementTerms(chosen=True)])
    shown = explanation_object(message)
    assert set(shown) == {field.name for field in message.DESCRIPTOR.fields} - {"candidates"} | {"placement"}
    assert set(shown["placement"][0]) == {field.name for field in types_pb2.PlacementTerms.DESCRIPTOR.fields}
    json.dumps(shown)
