"""Tools, reasoning, constraints, resumption and idempotency over gRPC, with the SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from diptych.client import AsyncClient, InvalidRequestError, RetryPolicy
from diptych.common.errors import WorkerLostError
from diptych.common.grammar import Grammar, GrammarKind, Tags
from diptych.common.sampling import FinishReason
from diptych.router.api.fake import FakeRouterApi, Step, hello_script
from diptych.router.requests.messages import ChoiceFinishedEvent, FinishedEvent, ModelFeatures, TokenEvent, UsageInfo
from diptych_tests.http_api import api_servers

WAIT_S = 60.0
CALLER = ModelFeatures(tool_parser="hermes", reasoning=True, takes_tools=True)
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}

grpc.aio.init_grpc_aio()


@asynccontextmanager
async def sdk(router_api: FakeRouterApi, **options: Any) -> AsyncIterator[AsyncClient]:
    async with api_servers(router_api) as at:
        address = at.grpc
        async with AsyncClient(address, timeout_s=WAIT_S, **options) as client:
            yield client


def end(tokens: int) -> FinishedEvent:
    return FinishedEvent(FinishReason.STOP, UsageInfo(3, tokens, 2), "", None, None)


def says(*texts: str) -> list[Step]:
    return [*(TokenEvent(i, (10 + i,), text) for i, text in enumerate(texts)), end(len(texts))]


async def test_thoughts_content_and_calls_come_apart() -> None:
    parts = (
        "<think>h",
        "m</think>\n\nWell. <tool",
        '_call>{"name": "add", "arguments": {"a"',
        ": 1}}</tool_call>",
        "\n<to",
    )
    router_api = FakeRouterApi(says(*parts))
    router_api.model_features = CALLER
    async with sdk(router_api) as client:
        whole = await client.generate(**ASK, tools=[TOOL])
        assert whole.text == "".join(parts)
        assert (whole.reasoning, whole.content, whole.finish_reason) == ("hm", "Well. <to", "tool_calls")
        (call,) = whole.tool_calls
        assert (call.name, call.arguments) == ("add", '{"a": 1}')
        deltas = [delta async for delta in client.stream(**ASK, tools=[TOOL])]
        assert "".join(delta.content for delta in deltas) == whole.content
        assert "".join(delta.reasoning for delta in deltas) == whole.reasoning
        assert "".join(part.arguments for delta in deltas for part in delta.tool_calls) == call.arguments
        assert deltas[-1].token_ids == ()
        plain = await client.generate(**ASK)
        assert (plain.text, plain.content, plain.tool_calls) == (whole.text, "", ())
        said = {"role": "assistant", "content": "Well. ", "tool_calls": [call], "reasoning": "hm"}
        answer = {"role": "tool", "tool_call_id": call.id, "content": "1"}
        split = await client.generate(messages=[*ASK["messages"], said, answer], split=True)
        assert split.reasoning == "hm"
        assert split.finish_reason == "stop"
    spec = router_api.specs[-1]
    assert isinstance(spec.messages, list)
    assert spec.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert spec.messages[1]["reasoning_content"] == "hm"
    assert spec.messages[2]["tool_call_id"] == call.id
    assert router_api.specs[0].tools == [{"type": "function", "function": TOOL}]


async def test_several_choices_come_apart_each() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    steps: list[Step] = [
        TokenEvent(0, (1,), call, 0),
        TokenEvent(0, (2,), "No.", 1),
        ChoiceFinishedEvent(0, FinishReason.STOP, "", None),
        ChoiceFinishedEvent(1, FinishReason.STOP, "", None),
        end(2),
    ]
    router_api = FakeRouterApi(steps)
    router_api.model_features = CALLER
    async with sdk(router_api) as client:
        answer = await client.generate(**ASK, n=2, tools=[TOOL], tool_choice="auto", parallel_tool_calls=False)
    first, second = answer.choices
    assert (first.finish_reason, [made.name for made in first.tool_calls]) == ("tool_calls", ["add"])
    assert (second.finish_reason, second.content) == ("stop", "No.")


async def test_a_truncated_call_is_taken_back() -> None:
    router_api = FakeRouterApi(hello_script())
    router_api.model_features = CALLER
    call = {"id": "c", "name": "add", "arguments": '{"city": "Par'}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    async with sdk(router_api) as client:
        await client.generate(messages=turns, tools=[TOOL])
    messages: Any = router_api.specs[0].messages
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"city": "Par'}


async def test_grammars_and_promised_calls_on_the_wire() -> None:
    router_api = FakeRouterApi(hello_script())
    router_api.model_features = CALLER
    async with sdk(router_api) as client:

        async def grammar(**options: Any) -> Grammar:
            await client.generate(**ASK, **options)
            found = router_api.specs[-1].grammar
            assert isinstance(found, Grammar)
            return found

        schema = await grammar(json_schema={"type": "string"})
        assert (schema.kind, json.loads(schema.source)) == (GrammarKind.JSON_SCHEMA, {"type": "string"})
        assert await grammar(regex="[0-9]") == Grammar(GrammarKind.REGEX, "[0-9]")
        assert (await grammar(choice=["a", "空"])).source == '["a", "空"]'
        assert (await grammar(ebnf='root ::= "a"')).kind is GrammarKind.EBNF
        named = Tags.load((await grammar(tools=[TOOL], tool_choice="add")).source)
        assert (len(named.tags), named.several) == (1, False)
        assert Tags.load((await grammar(tools=[TOOL], tool_choice="required")).source).several
        both = await grammar(tools=[TOOL], json_schema={"type": "object"}, compact_json=True)
        assert (json.loads(Tags.load(both.source).instead), both.compact) == ({"type": "object"}, True)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"regex": "a", "choice": ["a"]}, "choice"),
        ({"regex": 3}, "regex"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"choice": []}, "choice"),
        ({"tools": [3]}, "tools"),
        ({"tools": [{"name": "a b"}]}, "tools"),
        ({"tools": [{"name": "a", "parameters": "{"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "nobody"}, "tool_choice"),
        ({"tools": [TOOL], "regex": "a"}, "regex"),
        ({"split": True, "resume_after": [1], "seed": 3}, "resume_after"),
    ],
)
async def test_what_cannot_be_had_names_its_field(options, param) -> None:
    router_api = FakeRouterApi(hello_script())
    router_api.model_features = CALLER
    async with sdk(router_api) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate(**ASK, **options)
    assert caught.value.param == param


async def test_a_stream_that_breaks_is_resumed_if_asked() -> None:
    script = says("a", "", "bc", "d", "")
    broken: list[Step] = [*script[:3], WorkerLostError("gone")]
    router_api = FakeRouterApi(broken)
    async with sdk(router_api, retry=RetryPolicy(base_s=0.01)) as client:
        with pytest.raises(WorkerLostError):
            await client.generate(**ASK)
        stream = client.stream(**ASK, resume=True, seed=9, idempotency_key="once")
        deltas = []
        async for delta in stream:
            deltas.append(delta)
            router_api.script = script
        assert [delta.offset for delta in deltas] == [0, 1, 2, 3, 4]
        assert (stream.result.text, stream.result.token_ids) == ("abcd", (10, 11, 12, 13, 14))
        assert stream.seed == 9
    first, second = router_api.specs[-2:]
    assert (first.resume_after, first.idempotency_key) == (None, "once")
    assert (second.resume_after, second.sampling["seed"], second.idempotency_key) == ([10, 11, 12], 9, "once~1")
