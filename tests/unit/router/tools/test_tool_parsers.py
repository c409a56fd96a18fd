"""Tool calls and thoughts in an answer's text: every format, every way to cut it, broken ones, and time."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diptych.common.errors import ConfigError
from diptych.router.tools.pieces import CallArguments, CallStart, Content, Piece, Reasoning, ToolParser
from diptych.router.tools.reasoning import ReasoningSplitter
from diptych.router.tools.registry import BUILT_IN, guess_tool_parser, id_maker, tool_factory

NAMES = ("get_weather", "add", "f")
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich \\"}", "n": [1, {"a": "]"}]}}'
ARGS = '{"city": "Zürich \\"}", "n": [1, {"a": "]"}]}'


def make(name: str) -> ToolParser:
    count = itertools.count()
    return BUILT_IN[name](NAMES, lambda: f"id{next(count)}")


def read(parser: Any, parts: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, reasoning, calls), after checking the order of the pieces."""
    pieces: list[Piece] = [piece for part in parts for piece in parser.feed(part)] + parser.end()
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(calls)
            assert piece.id == f"id{piece.index}"
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, reasoning, calls


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Hello <b>", "Hello <b>", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("get_weather", ARGS)]),
    ("hermes", f"Well:\n<tool_call>{CALL}</tool_call>", "Well:\n", [("get_weather", ARGS)]),
    (
        "hermes",
        f'<tool_call>{CALL}</tool_call>\n\n<tool_call>{{"arguments":{{}},"name":"add"}}</tool_call>\n',
        "",
        [("get_weather", ARGS), ("add", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> done', "done", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "x": [1,"}"], "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "rm_rf", "arguments": {}}</tool_call>', None, []),  # type: ignore[list-item]
    ("hermes", "<tool_call>not json</tool_call>", None, []),  # type: ignore[list-item]
    ("hermes", '<tool_call>{"name": "f", "argu', None, []),  # type: ignore[list-item]
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
    ("hermes", "ends with <tool_", "ends with <tool_", []),
    ("llama3-json", "Just text {", "Just text {", []),
    ("llama3-json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    ("llama3-json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (
        "llama3-json",
        ' {"name": "add", "parameters": {}}; {"name": "f", "parameters": {"b": 2}} ',
        "",
        [("add", "{}"), ("f", '{"b": 2}')],
    ),
    ("llama3-json", '{"name": "add", "age": 3}', None, []),  # type: ignore[list-item]
    ("llama3-json", '{"name": "Bob", "parameters": {}}', None, []),  # type: ignore[list-item]
    ("llama3-json", '{"a": 1}', None, []),  # type: ignore[list-item]
    ("llama3-json", "<|python", "<|python", []),
    ("mistral", "Text [1] [x", "Text [1] [x", []),
    ("mistral", f"[TOOL_CALLS][{CALL}]", "", [("get_weather", ARGS)]),
    (
        "mistral",
        f'[TOOL_CALLS] [ {CALL}, {{"name": "add", "arguments": {{}}}} ]',
        "",
        [("get_weather", ARGS), ("add", "{}")],
    ),
    ("mistral", f"[{CALL}]", "", [("get_weather", ARGS)]),
    ("mistral", f"Look: [TOOL_CALLS]get_weather{ARGS}", "Look: ", [("get_weather", ARGS)]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]f {"b": 2}', "", [("add", '{"a": 1}'), ("f", '{"b": 2}')]),
    ("mistral", "[TOOL_CALLS]rm_rf{}", None, []),  # type: ignore[list-item]
    ("mistral", "[TOOL_CALLS]ad", None, []),  # type: ignore[list-item]
    ("mistral", "[1, 2]", "[1, 2]", []),
    ("mistral", '[{"a": 1}]', None, []),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_formats_in_every_cut(name: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    expected = (text if content is None else content, "", calls)
    assert read(make(name), [text]) == expected
    assert read(make(name), list(text)) == expected
    for at in range(len(text)):
        assert read(make(name), [text[:at], text[at:]]) == expected, at
    for _, arguments in calls:
        if arguments.endswith("}"):
            json.loads(arguments)


_WORDS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    CALL,
    '{"name": "f", "parameters":',
    "{}",
    "}",
]
_WORDS += [
    "[",
    "]",
    ",",
    ";",
    " ",
    "\n",
    '"',
    "f",
    "add",
    "text",
    '{"name":',
    '"f"',
    "\\",
    "<think>",
    "</think>",
    "[{",
    "<",
    "é",
]
_TEXTS = st.lists(st.sampled_from(_WORDS), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    text=_TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8), name=st.sampled_from([*BUILT_IN, "think", "thinking"])
)
@example(text="[TOOL_CALLS]" + " " * 400 + "f{}", cuts=list(range(200)), name="mistral")
@example(text='{"name": "f", "parameters":{};</think>', cuts=[], name="llama3-json")  # a call, then what does not fit
@example(text='<tool_call>{"name": "g", "<tool_call>{"name": "f", "arguments": {}}', cuts=[], name="hermes")
@example(
    text='<tool_call>{"name":' + " " * 5000 + '"f"<tool_call>{"name": "f", "arguments": {}}', cuts=[], name="hermes"
)
@example(text=" " * 100 + "<think>a", cuts=list(range(200)), name="think")
def test_the_cut_changes_nothing_and_no_text_is_made_up(text: str, cuts: list[int], name: str) -> None:
    def fresh() -> Any:
        return make(name) if name in BUILT_IN else ReasoningSplitter(thinking=name == "thinking")

    points = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in itertools.pairwise(points)]
    whole = read(fresh(), [text])
    assert read(fresh(), parts) == whole
    assert read(fresh(), list(text)) == whole
    content, reasoning, calls = whole
    assert len(content) + len(reasoning) + sum(len(arguments) for _, arguments in calls) <= len(text) + 2 * len(calls)
    assert all(call in NAMES for call, _ in calls)


HOSTILE: list[tuple[str, Callable[[int], str]]] = [
    ("hermes", lambda n: "<tool_call>" * (n // 11)),
    ("hermes", lambda n: "<tool_call>" + "{" * n),
    ("hermes", lambda n: '<tool_call>{"name": "f", "arguments": ' + "[" * n),
    ("hermes", lambda n: f"<tool_call>{CALL}</tool_call>" + " " * n),
    ("llama3-json", lambda n: " " * n),
    ("llama3-json", lambda n: '{"name": "f", "parameters": {}}' + "; " * n),
    ("llama3-json", lambda n: "<|python_tag|>" * (n // 14)),
    ("mistral", lambda n: "[" * n),
    ("mistral", lambda n: "[TOOL_CALLS]a" * (n // 13)),
    ("mistral", lambda n: "[TOOL_CALLS]" + "a" * n),
    ("mistral", lambda n: "[TOOL_CALLS][" + "," * n),
]


@pytest.mark.parametrize(("name", "text"), HOSTILE)
def test_time_is_linear(name: str, text: Callable[[int], str]) -> None:
    """CPU time with a wide margin: sixteen times the text may cost 64 times as much; a quadratic parser needs 256."""

    def cost(n: int) -> float:
        best = float("inf")
        for _ in range(3):
            parser, parts = make(name), list(text(n))
            began = time.process_time()
            for part in parts:
                parser.feed(part)
            parser.end()
            best = min(best, time.process_time() - began)
        return best

    assert cost(48_000) < 64 * cost(3_000) + 0.05


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes", False, "Hm.\n", "Yes"),
        (" \n<think>a</think>b", False, "a", "b"),
        ("Hm.</think>\nYes", True, "Hm.", "Yes"),
        ("No thoughts <think>", False, "", "No thoughts <think>"),
        ("<think>cut", False, "cut", ""),
        ("<think>a</thin", False, "a</thin", ""),
        ("<thi", False, "", "<thi"),
        ("<think></think>", False, "", ""),
    ],
)
def test_thoughts(text: str, thinking: bool, reasoning: str, content: str) -> None:
    for parts in ([text], list(text)):
        assert read(ReasoningSplitter(thinking=thinking), parts) == (content, reasoning, [])


def test_registry_and_guess() -> None:
    assert guess_tool_parser("... <tool_call> ...") == "hermes"
    assert guess_tool_parser("[TOOL_CALLS]") == "mistral"
    assert guess_tool_parser("plain") == "none"
    assert tool_factory("hermes") is BUILT_IN["hermes"]
    with pytest.raises(ConfigError, match="llama3-json"):
        tool_factory("nonsense")
    assert len(id_maker("mistral", "req-1/0")()) == 9
    ids = id_maker("hermes", "req-1/0")
    first = [ids(), ids()]
    assert all(one.startswith("call_") for one in first)
    again, other = id_maker("hermes", "req-1/0"), id_maker("hermes", "req-1/1")
    assert [again(), again()] == first
    assert len({*first, other()}) == 3
