"""A stream that goes on after any of its messages, however the tokens come again: tools, reasoning, log probabilities, n > 1."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.errors import InternalError
from diptych.common.request import Prompt
from diptych.common.sampling import FinishReason, SamplingParams, TokenLogprobs
from diptych.common.text.token_bytes import ByteTokens
from diptych.router.api.http.event_ids import EventIds
from diptych.router.api.openai.fields import UnknownFields
from diptych.router.api.openai.format import ResponseContext
from diptych.router.api.openai.requests import chat_call, completion_call
from diptych.router.api.openai.responses import responses_call
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    ModelFeatures,
    PromptLogprobsEvent,
    TokenEvent,
    UsageInfo,
    ValidatedRequest,
)
from diptych.router.requests.resume import MAX_ID_CHARS, Refs, Seen, SeenChoice, Step, parse_seen
from diptych.router.requests.seam import Seam

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TEXTS = (
    '<think>hm</think>So<tool_call>{"name":"look","arguments":{"a":"é"}}</tool_call>'
    '<tool_call>{"name":"look","arguments":{}}</tool_call>',
    "<think>no</think>A <tool_ca is €1",
)
FEATURES = ModelFeatures(tool_parser="hermes", reasoning=True, takes_tools=True)
CASES = {
    "chat": (chat_call, {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True}),
    "tools": (
        chat_call,
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [TOOL],
            "n": 2,
            "logprobs": True,
            "top_logprobs": 1,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "completions": (completion_call, {"prompt": [1, 2, 3], "echo": True, "logprobs": 1, "n": 2}),
    "responses": (responses_call, {"input": "x", "tools": [{"type": "function", **TOOL["function"]}]}),
}


def form_of(name):
    build, body = CASES[name]
    call = build(body | {"stream": True}, features=FEATURES, unknown=UnknownFields(refuse=True))
    n = body.get("n", 1)
    request = ValidatedRequest(
        request_id="req-1", label="", model="m", prompt=Prompt((1, 2, 3)), explain=False, local_prefill_max_tokens=0,
        sampling=SamplingParams(max_tokens=500, n=n, logprobs=1 if "logprobs" in body else None), failure_policy=0,
        arrived=0.0, deadline=1.0, echo="abc" if body.get("echo") else "",
    )  # fmt: skip
    return call.make_form(ResponseContext(request, 17, FEATURES, ByteTokens(lambda i: bytes([i % 256])))), n


def script(name):
    """The answer's events, a byte of text a token; half characters have no text."""
    _, body = CASES[name]
    n = body.get("n", 1)
    events, tokens = [], {}
    if body.get("echo"):
        events += [PromptLogprobsEvent(i, (TokenLogprobs(i, -1.0, 1, ((i, -1.0),)),)) for i in (1, 2)]
    for choice in range(n):
        data, shown = TEXTS[choice].encode(), 0
        for offset, byte in enumerate(data):
            text = data[: offset + 1].decode(errors="ignore")
            logprobs = (TokenLogprobs(byte, -0.5, 1, ((byte, -0.5),)),) if "logprobs" in body else ()
            event = TokenEvent(offset, (byte,), text[shown:], choice, logprobs)
            tokens.setdefault(choice, []).append(event)
            shown = len(text)
    longest = max(map(len, tokens.values()))
    events += [mine[i] for i in range(longest) for mine in tokens.values() if i < len(mine)]
    if n > 1:
        events += [ChoiceFinishedEvent(choice, FinishReason.STOP, "", None) for choice in range(n)]
    num_tokens = sum(map(len, tokens.values()))
    return [*events, FinishedEvent(FinishReason.STOP, UsageInfo(3, num_tokens, 0), "", None, None)]


def streamed(name, events, seen=None):
    """(message, id) of the whole stream."""
    form, n = form_of(name)
    ids = EventIds(form, "ref", n, seen)
    out = ids.begin() + b"".join(map(ids.chunks, events))
    pairs = []
    for message in out.decode().split("\n\n")[:-1]:
        first, _, rest = message.partition("\n")
        assert first.startswith("id: ref.")
        pairs.append((rest, first.removeprefix("id: ref.")))
    return pairs


def joined(events, cuts, caught_up=None):
    """The same answer, its tokens merged between these cuts. `caught_up`: by choice, the tokens that are merged; those after
    them come as they are."""
    if caught_up is not None:
        first = [e for e in events if not (isinstance(e, TokenEvent) and e.offset >= caught_up[e.choice])]
        ends = [e for e in events if not isinstance(e, (TokenEvent, PromptLogprobsEvent))]
        rest = [e for e in events if e not in first]
        return [e for e in joined(first, []) if e not in ends] + rest + ends
    whole = {}
    others = {False: [], True: []}
    for event in events:
        if isinstance(event, TokenEvent):
            whole.setdefault(event.choice, []).append(event)
        else:
            others[bool(whole)].append(event)
    out = list(others[False])
    for mine in whole.values():
        for start, end in zip([0, *cuts], [*cuts, len(mine)], strict=True):
            if part := mine[start:end]:
                ids = tuple(token for event in part for token in event.token_ids)
                entries = tuple(entry for event in part for entry in event.logprobs)
                out.append(replace(part[0], token_ids=ids, text="".join(e.text for e in part), logprobs=entries))
    return out + others[True]


