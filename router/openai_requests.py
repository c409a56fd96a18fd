"""What the OpenAI routes take: shapes and types are checked here, ranges by the frontend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from diptych.common.errors import InvalidRequestError
from diptych.router.messages import GenerateSpec
from diptych.router.openai_fields import CHAT_NOT_BUILT, COMPLETION_NOT_BUILT, HARMLESS, UnknownFields, refuse_unbuilt

_Model = TypeVar("_Model", bound=BaseModel)

_MESSAGE_NOT_BUILT = ("tool_calls", "tool_call_id", "function_call", "audio")
_UNION_FORMS = {"prompt": "a string or a list of token ids", "stop": "a string or a list of strings"}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=True)


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str

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


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class _Common(_Strict):
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    local_prefill_max_tokens: int | None = None
    failure_policy: Literal["fail", "recompute", "retry", ""] | None = None


class ChatCompletionRequest(_Common):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None


class CompletionRequest(_Common):
    """Body of POST /v1/completions. One prompt: text or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request: what to generate, and the form in which to answer.

    `renamed` maps a parameter of the spec to the name under which the caller gave it.
    """

    spec: GenerateSpec
    chat: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    renamed: Mapping[str, str]


def chat_call(body: dict[str, Any], *, unknown: UnknownFields) -> Call:
    """Raises: InvalidRequestError naming the field."""
    refuse_unbuilt(body, CHAT_NOT_BUILT)
    request = _validate(ChatCompletionRequest, body)
    for message in body["messages"]:
        for name in _MESSAGE_NOT_BUILT:
            if message.get(name):
                raise InvalidRequestError(f"messages: {name} is not supported yet", param="messages")
    _note_unknown(ChatCompletionRequest, body, CHAT_NOT_BUILT, unknown)
    messages = [
        # developer is the newer name of system; chat templates know the old one
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in request.messages
    ]
    if request.max_completion_tokens is None:
        return _call(request, request.max_tokens, renamed={}, messages=messages)
    renamed = {"max_tokens": "max_completion_tokens"}
    return _call(request, request.max_completion_tokens, renamed=renamed, messages=messages)


def completion_call(body: dict[str, Any], *, unknown: UnknownFields) -> Call:
    """Raises: InvalidRequestError naming the field."""
    refuse_unbuilt(body, COMPLETION_NOT_BUILT)
    request = _validate(CompletionRequest, body)
    _note_unknown(CompletionRequest, body, COMPLETION_NOT_BUILT, unknown)
    prompt: object = request.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise InvalidRequestError(f"prompt holds {len(prompt)} prompts: one a request is supported", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _call(request, request.max_tokens, renamed={}, prompt=prompt)
    renamed = {"token_ids": "prompt"}
    return _call(request, request.max_tokens, renamed=renamed, token_ids=prompt)


def _call(
    request: _Common,
    max_tokens: int | None,
    *,
    renamed: Mapping[str, str],
    prompt: object = None,
    token_ids: object = None,
    messages: object = None,
) -> Call:
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise InvalidRequestError("stream_options is for stream=true only", param="stream_options")
    spec = GenerateSpec(
        model=request.model,
        prompt=prompt,
        token_ids=token_ids,
        messages=messages,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        max_tokens=max_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop,
        request_id=request.request_id or "",
        local_prefill_max_tokens=request.local_prefill_max_tokens,
        failure_policy=request.failure_policy or "",
    )
    return Call(
        spec=spec,
        chat=messages is not None,
        stream=stream,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        renamed=renamed,
    )


def _validate(model: type[_Model], body: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = str(first["loc"][0])
        if param in _UNION_FORMS and param in body:
            raise InvalidRequestError(f"{param} must be {_UNION_FORMS[param]}", param=param) from None
        path = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"{path}: {first['msg'].removeprefix('Value error, ')}", param=param) from None


def _note_unknown(
    model: type[BaseModel], body: dict[str, Any], not_built: Mapping[str, object], unknown: UnknownFields
) -> None:
    unknown.note(
        name for name in body if name not in model.model_fields and name not in not_built and name not in HARMLESS
    )
