"""Grammars for tool calls: the calls that tool_choice requires, or arguments that always match the schema (strict).

A parser defines how its model writes a call; these grammars generate the same form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind, Tag, Tags

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls: head, then calls with a separator between them, then tail.

    Args:
        begin, end: around a call's arguments; `begin` contains NAME in place of the function's name.
        trigger: text that begins a call in the middle of a text, and nothing else; empty: there is none.
    """

    begin: str
    end: str
    separator: str
    head: str = ""
    tail: str = ""
    trigger: str = ""


HERMES_FORM = CallForm('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", trigger="<tool_call>")
LLAMA3_JSON_FORM = CallForm('{"name": "NAME", "parameters": ', "}", "; ")
MISTRAL_FORM = CallForm(
    '{"name": "NAME", "arguments": ', "}", ", ", head="[TOOL_CALLS][", tail="]", trigger="[TOOL_CALLS]"
)


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. `parameters`: JSON schema of its arguments; None: it has none."""

    name: str
    parameters: dict[str, Any] | None
    strict: bool = False


def required_calls(form: CallForm | None, functions: Sequence[Function], *, several: bool) -> Grammar:
    """The answer is one or more calls and nothing else. Raises: InvalidRequestError for a model whose form of calls is
    unknown."""
    if form is None:
        raise InvalidRequestError("tool_choice: calls cannot be enforced in this model's format", param="tool_choice")
    tags = tuple(_tag(form, function, _schema(function)) for function in functions)
    wanted = Tags(tags, form.head, form.tail, form.separator, several)
    return Grammar(GrammarKind.TAGS, wanted.dump())


def calls_or_json(form: CallForm, functions: Sequence[Function], wanted: Grammar, *, several: bool) -> Grammar:
    """The answer is valid calls and nothing else, or matches `wanted`. `wanted`: a JSON schema."""
    tags = tuple(_tag(form, function, _schema(function)) for function in functions)
    both = Tags(tags, form.head, form.tail, form.separator, several, instead=wanted.source)
    return Grammar(GrammarKind.TAGS, both.dump(), compact=wanted.compact)


def strict_calls(form: CallForm | None, functions: Sequence[Function], *, several: bool) -> Grammar | None:
    """Free text and calls, but arguments of strict functions match their schemas. None: no function is strict. Raises:
    InvalidRequestError for a model whose calls cannot be distinguished from text."""
    if not any(function.strict for function in functions):
        return None
    if form is None or not form.trigger:
        raise InvalidRequestError(
            "tools: strict requires tool_choice=required in this model's format of calls", param="tools"
        )
    tags = tuple(
        _tag(form, function, _schema(function) if function.strict else _ANY_ARGUMENTS, form.head, form.tail)
        for function in functions
    )
    return Grammar(GrammarKind.TAGS, Tags(tags, several=several, trigger=form.trigger).dump())


def _schema(function: Function) -> dict[str, Any]:
    return _NO_ARGUMENTS if not function.parameters else function.parameters


def _tag(form: CallForm, function: Function, schema: dict[str, Any], head: str = "", tail: str = "") -> Tag:
    return Tag(
        head + form.begin.replace("NAME", function.name), json.dumps(schema, ensure_ascii=False), form.end + tail
    )
