"""Every kind of answer and chunk, held against the OpenAI API's schema."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import httpx
import pytest

from diptych.common.errors import OverloadedError, WorkerLostError
from diptych.common.sampling import FinishReason, TokenLogprobs
from diptych.router.api.fake import MODEL, FakeRouterApi, Step, hello_script
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    ModelFeatures,
    PromptLogprobsEvent,
    TokenEvent,
    UsageInfo,
)
from diptych_tests.http_api import http
from diptych_tests.openai_contract import read

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
KINDS = {CHAT: "chat", TEXT: "completion", RESPONSES: "response"}
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT: {"prompt": [1, 2, 3]},
    RESPONSES: {"input": "Hi"},
}
CALLER = ModelFeatures(tool_parser="hermes", reasoning=True, takes_tools=True)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
FUNCTION: dict[str, Any] = {"name": "add", "parameters": {"type": "object"}}
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}


def entry(token_id: int, logprob: float = -0.5) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 2, ((65, -0.25), (token_id, logprob), (255, -math.inf)))


def ended(reason: FinishReason = FinishReason.STOP, tokens: int = 4) -> FinishedEvent:
    return FinishedEvent(reason, UsageInfo(3, tokens, 2), "", None, None)


def texts(*parts: str, reason: FinishReason = FinishReason.STOP) -> list[Step]:
    return [*(TokenEvent(i, (101 + i,), part) for i, part in enumerate(parts)), ended(reason, len(parts))]


LOGPROBS: list[Step] = [
    TokenEvent(0, (172,), "H", logprobs=(entry(172),)),
    TokenEvent(1, (295,), "", logprobs=(entry(295, -math.inf),)),  # half a character
    TokenEvent(2, (269, 7), "\u00e9", logprobs=(entry(269), entry(7))),
    ended(),
]
PROMPT_LOGPROBS: list[Step] = [PromptLogprobsEvent(1, (entry(2), entry(3))), *LOGPROBS]
SEVERAL: list[Step] = [
    TokenEvent(0, (110,), "a"),
    TokenEvent(0, (111,), "b", choice=1),
    ChoiceFinishedEvent(1, FinishReason.LENGTH, "", None),
    TokenEvent(1, (112,), "c"),
    FinishedEvent(FinishReason.STOP, UsageInfo(3, 3, 0), "", 7, None),
]
TOOLS = {
    CHAT: {"tools": [{"type": "function", "function": FUNCTION}]},
    RESPONSES: {"tools": [{"type": "function"} | FUNCTION]},
}
STRICT = {"type": "function", "strict": True, "description": "Adds"} | FUNCTION

CASES: list[tuple[str, str, list[Step], dict[str, Any]]] = [
    *(("plain", path, hello_script(), {}) for path in KINDS),
    *(("explained", path, hello_script(), {"explain": True}) for path in KINDS),
    *(("empty", path, [ended(tokens=0)], {}) for path in KINDS),
    *(("cut", path, texts("a", reason=FinishReason.LENGTH), {}) for path in KINDS),
    *(("thoughts", path, texts("<think>", "well", "</think>", "yes"), {}) for path in KINDS),
    *(("ids", path, hello_script(), {"return_token_ids": True}) for path in (CHAT, TEXT)),
    *(("several", path, SEVERAL, {"n": 2}) for path in (CHAT, TEXT)),
    *(("calls", path, texts("Well.", CALL[:20], CALL[20:], CALL), TOOLS[path]) for path in TOOLS),
    *(("calls alone", path, texts(CALL[:20], CALL[20:]), TOOLS[path]) for path in TOOLS),
    *(("a cut call", path, texts(CALL[:50], reason=FinishReason.LENGTH), TOOLS[path]) for path in TOOLS),
    ("usage", CHAT, hello_script(), {"stream_options": {"include_usage": True}}),
    ("usage", TEXT, hello_script(), {"stream_options": {"include_usage": True}}),
    ("all usage", CHAT, SEVERAL, {"n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("all usage", TEXT, SEVERAL, {"n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("logprobs", CHAT, LOGPROBS, {"logprobs": True, "top_logprobs": 3}),
    ("logprobs alone", CHAT, LOGPROBS, {"logprobs": True}),
    ("logprobs", TEXT, LOGPROBS, {"logprobs": 3}),
    ("logprobs alone", TEXT, LOGPROBS, {"logprobs": 0}),
    ("names", TEXT, LOGPROBS, {"logprobs": 3, "return_tokens_as_token_ids": True}),
    ("prompt logprobs", CHAT, PROMPT_LOGPROBS, {"prompt_logprobs": 2, "stream": False}),
    ("prompt logprobs", TEXT, PROMPT_LOGPROBS, {"prompt_logprobs": 2, "stream": False}),
    ("echo", TEXT, hello_script(), {"prompt": "Hi", "echo": True}),
    ("echo with logprobs", TEXT, PROMPT_LOGPROBS, {"echo": True, "logprobs": 2}),
    ("several prompts", TEXT, hello_script(), {"prompt": ["a", "b"]}),
    ("a format", RESPONSES, texts("{}"), {"text": {"format": {"type": "json_schema", "schema": PLACE}}}),
    ("a format", RESPONSES, texts("{}"), {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}),
    ("all told", RESPONSES, texts("a"), {
        "instructions": "Be brief", "metadata": {"a": "b"}, "max_output_tokens": 16, "user": "me", "temperature": 0.5,
        "top_p": 0.5, "tools": [STRICT, {"type": "web_search"}], "parallel_tool_calls": False,
        "reasoning": {"effort": "low"}, "tool_choice": {"type": "function", "name": "add"},
    }),
    ("chat's form of a choice", RESPONSES, texts(CALL), {
        "tools": [STRICT], "tool_choice": {"type": "function", "function": {"name": "add"}},
    }),
    ("none", RESPONSES, texts("a"), {"tools": [STRICT], "tool_choice": "none"}),
]  # fmt: skip


async def ask(client: httpx.AsyncClient, path: str, fields: dict[str, Any], *, stream: bool) -> httpx.Response:
    more = {name: value for name, value in fields.items() if name != "explain"}
    headers = {"x-diptych-explain": "1"} if fields.get("explain") else {}
    if not stream:
        more.pop("stream_options", None)
    return await client.post(path, json=ASK[path] | {"stream": stream} | more, headers=headers)


def data_of(path: str, text: str) -> list[str]:
    """The payloads of a stream, without the end."""
    events = [event for event in text.split("\n\n") if event]
    if path == RESPONSES:
        parts = [event.split("\ndata: ", 1) for event in events]
        for kind, payload in parts:
            assert kind == "event: " + json.loads(payload)["type"]
        return [payload for _, payload in parts]
    *events, done = [event.removeprefix("data: ") for event in events]
    assert done == "[DONE]"
    return events


@pytest.mark.parametrize(("name", "path", "script", "fields"), CASES, ids=[f"{name}{path}" for name, path, *_ in CASES])
async def test_every_answer_and_chunk_fits_the_schema(
    name: str, path: str, script: list[Step], fields: dict[str, Any]
) -> None:
    router_api = FakeRouterApi(script)
    router_api.model_features = CALLER
    async with http(router_api) as client:
        whole = await ask(client, path, fields, stream=False)
        assert whole.status_code == 200, whole.text
        answer = read(KINDS[path], whole.content)
        if fields.get("stream") is False:
            return
        streamed = await ask(client, path, fields, stream=True)
    payloads = data_of(path, streamed.text)
    if path == RESPONSES:
        events = [read("response event", payload) for payload in payloads]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        drawn = {"created_at": True, "output": {"__all__": {"call_id"}}}
        assert events[-1].response.model_dump(exclude=drawn) == answer.model_dump(exclude=drawn)
        return
    chunks = [read(f"{KINDS[path]} chunk", payload) for payload in payloads]
    assert len({(chunk.id, chunk.model, chunk.object) for chunk in chunks}) == 1
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == sorted(choice.finish_reason for choice in answer.choices)
    usages = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert all(before <= after for before, after in pairwise(usages))


async def test_every_failure_fits_the_schema() -> None:
    router_api = FakeRouterApi([TokenEvent(0, (1,), "He"), WorkerLostError("gone")])
    full = FakeRouterApi([], refuse=OverloadedError("full"))
    async with http(router_api) as client, http(full) as busy:
        for path in KINDS:
            answers = [
                await client.post(path, json={}),
                await client.post(path, content=b"{"),
                await client.post(path, json=ASK[path] | {"model": "other"}),
                await client.post(path, json=ASK[path] | {"temperature": "hot"}),
                await client.post(path, content=b"x", headers={"content-encoding": "gzip"}),
                await client.post(path, json=ASK[path]),
                await client.get(path),
                await busy.post(path, json=ASK[path]),
            ]
            assert [answer.status_code for answer in answers] == [400, 400, 404, 400, 415, 503, 405, 529]
            for answer in answers:
                read("error", answer.content)
            text = (await client.post(path, json=ASK[path] | {"stream": True})).text
            last = text.rstrip().rsplit("\n\n", 1)[-1]
            read("response event" if path == RESPONSES else "error", last.split("data: ", 1)[1])
        for path in ("/v1/embeddings", "/nowhere", "/v1/models/other"):
            read("error", (await client.get(path)).content)


async def test_models_fit_the_schema() -> None:
    async with http(FakeRouterApi([])) as client:
        assert [model.id for model in read("models", (await client.get("/v1/models")).content).data] == [MODEL]
        read("model", (await client.get(f"/v1/models/{MODEL}")).content)


INTEGERS: list[tuple[str, dict[str, Any], int, int]] = [
    ("seed", {}, -(2**63), 2**63 - 1),
    ("max_tokens", {}, 1, 2**31 - 1),
    ("top_logprobs", {"logprobs": True}, 0, 20),
]


@pytest.mark.parametrize(("field", "beside", "least", "most"), INTEGERS, ids=[one[0] for one in INTEGERS])
async def test_integers_have_the_ranges_of_the_schema(
    field: str, beside: dict[str, Any], least: int, most: int
) -> None:
    async with http(FakeRouterApi(LOGPROBS)) as client:
        for value in (least, most):
            answer = await client.post(CHAT, json=ASK[CHAT] | beside | {field: value})
            assert answer.status_code != 400, (value, answer.text)
        for value in (least - 1, *([] if field == "seed" else [most + 1])):  # seeds go on to 2**64
            answer = await client.post(CHAT, json=ASK[CHAT] | beside | {field: value})
            assert (answer.status_code, read("error", answer.content).error.param) == (400, field), value


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("error", {"error": {"message": "a", "type": "b", "param": None}}),
        ("error", {"error": {"message": None, "type": "b", "param": None, "code": None}}),
        ("model", {"id": "m", "object": "model", "created": "1", "owned_by": "x"}),
        ("model", {"id": "m", "object": "model", "created": 1, "owned_by": "x", "colour": "red"}),
        ("model", {"id": "m", "object": "model", "created": -1, "owned_by": "x"}),
        ("model", {"id": "m", "object": "model", "created": 1, "owned_by": "x", "shutdown_date": None}),
        ("completion", {"id": "a", "object": "text_completion", "created": 1, "model": "m", "choices": []}),
    ],
)
def test_the_schema_is_read_strictly(kind: str, payload: dict[str, Any]) -> None:
    with pytest.raises((ValueError, AssertionError)):
        read(kind, json.dumps(payload))
