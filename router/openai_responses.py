"""The basic form of the Responses API: text and function calls in, text and function calls out. Nothing is stored."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, field_validator
from pydantic import Tag as PydanticTag

from diptych.common.errors import InvalidRequestError
from diptych.router.messages import GenerateSpec, ModelFeatures
from diptych.router.openai_fields import RESPONSES_NOT_BUILT, UnknownFields, refuse_unbuilt
from diptych.router.openai_form import Wishes
from diptych.router.openai_requests import (
    Call,
    Items,
    Sampled,
    grammar_of,
    note_unknown,
    sampling_fields,
    validate,
)
from diptych.router.openai_responses_form import ResponsesForm
from diptych.router.openai_tools import FunctionTool, Tool, called_arguments, offer_tools

_TEXT_PARTS = ("input_text", "output_text", "text")


class _Item(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: object) -> object:
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            known = isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)
            if not known:
                raise ValueError("content parts must be input_text or output_text: other kinds are not supported")
            texts.append(part["text"])
        return "\n".join(texts)


class FunctionCall(_Item):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return str(value.get("type", "message"))
    return str(getattr(value, "type", "message"))


InputItem = Annotated[
    Annotated[InputMessage, PydanticTag("message")]
    | Annotated[FunctionCall, PydanticTag("function_call")]
    | Annotated[FunctionCallOutput, PydanticTag("function_call_output")],
    Discriminator(_kind),
]


class ResponsesTool(FunctionTool):
    """Flat, unlike in chat."""

    type: Literal["function"]


class TextOptions(_Item):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Sampled):
    """Body of POST /v1/responses."""

    input: str | Items[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    tools: Items[ResponsesTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


def responses_call(body: dict[str, Any], *, features: ModelFeatures, unknown: UnknownFields) -> Call:
    """Raises: InvalidRequestError naming the field."""
    refuse_unbuilt(body, RESPONSES_NOT_BUILT)
    request = validate(ResponsesRequest, body)
    note_unknown(ResponsesRequest, body, RESPONSES_NOT_BUILT, unknown)
    if request.metadata and len(request.metadata) > 16:
        raise InvalidRequestError("metadata takes at most 16 entries", param="metadata")
    parallel = request.parallel_tool_calls is not False
    tools = [
        Tool(
            type="function",
            function=FunctionTool.model_construct(**tool.model_dump(exclude={"type"}, exclude_unset=True)),
        )
        for tool in request.tools or ()
    ]
    offer = offer_tools(tools, request.tool_choice, features, parallel=parallel)
    grammar, renamed = grammar_of(request, offer)
    fields = sampling_fields(request) | {
        "messages": _turns(request),
        "max_tokens": request.max_output_tokens,
        "tools": offer.shown,
        "grammar": grammar,
    }
    renamed |= {"messages": "input", "max_tokens": "max_output_tokens"}
    wishes = Wishes(tool_names=offer.names, parallel_tool_calls=parallel, include_reasoning=False)
    told = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": parallel,
        "text": {"format": (request.text and request.text.format) or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [tool.model_dump(exclude_unset=True) for tool in request.tools or ()],
        "user": request.user,
    }
    return Call(GenerateSpec(**fields), bool(request.stream), partial(ResponsesForm, told, wishes), renamed)


def _turns(request: ResponsesRequest) -> list[dict[str, Any]]:
    """As chat templates know them. Raises: InvalidRequestError."""
    turns: list[dict[str, Any]] = []
    if request.instructions:
        turns.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*turns, {"role": "user", "content": request.input}]
    if not request.input:
        raise InvalidRequestError("input is empty", param="input")
    for item in request.input:
        if isinstance(item, FunctionCallOutput):
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif isinstance(item, FunctionCall):
            function = {"name": item.name, "arguments": called_arguments(item.arguments)}
            call = {"id": item.call_id, "type": "function", "function": function}
            if turns and turns[-1]["role"] == "assistant":  # calls of one answer belong together
                turns[-1].setdefault("tool_calls", []).append(call)
            else:
                turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            turns.append({"role": "system" if item.role == "developer" else item.role, "content": item.content})
    return turns
