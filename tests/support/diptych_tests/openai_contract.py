"""The OpenAI API's response schema, strictly: the types of its Python library, which are generated from that schema,
and rules that they lack.

The library's types are lenient: they accept unknown fields, and an optional field may be required or non-null in the
schema. REQUIRED, NULLABLE and OURS add these rules.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from openai.types import Completion, CompletionChoice, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, TypeAdapter

REQUIRED = {
    "chat_completion.Choice": {"logprobs"},
    "chat_completion.ChoiceLogprobs": {"content", "refusal"},
    "chat_completion_chunk.Choice": {"finish_reason"},
    "chat_completion_chunk.ChoiceLogprobs": {"content", "refusal"},
    "chat_completion_message.ChatCompletionMessage": {"content", "refusal"},
    "chat_completion_token_logprob.ChatCompletionTokenLogprob": {"bytes"},
    "chat_completion_token_logprob.TopLogprob": {"bytes"},
    "openai_contract.ChunkChoice": {"logprobs"},
    "openai_contract.WholeChoice": {"logprobs"},
    "openai_contract.WholeCompletion": {"usage"},
    "function_tool.FunctionTool": {"parameters", "strict"},
    "response.Response": {
        "error", "incomplete_details", "instructions", "metadata", "temperature", "top_p", "usage", "status", "text",
    },
    "response_function_tool_call.ResponseFunctionToolCall": {"id", "status"},
    "response_output_text.ResponseOutputText": {"logprobs"},
    "response_error_event.ResponseErrorEvent": {"code", "param"},
}  # fmt: skip
"""In the schema, or always sent by the API; the types make them optional."""

NULLABLE = {
    "chat_completion.Choice": {"logprobs"},
    "chat_completion.ChoiceLogprobs": {"content", "refusal"},
    "chat_completion_chunk.ChatCompletionChunk": {"usage"},
    "chat_completion_chunk.Choice": {"finish_reason", "logprobs"},
    "chat_completion_chunk.ChoiceLogprobs": {"content", "refusal"},
    "chat_completion_message.ChatCompletionMessage": {"content", "refusal"},
    "chat_completion_token_logprob.ChatCompletionTokenLogprob": {"bytes"},
    "chat_completion_token_logprob.TopLogprob": {"bytes"},
    "openai_contract.ChunkChoice": {"logprobs", "finish_reason"},
    "openai_contract.CompletionChunk": {"usage"},
    "openai_contract.WholeChoice": {"logprobs"},
    "openai_contract.Failure": {"param", "code"},
    "function_tool.FunctionTool": {"description", "parameters", "strict"},
    "response.Response": {
        "error", "incomplete_details", "instructions", "max_output_tokens", "previous_response_id", "usage", "user",
    },
    "response_error_event.ResponseErrorEvent": {"code", "param"},
}  # fmt: skip
"""Fields that may be null; every other one is there with a value, or not there."""

_VLLM = {"stop_reason", "token_ids"}
OURS: dict[str, set[str]] = {
    "chat_completion.ChatCompletion": {"diptych", "prompt_token_ids", "prompt_logprobs"},
    "chat_completion.Choice": _VLLM,
    "chat_completion_message.ChatCompletionMessage": {"reasoning_content"},
    "chat_completion_chunk.ChatCompletionChunk": {"diptych", "prompt_token_ids"},
    "chat_completion_chunk.Choice": _VLLM,
    "chat_completion_chunk.ChoiceDelta": {"reasoning_content"},
    "openai_contract.WholeCompletion": {"diptych"},
    "openai_contract.WholeChoice": {*_VLLM, "prompt_token_ids", "prompt_logprobs"},
    "openai_contract.CompletionChunk": {"diptych"},
    "openai_contract.ChunkChoice": {*_VLLM, "prompt_token_ids", "prompt_logprobs"},
    "response.Response": {"diptych", "store"},  # the API sends the second one, too
    # in the schema until 2025, and required by the types of that time
    "response_function_call_arguments_done_event.ResponseFunctionCallArgumentsDoneEvent": {"name"},
    "model.Model": {"max_model_len"},
}
"""Additional fields: vLLM's, and ours. docs/api.md lists them."""


class EchoLogprobs(Logprobs):
    """The first token of an echoed prompt has no probability."""

    token_logprobs: list[float | None]  # type: ignore[assignment]
    tokens: list[str]
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class WholeChoice(CompletionChoice):
    logprobs: EchoLogprobs | None = None


class WholeCompletion(Completion):
    choices: list[WholeChoice]  # type: ignore[assignment]


class ChunkChoice(WholeChoice):
    """The API's streams have null until the last chunk, unlike the schema."""

    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class CompletionChunk(Completion):
    choices: list[ChunkChoice]  # type: ignore[assignment]


class Failure(BaseModel):
    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class Failed(BaseModel):
    model_config = ConfigDict(extra="allow")

    error: Failure


class Models(BaseModel):
    model_config = ConfigDict(extra="allow")

    object: Literal["list"]
    data: list[Model]


ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "chat": TypeAdapter(ChatCompletion),
    "chat chunk": TypeAdapter(ChatCompletionChunk),
    "completion": TypeAdapter(WholeCompletion),
    "completion chunk": TypeAdapter(CompletionChunk),
    "response": TypeAdapter(Response),
    "response event": TypeAdapter(ResponseStreamEvent),
    "error": TypeAdapter(Failed),
    "models": TypeAdapter(Models),
    "model": TypeAdapter(Model),
}
_COUNTS = ("tokens", "index", "created", "created_at", "sequence_number", "text_offset")
_MAX_COUNT = 2**53
"""Every client reads these integers exactly."""


def read(kind: str, payload: str | bytes) -> Any:
    """The parsed answer. Raises: ValidationError or AssertionError for a violation of the schema."""
    value = ADAPTERS[kind].validate_json(payload, strict=True)
    _check(value, kind)
    return value


def _check(value: Any, at: str) -> None:
    if isinstance(value, BaseModel):
        name = f"{type(value).__module__.rsplit('.', 1)[-1]}.{type(value).__name__}"
        extra = value.model_extra or {}
        assert extra.keys() <= OURS.get(name, set()), (at, name, set(extra) - OURS.get(name, set()))
        missing = REQUIRED.get(name, set()) - value.model_fields_set
        assert not missing, (at, name, missing)
        for field in value.model_fields_set:
            one = getattr(value, field)
            if field not in extra:
                assert one is not None or field in NULLABLE.get(name, set()), (at, name, field, "is null")
            _check_number(one, field, f"{at}.{field}")
            _check(one, f"{at}.{field}")
        _check_usage(value, at)
    elif isinstance(value, list):
        for i, one in enumerate(value):
            _check(one, f"{at}.{i}")


def _check_number(value: Any, field: str, at: str) -> None:
    if isinstance(value, float):
        assert math.isfinite(value), at
    if "logprob" in field and isinstance(value, float):
        assert value <= 0.0, at
    if field.endswith(_COUNTS) and isinstance(value, (int, float)):
        assert 0 <= value < _MAX_COUNT, at


def _check_usage(value: BaseModel, at: str) -> None:
    if type(value).__name__ in ("CompletionUsage", "ResponseUsage"):
        usage = value.model_dump()
        parts = [
            usage[name]
            for name in ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")
            if name in usage
        ]
        assert usage["total_tokens"] == sum(parts), at
