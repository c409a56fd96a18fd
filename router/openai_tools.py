"""Tools of a chat request and the messages that speak of them: shapes and sizes are checked here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from diptych.common.errors import InvalidRequestError
from diptych.router.messages import ModelFeatures

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=True)


class Function(_Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None
    """True would promise that arguments always fit the schema: that needs a grammar."""

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("must be 1 to 64 letters, digits, '_', '.' or '-'")
        return name


class Tool(_Strict):
    type: Literal["function"]
    function: Function


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
    """As chat templates know them. Raises: InvalidRequestError."""
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, at: str) -> dict[str, Any]:
    # developer is the newer name of system; chat templates know the old one
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": message.content}
    if message.tool_calls and role != "assistant":
        raise InvalidRequestError(f"{at}: tool_calls are the assistant's", param="messages")
    if message.content is None:
        if not message.tool_calls:
            raise InvalidRequestError(f"{at}: content is missing", param="messages")
        out["content"] = ""
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call, at)},
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


def _arguments(call: ToolCallMessage, at: str) -> Any:
    """Templates print the object themselves."""
    try:
        value = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{at}: the arguments of {call.id!r} must be a JSON object", param="messages")
    return value


def offered_tools(
    tools: Sequence[Tool] | None, choice: object, features: ModelFeatures
) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    """(schemas for the chat template or None, names of the functions that may be called).

    Raises: InvalidRequestError for a tool_choice or a model that cannot have tools, and for schemas over the caps.
    """
    if choice not in (None, "none", "auto"):
        if isinstance(choice, dict) or choice == "required":
            raise InvalidRequestError(
                "tool_choice can be none or auto: a promised call needs a grammar, which is not built yet",
                param="tool_choice",
            )
        raise InvalidRequestError("tool_choice must be none, auto, required or an object", param="tool_choice")
    if not tools:
        return None, ()
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"at most {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    shown = [tool.model_dump(exclude_unset=True) for tool in tools]
    for tool, value in zip(tools, shown, strict=True):
        value["function"].pop("strict", None)
        check_schema(tool.function.parameters or {}, "tools")
    if choice == "none":
        return None, ()
    if features.tool_parser == "none" or not features.takes_tools:
        raise InvalidRequestError(
            "this model's chat template knows no tools that could be read back (see --tool-call-parser)", param="tools"
        )
    names = tuple(tool.function.name for tool in tools)
    if len(set(names)) < len(names):
        raise InvalidRequestError("two tools have the same name", param="tools")
    return shown, names


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """Raises: InvalidRequestError when it is larger or deeper than we take."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, (dict, list))
        ]
        if not level:
            break
    else:
        raise InvalidRequestError(f"a schema is nested more than {MAX_SCHEMA_DEPTH} levels deep", param=param)
    if len(json.dumps(schema, ensure_ascii=False).encode()) > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(f"a schema has more than {MAX_SCHEMA_BYTES} bytes", param=param)
