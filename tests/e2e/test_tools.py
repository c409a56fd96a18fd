"""Tool calls through the real cluster, for each format: one more router whose model folder has a chat template with
tools. Required calls are present and match their schemas; streams and whole answers agree."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema_rs
import openai
import pytest

from diptych_tests.tool_router import TEMPLATES, Face, face

pytestmark = pytest.mark.multiproc

FORMATS = [pytest.param("hermes", False, id="hermes")] + [
    pytest.param(name, True, id=f"{name} thorough", marks=pytest.mark.slow) for name in sorted(TEMPLATES)
]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", "東京", '\U0001f30d "anywhere"']},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "add": ADD, "now": {"type": "object", "maxProperties": 0}}


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    functions = [
        {"name": "get_weather", "description": "Tells it.", "parameters": WEATHER},
        {"name": "add", "parameters": ADD},
    ]
    functions.append({"name": "now"})
    return [{"type": "function", "function": function | ({"strict": True} if strict else {})} for function in functions]


ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Zürich for three days?"}]


Said = tuple[str, list[tuple[str, str]], str]
"""Content, (name, arguments) of each call, finish_reason."""


async def whole(face: Face, **body: Any) -> Said:
    extra = {"local_prefill_max_tokens": body.pop("local", 0), **body.pop("extra", {})}
    answer = await face.http.chat.completions.create(
        model=face.model,
        messages=body.pop("messages", ASK),
        seed=5,
        max_tokens=body.pop("max_tokens", 96),
        extra_body=extra,
        **body,
    )
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return choice.message.content or "", [(c.function.name, c.function.arguments) for c in calls], choice.finish_reason


async def streamed(face: Face, **body: Any) -> Said:
    stream = await face.http.chat.completions.create(
        model=face.model, messages=body.pop("messages", ASK), seed=5, max_tokens=96, stream=True,
        extra_body={"local_prefill_max_tokens": 0, **body.pop("extra", {})}, **body,
    )  # fmt: skip
    content, calls, finish, parts = "", [], "", 0
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or ():
                assert delta.function is not None
                if delta.function.name:
                    assert (delta.index, bool(delta.id)) == (len(calls), True)
                    calls.append([delta.function.name, ""])
                assert delta.index == len(calls) - 1
                calls[-1][1] += delta.function.arguments or ""
                parts += bool(delta.function.arguments)
    assert not calls or parts > 2 * sum(
        len(arguments) > 8 for _, arguments in calls
    )  # they arrive while they are generated
    return content, [(name, arguments) for name, arguments in calls], finish


def check_calls(said: Said, *, most: int | None = None, only: str | None = None) -> None:
    content, calls, finish = said
    assert (content, finish) == ("", "tool_calls")
    assert 1 <= len(calls) <= (most or len(calls))
    for name, arguments in calls:
        assert only in (None, name)
        assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(arguments)), (name, arguments)


@pytest.mark.parametrize(("name", "thorough"), FORMATS)
async def test_promised_calls(cluster, tmp_path, monkeypatch, name, thorough) -> None:
    async with face(cluster, name, tmp_path, monkeypatch) as here:
        assert here.frontend.features().tool_parser == name
        ask: dict[str, Any] = {"tools": tools(), "temperature": 0, "parallel_tool_calls": False}
        # With a format an answer is valid calls or valid JSON, wherever the prompt was computed. The same over gRPC and in
        # /v1/responses.
        form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD}}
        flat: list[Any] = [{"type": "function", **tool["function"]} for tool in tools()]
        required, required_stream, either, either_stream, either_local, answer, reported = await asyncio.gather(
            whole(here, tool_choice="required", **ask),
            streamed(here, tool_choice="required", **ask),
            whole(here, response_format=form, **ask),
            streamed(here, response_format=form, **ask),
            whole(here, response_format=form, local=4000, **ask),
            here.sdk.generate(messages=ASK, tools=tools(), tool_choice="add", seed=5, temperature=0, max_tokens=96),
            here.http.responses.create(
                model=here.model, input="Add!", tools=flat, tool_choice={"type": "function", "name": "add"},
                max_output_tokens=96, temperature=0,
            ),
        )  # fmt: skip
        check_calls(required, most=1)
        assert required_stream == required
        for wanted in SCHEMAS if thorough else ():  # "add" is sent over gRPC and in responses below
            choice = {"type": "function", "function": {"name": wanted}}
            named = await whole(here, tool_choice=choice, **ask)
            check_calls(named, most=1, only=wanted)
            if thorough:
                assert await streamed(here, tool_choice=choice, **ask) == named
        if thorough:
            assert await whole(here, tool_choice="required", local=4000, **ask) == required
            check_calls(await whole(here, tool_choice="required", **ask | {"temperature": 1.0}), most=1)
        if either[1]:
            check_calls(either, most=1)
        else:
            assert jsonschema_rs.is_valid(ADD, json.loads(either[0])), either
        assert either_stream == either_local == either
        assert answer.finish_reason == "tool_calls"
        assert [(call.name, jsonschema_rs.is_valid(ADD, json.loads(call.arguments))) for call in answer.tool_calls] == [
            ("add", True)
        ]
        assert [(item.type, jsonschema_rs.is_valid(ADD, json.loads(item.arguments))) for item in reported.output] == [
            ("function_call", True)
        ]
        with pytest.raises(openai.BadRequestError) as failure:
            await whole(here, tools=tools(), tool_choice={"type": "function", "function": {"name": "rm"}})
        assert failure.value.param == "tool_choice"
    await asyncio.to_thread(cluster.wait_idle)


def history() -> list[dict[str, Any]]:
    """A conversation in which every question was answered by a call: small models go on like that."""
    turns: list[dict[str, Any]] = []
    for i, city in enumerate(("Zürich", "東京", "Zürich")):
        identifier = f"abcdefgh{i}"
        call = {"id": identifier, "type": "function"}
        call["function"] = {
            "name": "get_weather",
            "arguments": json.dumps({"city": city, "days": i + 1}, ensure_ascii=False),
        }
        turns += [
            {"role": "user", "content": f"Weather in {city}, {i + 1} days?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": identifier, "content": "sunny"},
        ]
    return [*turns, {"role": "user", "content": "Weather in 東京, 4 days?"}]


@pytest.mark.parametrize(("name", "thorough"), FORMATS)
async def test_calls_that_the_model_may_make(cluster, tmp_path, monkeypatch, name, thorough) -> None:
    async with face(cluster, name, tmp_path, monkeypatch) as here:
        ask = {"messages": history(), "tools": tools(), "temperature": 0}
        said, said_stream, silent = await asyncio.gather(
            whole(here, tool_choice="auto", **ask),
            streamed(here, tool_choice="auto", **ask),
            whole(here, tool_choice="none", max_tokens=12, **ask),
        )
        assert said_stream == said
        content, calls, finish = said
        assert (finish, content, [call[0] for call in calls]) == ("tool_calls", "", ["get_weather"]), said
        assert json.loads(calls[0][1])["city"]
        # Nothing is read as a call where none may be: it is the answer's text.
        assert silent[1] == []
        assert silent[2] in ("stop", "length")
        if thorough and name != "llama3-json":  # there a call is only distinguished from text at its end
            strict = ask | {"tools": tools(strict=True)}
            promised = await whole(here, **strict)
            assert await streamed(here, **strict) == promised
            for wanted, arguments in promised[1]:
                assert jsonschema_rs.is_valid(SCHEMAS[wanted], json.loads(arguments))
    await asyncio.to_thread(cluster.wait_idle)
