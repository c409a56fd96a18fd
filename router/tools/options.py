"""Tools of a chat request and its messages about them: shapes and sizes are checked here."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind
from diptych.router.preprocess.structured import GrammarRequest, check_schema
from diptych.router.requests.messages import ModelFeatures
from diptych.router.tools.choice_grammar import CallForm, Function, calls_or_json, required_calls, strict_calls
from diptych.router.tools.registry import call_form

MAX_TOOLS = 128
MAX_MESSAGES = 20_000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=True)


class FunctionTool(_Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Arguments always match the schema."""

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("must be 1 to 64 letters, digits, '_', '.' or '-'")
        return name


class Tool(_Strict):
    type: Literal["function"]
    function: FunctionTool


class CalledFunction(_Strict):
    name: str
    arguments: str


class ToolCallMessage(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_text_parts(cls, content: object) -> object:
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError('content parts must be {"type": "text", "text": ...}: other kinds are not supported')
            texts.append(part["text"])
        return "\n".join(texts)


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """In the form of chat templates. Raises: InvalidRequestError."""
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, at: str) -> dict[str, Any]:
    # developer is the newer name of system; chat templates use the old one
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": message.content}
    if message.tool_calls and role != "assistant":
        raise InvalidRequestError(f"{at}: tool_calls are allowed in assistant messages only", param="messages")
    if message.content is None:
        if not message.tool_calls:
            raise InvalidRequestError(f"{at}: content is missing", param="messages")
        out["content"] = ""
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": called_arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if role == "tool":
        if not message.tool_call_id:
            raise InvalidRequestError(f"{at}: tool_call_id is missing", param="messages")
        out["tool_call_id"] = message.tool_call_id
    if message.reasoning_content and role == "assistant":
        out["reasoning_content"] = message.reasoning_content
    return out


def called_arguments(text: str) -> dict[str, Any] | str:
    """A call's arguments for a chat template: the object, which templates print themselves.

    Arguments that are not a JSON object stay text: an interrupted answer has such, and returns in the history. So does
    an object with half a surrogate pair, which cannot be printed.
    """
    try:
        value = json.loads(text or "{}")
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def text_beside(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> int:
    """Approximate number of characters of a prompt beside its messages' content: calls and tools, as JSON. `messages`:
    as returned by template_messages. Raises: InvalidRequestError."""
    calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
    if not calls and not tools:
        return 0
    try:
        return len(json.dumps([calls, tools], ensure_ascii=False))
    except RecursionError:
        raise InvalidRequestError("a call's arguments are nested too deeply", param="messages") from None


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of one request.

    Args:
        shown: for the chat template; None: the model sees no tools.
        names: of the functions that may be called.
        required: the grammar of required calls; None: none is required.
        form: how the model writes calls; None: unknown.
        several: more than one call is allowed.
    """

    shown: list[dict[str, Any]] | None = None
    names: tuple[str, ...] = ()
    required: Grammar | None = None
    functions: tuple[Function, ...] = ()
    form: CallForm | None = None
    several: bool = True

    def grammar_with(self, wanted: GrammarRequest | None) -> GrammarRequest | None:
        """The grammar when `wanted` is requested, too: a call's arguments match the function's schema, and an answer
        without a call matches the format.

        Raises: InvalidRequestError naming the field, for strict functions or a format that cannot be combined with this
            model's form of calls, and for a format other than JSON.
        """
        if self.required is not None:
            return GrammarRequest(self.required, "tool_choice")
        if not self.names:
            return wanted
        if wanted is None:
            strict = strict_calls(self.form, self.functions, several=self.several)
            return None if strict is None else GrammarRequest(strict, "tools")
        if wanted.grammar.kind is not GrammarKind.JSON_SCHEMA:
            rule = "can be combined with tools only if tool_choice is none; JSON formats always can"
            raise InvalidRequestError(f"{wanted.field} {rule}", param=wanted.field)
        if self.form is None:
            rule = "cannot be combined with tools in this model's format of calls"
            raise InvalidRequestError(f"{wanted.field} {rule}", param=wanted.field)
        both = calls_or_json(self.form, self.functions, wanted.grammar, several=self.several)
        return GrammarRequest(both, wanted.field)


def tool_options(
    tools: Sequence[Tool] | None, choice: object, features: ModelFeatures, *, parallel: bool = True
) -> ToolOptions:
    """Check the tools of a request. `parallel`: several calls are allowed. Raises: InvalidRequestError for a
    tool_choice or a model without support for tools, and for schemas over the limits."""
    named = _named(choice)
    if not tools:
        if named or choice == "required":
            raise InvalidRequestError("tool_choice requires a call, but there are no tools", param="tool_choice")
        return ToolOptions()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"at most {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    shown = [tool.model_dump(exclude_unset=True) for tool in tools]
    for tool, value in zip(tools, shown, strict=True):
        value["function"].pop("strict", None)
        if tool.function.parameters:
            check_schema(tool.function.parameters, "tools")
    if choice == "none":
        return ToolOptions()
    if features.tool_parser == "none" or not features.takes_tools:
        raise InvalidRequestError(
            "this model's chat template has no supported tool calls (see --tool-call-parser)", param="tools"
        )
    names = tuple(tool.function.name for tool in tools)
    if len(set(names)) < len(names):
        raise InvalidRequestError("two tools have the same name", param="tools")
    if named and named not in names:
        raise InvalidRequestError(f"tool_choice: there is no function {named!r} among the tools", param="tool_choice")
    form = call_form(features.tool_parser)
    functions = tuple(Function(f.name, f.parameters, bool(f.strict)) for f in (tool.function for tool in tools))
    if named:
        wanted = [function for function in functions if function.name == named]
        return ToolOptions(shown, (named,), required_calls(form, wanted, several=False))
    if choice == "required":
        return ToolOptions(shown, names, required_calls(form, functions, several=parallel))
    return ToolOptions(shown, names, None, functions, form, several=parallel)


def _named(choice: object) -> str:
    """The one function that must be called; empty: none. Raises: InvalidRequestError."""
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto", "required")):
        return ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        # chat nests it, responses does not
        inner = choice.get("function")
        name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
        if isinstance(name, str) and name:
            return name
    raise InvalidRequestError(
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )
