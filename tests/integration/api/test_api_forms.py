"""Tools, responses and tokens over HTTP, with the real openai client where it has the route."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.common.errors import WorkerLostError
from diptych.common.grammar import Grammar, GrammarKind, Tags
from diptych.common.sampling import FinishReason
from diptych.router.api.fake import MODEL, FakeRouterApi, Step, hello_script
from diptych.router.requests.messages import FinishedEvent, ModelFeatures, TokenEvent, UsageInfo
from diptych_tests.http_api import http, openai_client

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLER = ModelFeatures(tool_parser="hermes", reasoning=True, takes_tools=True)
LLAMA = ModelFeatures(tool_parser="llama3-json", takes_tools=True)


def says(*texts: str, reason: FinishReason = FinishReason.STOP) -> list[Step]:
    tokens: list[Step] = [TokenEvent(i, (10 + i,), text) for i, text in enumerate(texts)]
    return [*tokens, FinishedEvent(reason, UsageInfo(3, len(texts), 2), "", None, None)]


async def test_tool_calls_there_and_back() -> None:
    router_api = FakeRouterApi(says("Well.\n<tool", '_call>{"name": "add", "arguments": {"a"', ": 1}}</tool_call>"))
    router_api.model_features = CALLER
    async with openai_client(router_api) as client:
        ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL]}
        answer = await client.chat.completions.create(**ask, tool_choice="auto")
        message = answer.choices[0].message
        assert message.tool_calls is not None
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "Well.\n")
        call = message.tool_calls[0]
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
        assert parts[0].function is not None
        assert parts[0].function.name == "add"
        assert "".join(part.function.arguments or "" for part in parts if part.function) == '{"a": 1}'
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        said = message.model_dump(exclude_none=True)
        turns = [*MESSAGES, said, {"role": "tool", "tool_call_id": call.id, "content": "1"}]
        await client.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL])  # type: ignore[list-item]
    assert router_api.specs[0].tools == [TOOL]
    spec = router_api.specs[-1]
    assert isinstance(spec.messages, list)
    assert spec.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert spec.messages[2] == {"role": "tool", "content": "1", "tool_call_id": call.id}


async def test_promised_calls_are_grammars() -> None:
    router_api = FakeRouterApi(says('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'))
    router_api.model_features = CALLER
    other = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object"}, "strict": True}}
    async with http(router_api) as client:

        async def grammar(**body: Any) -> Tags | None:
            answer = await client.post(CHAT, json={"messages": MESSAGES, "tools": [TOOL, other]} | body)
            assert answer.status_code == 200, answer.text
            found = router_api.specs[-1].grammar
            assert found is None or isinstance(found, Grammar)
            return None if found is None else Tags.load(found.source)

        required = await grammar(tool_choice="required")
        assert required is not None
        assert (len(required.tags), required.several, required.trigger) == (2, True, "")
        one = await grammar(tool_choice="required", parallel_tool_calls=False)
        assert one is not None
        assert one.several is False
        named = await grammar(tool_choice={"type": "function", "function": {"name": "sub"}})
        assert named is not None
        assert [tag.begin for tag in named.tags] == ['<tool_call>\n{"name": "sub", "arguments": ']
        strict = await grammar(tool_choice="auto")
        assert strict is not None
        assert strict.trigger == "<tool_call>"
        assert await grammar(tools=[TOOL]) is None


PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


async def test_tools_with_response_format() -> None:
    """auto: calls that fit, or an answer that fits; required and by name: calls alone; none: the format alone."""
    said = '{"city": "Paris"}'
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    flat = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    router_api = FakeRouterApi(says(said))

    def grammar() -> Grammar:
        found = router_api.specs[-1].grammar
        assert isinstance(found, Grammar)
        return found

    async with http(router_api) as client:
        for features, tool in ((CALLER, TOOL), (CALLER, strict), (LLAMA, strict)):
            router_api.model_features = features
            ask: dict[str, Any] = {"messages": MESSAGES, "tools": [tool], "response_format": form}
            answer = (await client.post(CHAT, json=ask)).json()
            assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (said, "stop")
            tags = Tags.load(grammar().source)
            assert (json.loads(tags.instead), tags.trigger, len(tags.tags)) == (PLACE, "", 1)
            assert (json.loads(tags.tags[0].schema), tags.several) == ({"type": "object"}, True)
            one = await client.post(
                CHAT, json=ask | {"parallel_tool_calls": False, "response_format": {"type": "json_object"}}
            )
            assert one.status_code == 200
            tags = Tags.load(grammar().source)
            assert (json.loads(tags.instead), tags.several) == ({"type": "object"}, False)
            for choice in ("required", {"type": "function", "function": {"name": "add"}}):
                assert (await client.post(CHAT, json=ask | {"tool_choice": choice})).status_code == 200
                assert Tags.load(grammar().source).instead == ""
            assert (await client.post(CHAT, json=ask | {"tool_choice": "none"})).status_code == 200
            assert (grammar().kind, json.loads(grammar().source)) == (GrammarKind.JSON_SCHEMA, PLACE)
            assert (await client.post(CHAT, json=ask | {"response_format": {"type": "text"}})).status_code == (
                400 if features is LLAMA else 200
            )
        compact = {"structured_outputs": {"disable_any_whitespace": True}}
        assert (await client.post(CHAT, json=ask | compact)).status_code == 200
        assert grammar().compact
        text = {"format": {"type": "json_schema", "name": "place", "schema": PLACE}}
        answer = await client.post("/v1/responses", json={"input": "Hi", "tools": [flat], "text": text})
        assert answer.status_code == 200, answer.text
        assert json.loads(Tags.load(grammar().source).instead) == PLACE


async def test_tools_that_cannot_be_had_are_400() -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"properties": deep}

    def function(**facts: Any) -> dict[str, Any]:
        return {"tools": [{"type": "function", "function": {"name": "a"} | facts}]}

    bad: list[tuple[ModelFeatures, dict[str, Any], str]] = [
        (ModelFeatures(), {"tools": [TOOL]}, "tools"),
        (ModelFeatures(tool_parser="hermes"), {"tools": [TOOL]}, "tools"),
        (CALLER, {"tool_choice": "required"}, "tool_choice"),
        (CALLER, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        (CALLER, {"tools": [TOOL], "guided_regex": "a"}, "guided_regex"),
        (CALLER, {"tools": [TOOL], "tool_choice": 1}, "tool_choice"),
        (CALLER, {"tools": [TOOL] * 129}, "tools"),
        (CALLER, {"tools": [TOOL, TOOL]}, "tools"),
        (CALLER, function(name="a b"), "tools"),
        (LLAMA, function(strict=True), "tools"),
        (CALLER, function(parameters=deep), "tools"),
        (CALLER, function(parameters={"x": "y" * 70_000}), "tools"),
        (CALLER, {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        (CALLER, {"messages": [{"role": "user", "content": None}]}, "messages"),
        (CALLER, {"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        (CALLER, {"chat_template_kwargs": {str(i): 1 for i in range(17)}}, "chat_template_kwargs"),
    ]
    router_api = FakeRouterApi(hello_script())
    async with http(router_api) as client:
        for features, body, param in bad:
            router_api.model_features = features
            answer = await client.post(CHAT, json={"messages": MESSAGES} | body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (str(body)[:80], error)
        router_api.model_features = CALLER
        for body in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"tools": None, "tool_choice": "auto"}):
            assert (await client.post(CHAT, json={"messages": MESSAGES} | body)).status_code == 200
            assert router_api.specs[-1].tools is None


async def test_function_calls_in_responses() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    router_api = FakeRouterApi(says("Well.", call[:20], call[20:]))
    router_api.model_features = CALLER
    tool: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    async with openai_client(router_api) as client:
        ask: dict[str, Any] = {"model": MODEL, "tools": [tool], "tool_choice": "required"}
        answer = await client.responses.create(**ask, input="Hi")
        message, made = answer.output
        assert (answer.output_text, message.type, made.type) == ("Well.", "message", "function_call")
        assert made.type == "function_call"
        assert (made.name, made.arguments, made.status) == ("add", '{"a": 1}', "completed")
        seen = [event async for event in await client.responses.create(**ask, input="Hi", stream=True)]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        deltas = [event.delta for event in seen if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == '{"a": 1}'
        assert seen[-1].type == "response.completed"
        assert [item.type for item in seen[-1].response.output] == ["message", "function_call"]
        back: Any = [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": made.call_id, "name": "add", "arguments": made.arguments},
            {"type": "function_call_output", "call_id": made.call_id, "output": "1"},
        ]
        await client.responses.create(**ask, input=back)
    spec = router_api.specs[-1]
    assert isinstance(spec.grammar, Grammar)
    assert isinstance(spec.messages, list)
    assert spec.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert spec.messages[2] == {"role": "tool", "tool_call_id": made.call_id, "content": "1"}


CUT = '{"city": "Par'
_CALL_TO_ARGUMENTS = '<tool_call>{"name": "add", "arguments": '


async def test_a_truncated_call_is_taken_back() -> None:
    """A call truncated by finish_reason length is accepted in the history, on every API."""
    router_api = FakeRouterApi(says('<tool_call>{"name": "add", "arguments": ', CUT, reason=FinishReason.LENGTH))
    router_api.model_features = CALLER
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    async with openai_client(router_api) as client:
        ask: dict[str, Any] = {"model": MODEL, "tools": [TOOL]}
        choice = (await client.chat.completions.create(**ask, messages=MESSAGES)).choices[0]
        said: Any = choice.message.model_dump()
        assert (choice.finish_reason, said["tool_calls"][0]["function"]["arguments"]) == ("length", CUT)
        turns: list[Any] = [
            *MESSAGES,
            said,
            {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "?"},
        ]
        await client.chat.completions.create(**ask, messages=turns)
        chat: Any = router_api.specs[-1].messages

        answer = await client.responses.create(model=MODEL, tools=[tool], input="Hi")
        assert answer.status == "incomplete"
        items: Any = [*(item.model_dump() for item in answer.output), {"role": "user", "content": "Go on"}]
        await client.responses.create(model=MODEL, tools=[tool], input=items)
        responses: Any = router_api.specs[-1].messages
    for messages in (chat[1:], responses):
        assert messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": CUT}


@pytest.mark.parametrize("cut", [CUT, '{"city": "Paris"'])
async def test_a_call_that_a_stop_string_cuts_is_no_call_to_make(cut: str) -> None:
    """`tool_calls` promises complete JSON arguments."""
    router_api = FakeRouterApi(
        says('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', _CALL_TO_ARGUMENTS, cut)
    )
    router_api.model_features = CALLER
    async with openai_client(router_api) as client:
        ask: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "messages": MESSAGES, "stop": ["x"]}
        choice = (await client.chat.completions.create(**ask)).choices[0]
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
    said: Any = choice.message.tool_calls
    assert [call.function.arguments for call in said] == ['{"a": 1}', cut]
    assert (choice.finish_reason, chunks[-1].choices[0].finish_reason) == ("stop", "stop")


@pytest.mark.parametrize("arguments", ["[", "[1]", "null", "3", '"a"', '{"a": "\\ud83d"}', "{" * 9000, "1" * 5000])
async def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    router_api = FakeRouterApi(hello_script())
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    async with http(router_api) as client:
        answer = await client.post(CHAT, json={"messages": [{"role": "assistant", "tool_calls": [call]}, *MESSAGES]})
    assert answer.status_code == 200, answer.text
    messages: Any = router_api.specs[0].messages
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


async def test_responses() -> None:
    router_api = FakeRouterApi(hello_script())
    async with openai_client(router_api) as client:
        answer = await client.responses.create(model=MODEL, input="Hi", instructions="Be brief", max_output_tokens=9)
        assert (answer.output_text, answer.status) == ("Hello there", "completed")
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (3, 4, 7)
        assert answer.usage.input_tokens_details.cached_tokens == 2
        turns: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": "b", "type": "message"},
        ]
        seen = [event async for event in await client.responses.create(model=MODEL, input=turns, stream=True)]
    assert router_api.specs[0].messages == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]
    assert router_api.specs[0].sampling["max_tokens"] == 9
    assert router_api.specs[1].messages == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [event.type for event in seen] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in seen] == list(range(10))
    last: Any = seen[-1]
    assert last.response.output_text == "Hello there"


async def test_responses_that_are_cut_and_that_fail() -> None:
    async with http(FakeRouterApi(says("a", reason=FinishReason.LENGTH))) as client:
        body = (await client.post("/v1/responses", json={"input": "a"})).json()
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    async with http(FakeRouterApi([TokenEvent(0, (1,), "He"), WorkerLostError("gone")])) as client:
        answer = await client.post("/v1/responses", json={"input": "a", "stream": True})
        assert answer.text.rstrip().rsplit("\n\n", 1)[-1].startswith("event: error\n")
        assert "response.completed" not in answer.text
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"input": 1}, "input"),
        ({"input": "a", "previous_response_id": "x"}, "previous_response_id"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "tools": [TOOL]}, "tools"),
    ]
    async with http(FakeRouterApi(hello_script())) as client:
        for body, param in bad:
            answer = await client.post("/v1/responses", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body


async def test_tokenize_and_back() -> None:
    router_api = FakeRouterApi([])
    async with http(router_api) as client:
        answer = (await client.post("/tokenize", json={"prompt": "h\u00e9", "return_token_strs": True})).json()
        assert (answer["count"], answer["tokens"], answer["max_model_len"]) == (3, [204, 295, 269], 2048)
        assert answer["token_strs"][0] == "h"
        back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": "h\u00e9"}
        chat = await client.post("/tokenize", json={"messages": MESSAGES, "add_special_tokens": False})
        assert chat.json()["token_strs"] is None
        assert router_api.specs[-1].messages == MESSAGES
        bad: list[tuple[str, dict[str, Any], int]] = [
            ("/tokenize", {}, 400),
            ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400),
            ("/tokenize", {"prompt": "a", "model": "other"}, 404),
            ("/detokenize", {"tokens": "a"}, 400),
            ("/detokenize", {"tokens": [10**6]}, 400),
            ("/detokenize", {}, 400),
        ]
        for path, body, status in bad:
            assert (await client.post(path, json=body)).status_code == status, body
