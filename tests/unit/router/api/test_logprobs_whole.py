"""Issue 15, 4.9: log probabilities: one entry per position, distinct token names, echoes of several prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from diptych.common.errors import InternalError
from diptych.common.request import Prompt
from diptych.common.sampling import FinishReason, SamplingParams, TokenLogprobs
from diptych.common.text.token_bytes import ByteTokens
from diptych.router.api.openai.fields import UnknownFields
from diptych.router.api.openai.format import ResponseContext, ResponseFormatter
from diptych.router.api.openai.logprobs import TokenNames, chat_logprobs
from diptych.router.api.openai.requests import completion_call
from diptych.router.requests.messages import (
    FinishedEvent,
    GenerateEvent,
    ModelFeatures,
    PromptLogprobsEvent,
    TokenEvent,
    UsageInfo,
    ValidatedRequest,
)

EMOJI = "\U0001f642".encode()
PIECES = {
    1: b"<s>",
    2: b"a",
    3: EMOJI[:2],
    4: EMOJI[2:],
    5: " \u00e9".encode(),
    6: b"b",
    7: b"b",
    8: b" " + EMOJI[:1],
    9: b"",
}
SPECIAL = {1}
FINISHED = FinishedEvent(FinishReason.STOP, UsageInfo(4, 1, 0), "", 6, None)


def tokens() -> ByteTokens:
    return ByteTokens(lambda token_id: PIECES.get(token_id, b""), SPECIAL)


def text_of(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids if i not in SPECIAL).decode("utf-8", "replace")


def entry(token_id: int, logprob: float = -1.0, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 1, top)


def make_form(body: dict[str, Any], prompts: list[list[int]], **prepared: Any) -> ResponseFormatter:
    """The form that a completions body gets."""
    call = completion_call({"prompt": prompts, **body}, features=ModelFeatures(), unknown=UnknownFields())
    spec = call.spec
    given: dict[str, Any] = {name: spec.sampling.get(name) for name in ("logprobs", "prompt_logprobs")}
    sampling = SamplingParams(max_tokens=4, n=body.get("n", 1), **given)
    made = [
        ValidatedRequest(
            request_id="r", label="", model="m", prompt=Prompt(tuple(ids)), sampling=sampling, explain=False,
            local_prefill_max_tokens=64, failure_policy=0, arrived=0.0, deadline=1.0, echo=text_of(ids) if spec.echo else "",
        )
        for ids in prompts
    ]  # fmt: skip
    made = [replace(one, **prepared) for one in made]
    return call.make_form(ResponseContext(made[0], 1700000000, ModelFeatures(), tokens(), tuple(made[1:])))


def whole(form: ResponseFormatter, *events: GenerateEvent) -> list[dict[str, Any]]:
    for event in events:
        form.absorb(event)
    return form.whole(FINISHED)["choices"]


def streamed(form: ResponseFormatter, *events: GenerateEvent) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    raw = form.begin() + b"".join(map(form.chunks, [*events, FINISHED]))
    choices: dict[int, dict[str, Any]] = {}
    for line in raw.decode().split("\n\n"):
        if not line or line == "data: [DONE]":
            continue
        for shown in json.loads(line.removeprefix("data: "))["choices"]:
            choice = choices.setdefault(shown["index"], {"text": "", "logprobs": {}})
            choice["text"] += shown["text"]
            choice["finish_reason"] = shown["finish_reason"]
            for name, values in (shown["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


def prompt_event(ids: list[int], prompt: int = 0) -> PromptLogprobsEvent:
    return PromptLogprobsEvent(1, tuple(entry(i, -0.5 * i, (2, -0.25)) for i in ids[1:]), prompt)


PROMPTS = [[1, 2, 3, 4, 5], [2, 8], [6]]


def test_offsets_are_characters_of_the_text_and_special_tokens_have_none():
    form = make_form({"echo": True, "logprobs": 1}, PROMPTS[:1])
    answer = TokenEvent(0, (3, 4, 6), "\U0001f642b", logprobs=tuple(map(entry, (3, 4, 6))))
    (choice,) = whole(form, prompt_event(PROMPTS[0]), answer)
    assert choice["text"] == "a\U0001f642 \u00e9\U0001f642b"
    shown = choice["logprobs"]
    assert shown["text_offset"] == [0, 0, 1, 1, 2, 4, 4, 5]
    assert shown["tokens"] == [
        "<s>",
        "a",
        r"bytes:\xf0\x9f",
        r"bytes:\x99\x82",
        " \u00e9",
        r"bytes:\xf0\x9f",
        r"bytes:\x99\x82",
        "b",
    ]
    assert shown["token_logprobs"][0] is None
    assert shown["top_logprobs"][0] is None
    assert {len(values) for values in shown.values()} == {8}


def test_offsets_of_a_text_are_those_of_the_text():
    """If the tokenizer has normalized the text, or added a token before it, the tokens' bytes do not give the offsets."""
    form = make_form({"echo": True, "logprobs": 0}, [[1, 2, 5]], echo="A e\u0301", echo_offsets=(0, 0, 1))
    (choice,) = whole(form, prompt_event([1, 2, 5]), TokenEvent(0, (6,), "b", logprobs=(entry(6),)))
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 4]
    assert choice["logprobs"]["top_logprobs"][3] == {"b": -1.0}


@pytest.mark.parametrize("n", [1, 2])
def test_echo_of_several_prompts_streamed_is_the_whole_one(n):
    body = {"echo": True, "logprobs": 1, "n": n}
    events = [prompt_event(PROMPTS[1], 1), prompt_event(PROMPTS[0], 0)]
    for choice in range(3 * n):
        events.append(TokenEvent(0, (6,), "b", choice, (entry(6),)))
    told_twice = [events[0], *events]
    choices = whole(make_form(body, PROMPTS), *told_twice)
    stream = streamed(make_form(body | {"stream": True}, PROMPTS), *told_twice)
    assert len(choices) == 3 * n
    for index, choice in enumerate(choices):
        prompt = PROMPTS[index // n]
        assert choice["text"] == text_of(prompt) + "b"
        assert choice["logprobs"]["token_logprobs"] == [None, *(-0.5 * i for i in prompt[1:]), -1.0]
        assert (stream[index]["text"], stream[index]["logprobs"]) == (choice["text"], choice["logprobs"])


def test_max_tokens_0_answers_with_the_prompt_alone():
    body = {"echo": True, "logprobs": 1, "max_tokens": 0}
    call = completion_call({"prompt": PROMPTS, **body}, features=ModelFeatures(), unknown=UnknownFields())
    assert [spec.sampling["max_tokens"] for spec in (call.spec, *call.more)] == [1, 1, 1]
    events = [prompt_event(PROMPTS[0], 0), prompt_event(PROMPTS[1], 1)]
    events += [TokenEvent(0, (6,), "b", choice, (entry(6),)) for choice in range(3)]
    form = make_form(body, PROMPTS)
    choices = whole(form, *events)
    for choice, prompt in zip(choices, PROMPTS, strict=True):
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text_of(prompt), "length", None)
        assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert form.whole(FINISHED)["usage"]["completion_tokens"] == 0
    stream = streamed(make_form(body | {"stream": True}, PROMPTS), *events)
    assert [(one["text"], one["logprobs"], one["finish_reason"]) for one in stream] == [
        (one["text"], one["logprobs"], "length") for one in choices
    ]
    (bare,) = whole(make_form({"max_tokens": 0}, PROMPTS[:1]), events[2])
    assert (bare["text"], bare["logprobs"], bare["finish_reason"]) == ("", None, "length")


@pytest.mark.parametrize(("logprobs", "asked"), [(1, 2), (2, 1), (2, 0)])
def test_echo_with_logprobs_together_with_prompt_logprobs(logprobs, asked):
    form = make_form({"echo": True, "logprobs": logprobs, "prompt_logprobs": asked, "max_tokens": 0}, [[2, 5]])
    top = ((6, -0.1), (2, -0.2))
    (choice,) = whole(form, PromptLogprobsEvent(1, (entry(5, -3.0, *top),)))
    assert len(choice["logprobs"]["top_logprobs"][1]) == logprobs + 1
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert set(second) == {"5"} | {str(token) for token, _ in top[:asked]}


def test_two_tokens_of_one_text_are_two_candidates():
    """lm-eval-harness compares the token's logprob with the best of the dict: none may be lost there."""
    form = make_form({"logprobs": 3}, [[2]])
    answer = TokenEvent(0, (7,), "b", logprobs=(entry(7, -2.0, (6, -0.5), (3, -1.0), (8, -1.5)),))
    (choice,) = whole(form, answer)
    (top,) = choice["logprobs"]["top_logprobs"]
    assert list(top.items()) == [("token_id:6", -0.5), (r"bytes:\xf0\x9f", -1.0), (r"bytes: \xf0", -1.5), ("b", -2.0)]
    assert choice["logprobs"]["tokens"] == ["b"]
    assert top["b"] == choice["logprobs"]["token_logprobs"][0]


def test_a_token_that_is_none_has_its_id_for_a_name():
    (choice,) = whole(make_form({"logprobs": 0}, [[2]]), TokenEvent(0, (9,), "", logprobs=(entry(9),)))
    assert choice["logprobs"]["tokens"] == ["token_id:9"]
    assert choice["logprobs"]["text_offset"] == [0]


def test_an_echo_without_all_logprobs_is_no_answer():
    with pytest.raises(InternalError, match="0 of 4 prompt tokens"):
        whole(make_form({"echo": True, "logprobs": 1}, PROMPTS[:1]))
    form = make_form({"echo": True, "logprobs": 1}, PROMPTS[:1])
    with pytest.raises(InternalError, match="prompt token 2 arrived too early"):
        form.absorb(PromptLogprobsEvent(2, (entry(3),)))


def test_chat_names_and_bytes():
    """The bytes of all entries, joined, are the answer; a special token has none in it."""
    ids = (2, 3, 4, 1)
    names = TokenNames(tokens())
    shown = chat_logprobs([entry(i, -1.0, (8, -0.5)) for i in ids], names)["content"]
    assert [one["token"] for one in shown] == ["a", r"\xf0\x9f", r"\x99\x82", "<s>"]
    assert [one["bytes"] for one in shown] == [[97], list(EMOJI[:2]), list(EMOJI[2:]), None]
    assert shown[0]["top_logprobs"] == [{"token": r" \xf0", "logprob": -0.5, "bytes": [32, 0xF0]}]
    joined = b"".join(bytes(one["bytes"] or ()) for one in shown)
    assert joined.decode() == text_of(list(ids))
