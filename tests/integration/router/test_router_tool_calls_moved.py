"""Decode workers that die in the middle of a tool call, over HTTP with the openai client: every parser, after every token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from diptych.router.tools.registry import BUILT_IN
from diptych_tests.http_api import WAIT_S, api_servers
from diptych_tests.router_fleet import make_model_folder, running

TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "get_weather")
]
BOTH = [("get_weather", '{"city": "Zürich \\"}", "n": [1, {"a": "]"}]}'), ("add", "{}")]
ANSWERS: dict[str, tuple[list[str], str, list[tuple[str, str]]]] = {
    "hermes": (
        ["Well.\n<tool", "_call>\n{", '"name": "get', '_weather", "argu', 'ments": {"city": "Zü', 'rich \\"}", "n": [1, {"a"',
         ': "]"}]}', "}\n</tool_", "call>\n<tool_call>", '{"name": "add", ', '"arguments": {', "}}</tool_call>"],
        "Well.\n",
        BOTH,
    ),
    "llama3-json": (
        ["<|python", '_tag|>{"na', 'me": "get', '_weather", "para', 'meters": {"city": "Zü', 'rich \\"}", "n": [1, {"a"',
         ': "]"}]}', '}; {"name', '": "add", ', '"parameters": {', "}}"],
        "",
        BOTH,
    ),
    "mistral": (
        ["[TOOL_", 'CALLS][{"na', 'me": "get', '_weather", "argu', 'ments": {"city": "Zü', 'rich \\"}", "n": [1, {"a"',
         ': "]"}]}', '}, {"name', '": "add", ', '"arguments": {', "}}", "]"],
        "",
        BOTH,
    ),
}  # fmt: skip
"""By parser: the texts of the tokens; the content and the calls in them."""


async def read(stream: openai.AsyncStream[Any]) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Content, (name, arguments) of each call, and the ids that came with its name."""
    content, calls, ids = "", list[tuple[str, str]](), list[str]()
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            if part.function.name:
                assert part.index == len(calls), "a call began twice"
                calls.append((part.function.name, ""))
                ids.append(part.id)
            name, arguments = calls[part.index]
            calls[part.index] = (name, arguments + (part.function.arguments or ""))
    return content, calls, ids


@pytest.mark.parametrize("parser", BUILT_IN)
async def test_killed_after_every_token_of_a_call(tmp_path: Path, parser: str) -> None:
    words, content, calls = ANSWERS[parser]
    folder = make_model_folder(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    async with running(folder, tmp_path, tool_call_parser=parser) as fleet, api_servers(fleet.frontend) as at:
        await fleet.add("p0", "prefill")
        holder = await fleet.add("d0")
        holder.words = words
        await fleet.until_ready()
        async with openai.AsyncOpenAI(
            base_url=f"http://{at.http}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        ) as client:
            ask: dict[str, Any] = {
                "model": (await client.models.list()).data[0].id, "messages": [{"role": "user", "content": "w1"}],
                "tools": TOOLS, "max_tokens": len(words), "stream": True,
            }  # fmt: skip
            assert (await read(await client.chat.completions.create(**ask)))[:2] == (content, calls)
            for cut in range(1, len(words)):
                holder.hold_from = cut
                stream = await client.chat.completions.create(**ask)
                reading = asyncio.create_task(read(stream))
                await fleet.until(lambda cut=cut, holder=holder: cut in holder.sent.values())
                heir = await fleet.add(f"d{cut}")
                heir.words = words
                await fleet.until_ready(decode=2)
                await holder.kill()
                got, got_calls, ids = await reading
                assert (got, got_calls) == (content, calls), f"killed after {words[:cut]}"
                assert len(set(ids)) == len(calls)
                assert len(heir.submits[0].output_token_ids) == cut
                await fleet.until_ready(decode=1)
                holder = heir
        assert fleet.no_reservations()
