"""Shapes of answers and chunks, field by field."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.common.request import Prompt
from diptych.common.sampling import FinishReason, SamplingParams, TokenLogprobs
from diptych.common.text.token_bytes import ByteTokens
from diptych.router.api.openai.answers import DONE, explanation_object
from diptych.router.api.openai.format import ChatForm, CompletionForm, ResponseContext, ResponseOptions
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    ModelFeatures,
    PromptLogprobsEvent,
    TokenEvent,
    UsageInfo,
    ValidatedRequest,
)
from diptych.rpc.v1 import types_pb2

PREPARED = ValidatedRequest(
    request_id="req-1",
    label="",
    model="m",
    prompt=Prompt((1, 2)),
    sampling=SamplingParams(max_tokens=4),
    explain=False,
    local_prefill_max_tokens=64,
    failure_policy=0,
    arrived=0.0,
    deadline=1.0,
)
FINISHED = FinishedEvent(FinishReason.LENGTH, UsageInfo(2, 1, 0), "", None, None)


def token_bytes(token_id: int) -> bytes:
    return {7: b"\xc3", 8: b"\xa9"}.get(token_id, b"<%d>" % token_id)


def make_form(
    *,
    chat: bool = True,
    features: ModelFeatures | None = None,
    prepared: ValidatedRequest = PREPARED,
    **options: Any,
) -> Any:
    context = ResponseContext(prepared, 1700000000, features or ModelFeatures(), ByteTokens(token_bytes, {9}))
    return (ChatForm if chat else CompletionForm)(ResponseOptions(**options), context)


def prepared_with(*, thinking: bool = False, echo: str = "", **sampling: Any) -> ValidatedRequest:
    return replace(PREPARED, sampling=SamplingParams(max_tokens=4, **sampling), thinking=thinking, echo=echo)


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

    assert parsed(form.begin()) == head | {"choices": [choice({"role": "assistant", "content": ""}, None)]}
    assert parsed(form.chunks(TokenEvent(0, (5,), 'a"\n\u00e9'))) == head | {
        "choices": [choice({"content": 'a"\n\u00e9'}, None)]
    }
    last, rest = form.chunks(FINISHED).split(b"\n\n", 1)
    assert parsed(last + b"\n\n") == head | {"choices": [choice({}, "length") | {"stop_reason": None}]}
    assert rest == DONE


def test_usage_chunk_has_no_choices_and_the_others_a_null_usage() -> None:
    form = make_form(include_usage=True)
    assert parsed(form.chunks(TokenEvent(0, (5,), "a")))["usage"] is None
    _, usage, done, _ = form.chunks(FINISHED).split(b"\n\n")
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
    assert make_form().chunks(event) == b""
    assert parsed(make_form(return_token_ids=True).chunks(event))["choices"][0]["token_ids"] == [7]


def test_completions_have_text_and_no_role() -> None:
    form = make_form(chat=False)
    assert form.begin() == b""
    chunk = parsed(form.chunks(TokenEvent(0, (5,), "a")))
    assert (chunk["object"], chunk["choices"][0]["text"]) == ("text_completion", "a")
    form = make_form(chat=False, return_token_ids=True)
    form.absorb(TokenEvent(0, (5, 6), "ab"))
    whole = form.whole(FINISHED)
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
    assert make_form().whole(finished)["choices"][0]["stop_reason"] == reason


def deltas(stream: bytes) -> list[dict[str, Any]]:
    return [parsed(part + b"\n\n")["choices"][0] for part in stream.removesuffix(DONE).split(b"\n\n") if part]


THINKER = ModelFeatures(tool_parser="hermes", reasoning=True, takes_tools=True)
STOPPED = FinishedEvent(FinishReason.STOP, UsageInfo(2, 9, 0), "", None, None)
THOUGHTS = [
    TokenEvent(0, (5,), "<think>Hm"),
    TokenEvent(1, (6, 7), ", sum.</think>\n\nSure.\n<tool_"),
    TokenEvent(3, (8,), 'call>{"name": "add", "arguments": {"a": 1, '),
    TokenEvent(4, (9,), '"b": 2}}</tool_call>'),
]


def test_thoughts_and_tool_calls_are_the_same_in_a_stream_and_in_whole() -> None:
    whole_form = make_form(features=THINKER, tool_names=("add",))
    stream_form = make_form(features=THINKER, tool_names=("add",))
    stream = stream_form.begin()
    for event in THOUGHTS:
        whole_form.absorb(event)
        stream += stream_form.chunks(event)
    stream += stream_form.chunks(STOPPED)
    whole = whole_form.whole(STOPPED)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, sum.", "Sure.\n")
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    parts = [choice["delta"] for choice in deltas(stream)]
    assert "".join(part.get("content") or "" for part in parts) == message["content"]
    assert "".join(part.get("reasoning_content", "") for part in parts) == message["reasoning_content"]
    calls = [part["tool_calls"][0] for part in parts if "tool_calls" in part]
    assert calls[0]["function"]["name"] == "add"
    assert calls[0]["id"].startswith("call_")
    assert "".join(part["function"]["arguments"] for part in calls) == call["function"]["arguments"]
    assert deltas(stream)[-1]["finish_reason"] == "tool_calls"


def test_thoughts_can_be_left_out_and_calls_kept_to_one() -> None:
    form = make_form(features=THINKER, tool_names=("add",), include_reasoning=False, parallel_tool_calls=False)
    for event in [*THOUGHTS, TokenEvent(5, (9,), '<tool_call>{"name": "add", "arguments": {}}</tool_call>')]:
        form.absorb(event)
    message = form.whole(STOPPED)["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert len(message["tool_calls"]) == 1


def test_an_answer_that_is_cut_in_a_call_ends_with_length() -> None:
    form = make_form(features=THINKER, tool_names=("add",))
    for event in THOUGHTS[:3]:
        form.absorb(event)
    choice = form.whole(FINISHED)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["arguments"]) == (
        "length",
        '{"a": 1, ',
    )


def test_without_tools_a_call_is_text_and_completions_are_never_taken_apart() -> None:
    text = "".join(event.text for event in THOUGHTS)
    for form, key in ((make_form(), "message"), (make_form(chat=False, features=THINKER, tool_names=("add",)), "text")):
        for event in THOUGHTS:
            form.absorb(event)
        choice = form.whole(STOPPED)["choices"][0]
        assert (choice["message"]["content"] if key == "message" else choice["text"]) == text


def test_several_choices_end_each_for_themselves() -> None:
    events = [
        TokenEvent(0, (5,), "a0"),
        TokenEvent(0, (6,), "b0", choice=1),
        ChoiceFinishedEvent(1, FinishReason.STOP, "!", None),
        TokenEvent(1, (7,), "a1"),
        ChoiceFinishedEvent(0, FinishReason.LENGTH, "", None),
    ]
    whole_form, form = make_form(prepared=prepared_with(n=2)), make_form(prepared=prepared_with(n=2))
    stream = form.begin()
    for event in events:
        stream += form.chunks(event)
        whole_form.absorb(event)
    stream += form.chunks(STOPPED)
    shown = deltas(stream)
    assert [choice["index"] for choice in shown] == [0, 1, 0, 1, 1, 0, 0]
    assert [c["finish_reason"] for c in shown] == [None, None, None, None, "stop", None, "length"]
    whole = whole_form.whole(STOPPED)["choices"]
    assert [(c["message"]["content"], c["finish_reason"]) for c in whole] == [("a0a1", "length"), ("b0", "stop")]
    assert whole[1]["stop_reason"] == "!"


def test_the_explanation_of_several_choices_comes_after_them() -> None:
    form = make_form(prepared=prepared_with(n=2))
    for choice in (0, 1):
        form.chunks(ChoiceFinishedEvent(choice, FinishReason.STOP, "", None))
    explained = replace(STOPPED, explanation=types_pb2.Explanation(prefill="p0"))
    chunk = parsed(form.chunks(explained).removesuffix(DONE))
    assert (chunk["choices"], chunk["diptych"]["prefill"]) == ([], "p0")


ENTRIES = (TokenLogprobs(7, -0.5, 1, ((7, -0.5), (9, -2.0))), TokenLogprobs(8, float("-inf"), 3, ((9, -0.25),)))


def test_chat_logprobs() -> None:
    form = make_form(prepared=prepared_with(logprobs=2))
    chunk = parsed(form.chunks(TokenEvent(0, (7, 8), "\u00e9", logprobs=ENTRIES)))
    shown = chunk["choices"][0]["logprobs"]
    assert shown["content"][0]["bytes"] == [0xC3]
    assert [entry["logprob"] for entry in shown["content"][0]["top_logprobs"]] == [-0.5, -2.0]
    assert shown["content"][1]["logprob"] == -9999.0
    whole = make_form(prepared=prepared_with(logprobs=2))
    whole.absorb(TokenEvent(0, (7, 8), "\u00e9", logprobs=ENTRIES))
    assert whole.whole(FINISHED)["choices"][0]["logprobs"] == shown
    named = make_form(prepared=prepared_with(logprobs=0), tokens_as_ids=True)
    chunk = parsed(named.chunks(TokenEvent(0, (7,), "", logprobs=ENTRIES[:1])))
    assert chunk["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:7"


def test_completion_logprobs_run_on_over_chunks_and_begin_with_the_echo() -> None:
    prepared = prepared_with(echo="<1><2>", logprobs=1, prompt_logprobs=1)
    form = make_form(chat=False, prepared=prepared, echo=True)
    form.absorb(PromptLogprobsEvent(1, (TokenLogprobs(2, -1.0, 1, ((2, -1.0),)),)))
    form.absorb(TokenEvent(0, (5,), "<5>", logprobs=(TokenLogprobs(5, -3.0, 2, ((6, -0.1),)),)))
    choice = form.whole(FINISHED)["choices"][0]
    assert choice["text"] == "<1><2><5>"
    assert choice["logprobs"] == {
        "text_offset": [0, 3, 6],
        "token_logprobs": [None, -1.0, -3.0],
        "tokens": ["<1>", "<2>", "<5>"],
        "top_logprobs": [None, {"<2>": -1.0}, {"<6>": -0.1, "<5>": -3.0}],
    }
    stream = make_form(chat=False, prepared=prepared_with(logprobs=0))
    offsets = []
    for i in (5, 6):
        event = TokenEvent(i - 5, (i,), "x", logprobs=(TokenLogprobs(i, -1.0, 1),))
        offsets += parsed(stream.chunks(event))["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 3]


def test_prompt_logprobs() -> None:
    form = make_form(prepared=prepared_with(prompt_logprobs=1), prompt_logprobs=1)
    form.absorb(PromptLogprobsEvent(1, (TokenLogprobs(2, -3.0, 7, ((5, -0.1),)),)))
    first, second = form.whole(FINISHED)["prompt_logprobs"]
    assert first is None
    assert second == {
        "5": {"logprob": -0.1, "rank": 1, "decoded_token": "<5>"},
        "2": {"logprob": -3.0, "rank": 7, "decoded_token": "<2>"},
    }


def test_the_explanation_holds_every_field_of_the_message() -> None:
    tiers = [types_pb2.TierTokens(tier="host", tokens=32), types_pb2.TierTokens(tier="disk", tokens=16)]
    terms = types_pb2.PlacementTerms(chosen=True, prefill_tiers=tiers)
    message = types_pb2.Explanation(notes=["n"], candidates=[terms])
    shown = explanation_object(message)
    assert set(shown) == {field.name for field in message.DESCRIPTOR.fields} - {"candidates"} | {"placement"}
    (placement,) = shown["placement"]
    former = {"prefill_host_tokens", "decode_host_tokens"}
    assert set(placement) == {field.name for field in types_pb2.PlacementTerms.DESCRIPTOR.fields} | former
    assert placement["prefill_tiers"] == {"host": 32, "disk": 16}
    assert (placement["prefill_host_tokens"], placement["decode_host_tokens"]) == (32, 0)
    json.dumps(shown)


def test_a_pull_shows_the_holders_tiers_by_name() -> None:
    message = types_pb2.Explanation()
    message.pulls.add(holder="d0", num_tokens=96, source_tiers=[types_pb2.TierTokens(tier="disk", tokens=48)])
    [pull] = explanation_object(message)["pulls"]
    assert (pull["holder"], pull["num_tokens"], pull["source_tiers"]) == ("d0", 96, {"disk": 48})


def test_the_api_page_describes_every_field_of_an_explanation() -> None:
    page = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
    section = page.partition("### The explanation")[2].partition("\n### ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    shown = explanation_object(types_pb2.Explanation(candidates=[types_pb2.PlacementTerms()]))
    described = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert described | {"prefill_host_tokens", "decode_host_tokens"} == {*shown, *shown["placement"][0]}