def content(pairs):
    """What a client makes of the messages, whatever the cuts between the tokens' messages; numbers have no gap."""
    text, rest, numbers = {}, [], []

    def add(place, value):
        text[place] = text[place] + value if place in text else value

    for message, _ in pairs:
        data = message.split("data: ", 1)[1]
        data = json.loads(data) if data != "[DONE]" else {"done": True}
        if "sequence_number" in data:
            numbers.append(data.pop("sequence_number"))
        if str(data.get("type")).endswith(".delta"):
            add(data["item_id"], data["delta"])
            continue
        if data.get("choices"):
            data.pop("usage", None)
        for usage in (data.get("usage"), data.get("response", {}).get("usage")):  # counted by events
            for details in ("completion_tokens_details", "output_tokens_details"):
                (usage or {}).pop(details, None)
        for choice in data.get("choices", ()):
            number = choice["index"]
            for name in ("token_ids", "logprobs"):
                if (value := choice.pop(name, None)) is not None:
                    for part, values in value.items() if isinstance(value, dict) else {name: value}.items():
                        if values is not None:
                            add((number, name, part), values)
            delta = choice.pop("delta", None)
            for name, value in (delta or {"text": choice.pop("text", "")}).items():
                if name == "tool_calls":
                    call = value[0]
                    add((number, call["index"]), call["function"]["arguments"])
                    if "id" in call:
                        add((number, "calls"), [call["id"], call["function"]["name"]])
                elif name == "role":
                    add((number, "roles"), [value])
                else:
                    add((number, name), value)
            if choice["finish_reason"]:
                rest.append((number, choice["finish_reason"]))
        if not data.get("choices"):
            rest.append(data)
    assert numbers in ([], list(range(len(numbers))))
    return text, rest


@pytest.mark.parametrize("name", list(CASES))
def test_after_every_message(name) -> None:
    """Where all comes again as before, to the byte; where what the caller has comes at once, as well; where all comes at once."""
    events = script(name)
    whole = streamed(name, events)
    expected = content(whole)
    assert len({event_id for _, event_id in whole}) == len(whole)
    if name in ("tools", "responses"):
        assert "look" in str(expected)
    for number, (_, event_id) in enumerate(whole):
        seen = parse_seen(event_id)
        assert seen is not None
        assert seen.text() == event_id
        again = streamed(name, events, seen)
        assert again == whole[number + 1 :], number
        if seen.step is None:
            caught_up = joined(events, [], [choice.num_tokens for choice in seen.choices])
            assert streamed(name, caught_up, seen) == whole[number + 1 :], number
        at_once = whole[: number + 1] + streamed(name, joined(events, []), seen)
        assert content(at_once) == expected, number


@settings(max_examples=60)
@given(st.data())
def test_however_the_tokens_come_again(data) -> None:
    name = data.draw(st.sampled_from(list(CASES)))
    events = script(name)
    first = joined(events, sorted(data.draw(st.sets(st.integers(1, 30), max_size=6))))
    whole = streamed(name, first)
    number = data.draw(st.integers(0, len(whole) - 1))
    seen = parse_seen(whole[number][1])
    again = joined(events, sorted(data.draw(st.sets(st.integers(1, 30), max_size=6))))
    assert content(whole[: number + 1] + streamed(name, again, seen)) == content(streamed(name, events))


def test_another_answer_is_not_put_behind_the_first_one() -> None:
    events = script("chat")
    whole = streamed("chat", events)
    seen = parse_seen(whole[20][1])
    other = [replace(e, token_ids=(1,)) if getattr(e, "offset", None) == 3 else e for e in events]
    for wrong in (other, [*events[:5], events[-1]]):
        with pytest.raises(InternalError, match="not the one that was begun"):
            streamed("chat", wrong, seen)
    with pytest.raises(InternalError, match="choice 1 arrived"):
        list(Seam(seen).parts(TokenEvent(0, (1,), "", 1)))


@given(st.lists(st.integers(0, 2**40), max_size=20), st.text("0123456789-", max_size=40))
def test_any_text_is_read_or_refused(numbers, text) -> None:
    for given_text in ("-".join(map(str, numbers)), text):
        seen = parse_seen(given_text)
        if seen is not None:
            assert parse_seen(seen.text()) == seen


def test_an_id_of_the_most_choices_is_not_too_long() -> None:
    most = Seen((SeenChoice(10**6, 10**7, 2**32 - 1, 10**6, True),) * 16, True, 10**6, Step(1, 15, 10**6, 10**7, 99))
    refs = Refs(bytes(32))
    ref = refs.issue("req-" + 24 * "a", "att-" + 24 * "b", b"1234", Prompt((1,)), SamplingParams(max_tokens=1, seed=5),
                     created=7, owner=b"o")  # fmt: skip
    assert len(f"{ref}.{most.text()}") < MAX_ID_CHARS
    point = refs.read(f"{ref}.{most.text()}", b"o", "p")
    assert (point.seen, point.request_id, point.attempt) == (most, "req-" + 24 * "a", "att-" + 24 * "b")
    assert (point.seed, point.max_tokens, point.created, point.worker) == (5, 1, 7, b"1234")
    assert refs.issue("req-fake", "att-" + 24 * "b", b"1234", Prompt((1,)), SamplingParams(max_tokens=1),
                      created=7, owner=b"o") == ""  # fmt: skip
