"""The basic form of the Responses API: text and function calls in, text and function calls out. Nothing is stored.

Agents built for OpenAI's server send more. A field that only offers the model a capability (a web search, a shell) is
dropped with a warning in the response; one that would change the conversation (an image, a stored item) is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from diptych.common.errors import InvalidRequestError
from diptych.router.api.openai.fields import RESPONSES_NOT_BUILT, UnknownFields, reject_unsupported
from diptych.router.api.openai.format import ResponseOptions
from diptych.router.api.openai.requests import (
    Items,
    ParsedRequest,
    Sampled,
    grammar_of,
    note_unknown,
    spec_fields,
    template_kwargs,
    validate,
)
from diptych.router.api.openai.responses_format import ResponsesForm
from diptych.router.requests.messages import ModelFeatures, UncheckedRequest
from diptych.router.tools.options import MAX_MESSAGES, FunctionTool, Tool, called_arguments, text_beside, tool_options

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kind of a content part -> its field with the text."""

_OTHER_TOOLS = frozenset({
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
})  # fmt: skip
"""Tools of the API that are not supported: the model does not see them."""
_IGNORED_ITEMS = frozenset({
    "code_interpreter_call", "file_search_call", "image_generation_call", "mcp_approval_request",
    "mcp_approval_response", "mcp_call", "mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call",
})  # fmt: skip
"""Actions of another server; their results are in its message."""
_CALLS: Mapping[str, str] = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
}
"""Calls that the client has executed -> the field of their arguments. They become ordinary calls in the history."""
_OUTPUTS = frozenset({"function_call_output", *(f"{kind}_output" for kind in _CALLS)})
_NOTHING_TO_INCLUDE = frozenset({
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results",
})  # fmt: skip
"""Item fields that no response of this server has."""


class _Options(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class TextOptions(_Options):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """A hint that no model uses: ignored."""


class ReasoningOptions(_Options):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Sampled):
    """Body of POST /v1/responses."""

    input: str | Annotated[Items[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: Items[str] | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: dict[str, Any] | None = None
    """The API defines only include_obfuscation: padding, which is never sent here."""


def responses_call(body: dict[str, Any], *, features: ModelFeatures, unknown: UnknownFields) -> ParsedRequest:
    """Raises: InvalidRequestError naming the field."""
    reject_unsupported(body, RESPONSES_NOT_BUILT)
    request = validate(ResponsesRequest, body)
    warnings = list(note_unknown(ResponsesRequest, body, RESPONSES_NOT_BUILT, unknown))
    if request.metadata and len(request.metadata) > 16:
        raise InvalidRequestError("metadata takes at most 16 entries", param="metadata")
    for name in request.include or ():
        if name not in _NOTHING_TO_INCLUDE:
            raise InvalidRequestError(f"include: {name[:64]!r} is not supported: leave it out", param="include")
    parallel = request.parallel_tool_calls is not False
    tools = _function_tools(request.tools or (), warnings)
    offer = tool_options(tools, _tool_choice(request.tool_choice), features, parallel=parallel)
    grammar, renamed = grammar_of(request, offer)
    messages = _Conversation(warnings).of(request)
    fields = spec_fields(request, {"max_tokens": request.max_output_tokens}) | {
        "messages": messages,
        "more_text": text_beside(messages, offer.shown),
        "tools": offer.shown,
        "grammar": grammar,
        "chat_template_kwargs": _effort(request, features, warnings),
    }
    renamed |= {"messages": "input", "max_tokens": "max_output_tokens"}
    options = ResponseOptions(tool_names=offer.names, parallel_tool_calls=parallel, include_reasoning=False)
    request_fields = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": parallel,
        "text": {"format": _format_object(request.text)},
        "tool_choice": _choice_object(request.tool_choice),
        "tools": [_tool_object(tool.function) for tool in tools],
        "user": request.user,
    }
    return ParsedRequest(
        UncheckedRequest(**fields),
        bool(request.stream),
        partial(ResponsesForm, request_fields, options),
        renamed,
        (),
        tuple(warnings),
    )


def _function_tools(tools: Sequence[dict[str, Any]], warnings: list[str]) -> list[Tool]:
    """Flat objects, unlike in chat. Raises: InvalidRequestError."""
    found: list[Tool] = []
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "function":
            found.append(Tool(type="function", function=validate(FunctionTool, tool, at=f"tools.{i}", param="tools")))
        elif isinstance(kind, str) and kind in _OTHER_TOOLS:
            warnings.append(f"tools.{i}: {kind} is not supported and ignored")
        else:
            raise InvalidRequestError(
                f"tools.{i}: {_shown(kind)} is not a tool type; supported: function", param="tools"
            )
    return found


def _tool_object(function: FunctionTool) -> dict[str, Any]:
    """All fields that the API's schema requires of a tool in a response."""
    return {
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
        "strict": bool(function.strict),
    }


def _format_object(text: TextOptions | None) -> dict[str, Any]:
    form = (text and text.format) or {"type": "text"}
    return {"name": "answer"} | form if form.get("type") == "json_schema" else form


def _choice_object(choice: Any) -> Any:
    """Chat's form is accepted, too."""
    if isinstance(choice, Mapping) and isinstance(choice.get("function"), Mapping):
        return {"type": "function", "name": choice["function"].get("name")}
    return choice or "auto"


def _tool_choice(choice: Any) -> Any:
    """Raises: InvalidRequestError for an unsupported tool."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if isinstance(kind, str) and kind in _OTHER_TOOLS:
        raise InvalidRequestError(
            f"tool_choice: {kind} is not supported: only functions can be called", param="tool_choice"
        )
    return choice


def _effort(request: ResponsesRequest, features: ModelFeatures, warnings: list[str]) -> dict[str, Any] | None:
    effort = request.reasoning.effort if request.reasoning is not None else None
    if effort not in (None, "none") and not features.takes_effort:
        warnings.append("reasoning.effort is ignored: this model's chat template does not support it")
        effort = None
    return template_kwargs(None, effort, features)


class _Conversation:
    """The conversation in the form of chat templates."""

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings
        self._turns: list[dict[str, Any]] = []

    def of(self, request: ResponsesRequest) -> list[dict[str, Any]]:
        """Raises: InvalidRequestError."""
        if request.instructions:
            self._turns.append({"role": "system", "content": request.instructions})
        if isinstance(request.input, str):
            return [*self._turns, {"role": "user", "content": request.input}]
        for i, item in enumerate(request.input):
            self._add(item, f"input.{i}")
        if not self._turns or not request.input:
            raise InvalidRequestError("input is empty", param="input")
        return self._turns

    def _add(self, item: dict[str, Any], at: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, at)
        elif kind == "function_call":
            self._call(item, at, _text(item, "name", at), called_arguments(_text(item, "arguments", at)))
        elif kind in _CALLS:
            value = item.get(_CALLS[kind])
            name = _text(item, "name", at) if kind == "custom_tool_call" else kind.removesuffix("_call")
            self._call(item, at, name, dict(value) if isinstance(value, Mapping) else {"input": value})
        elif kind in _OUTPUTS:
            output = item.get("output")
            if not isinstance(output, str) and kind not in ("function_call_output", "custom_tool_call_output"):
                output = json.dumps(output, ensure_ascii=False)
            content = _joined(output, f"{at}.output")
            self._turns.append({"role": "tool", "tool_call_id": _call_id(item, at), "content": content})
        elif kind == "item_reference":
            _refuse(f"{at}: nothing is stored here: send the item itself, not a reference to it")
        elif isinstance(kind, str) and kind in _IGNORED_ITEMS:
            self._warnings.append(f"{at}: {kind} is ignored")
        elif kind != "reasoning":  # reasoning of an earlier answer is not shown to models again
            _refuse(f"{at}: items of type {_shown(kind)} are not supported")

    def _message(self, item: dict[str, Any], at: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            _refuse(f"{at}.role must be one of {', '.join(_ROLES)}")
        content = _joined(item.get("content"), f"{at}.content")
        self._turns.append({"role": "system" if role == "developer" else role, "content": content})

    def _call(self, item: dict[str, Any], at: str, name: str, arguments: dict[str, Any] | str) -> None:
        call = {"id": _call_id(item, at), "type": "function", "function": {"name": name, "arguments": arguments}}
        if self._turns and self._turns[-1]["role"] == "assistant":  # calls of one answer belong together
            self._turns[-1].setdefault("tool_calls", []).append(call)
        else:
            self._turns.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _call_id(item: Mapping[str, Any], at: str) -> str:
    """The oldest form of shell calls has only an id."""
    return _text(item, "id" if item.get("call_id") is None and "shell" in item["type"] else "call_id", at)


def _text(item: Mapping[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        _refuse(f"{at}.{name} must be text")
    return value


def _joined(content: object, at: str) -> str:
    """Text, or the joined texts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(f"{at} must be text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(_TEXT_PARTS[kind]) if isinstance(part, Mapping) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            _refuse(f"{at}.{i}: parts of type {_shown(kind)} are not supported; supported: input_text and output_text")
        texts.append(text)
    return "\n".join(texts)


def _shown(kind: object) -> str:
    return repr(kind[:64]) if isinstance(kind, str) else "without a type" if kind is None else "no text"


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError(message, param="input")
