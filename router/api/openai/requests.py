"""Request bodies of the OpenAI routes: shapes and types are checked here, ranges by the frontend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar
from diptych.common.request import DEFAULT_CACHE_PRIORITY
from diptych.common.sampling import SAMPLING
from diptych.router.api.openai.fields import (
    CHAT_NOT_BUILT,
    COMPLETION_NOT_BUILT,
    HARMLESS,
    UnknownFields,
    reject_unsupported,
)
from diptych.router.api.openai.format import (
    ChatForm,
    CompletionForm,
    ResponseContext,
    ResponseFormatter,
    ResponseOptions,
)
from diptych.router.preprocess.retention import session_text
from diptych.router.preprocess.structured import grammar_request
from diptych.router.requests.batch import MAX_PROMPTS
from diptych.router.requests.messages import ModelFeatures, UncheckedRequest
from diptych.router.tools.options import (
    MAX_MESSAGES,
    ChatMessage,
    Tool,
    ToolOptions,
    template_messages,
    text_beside,
    tool_options,
)

_Model = TypeVar("_Model", bound=BaseModel)
_Item = TypeVar("_Item")
Items: TypeAlias = Annotated[list[_Item], Field(fail_fast=True)]
"""Validation stops at the first invalid element: a body of millions of them must not produce as many errors."""

_UNION_FORMS = {
    "prompt": "a string, a list of token ids, or a list of those",
    "stop": "a string or a list of strings",
    "input": "a string or a list of items",
    "guided_json": "an object or its text",
}
_UNCHANGED = (
    "use_beam_search", "local_prefill_max_tokens", "priority", "truncate_prompt_tokens", "truncation_side", "cache_salt",
    "cache_ttl_s", "cache_priority", "session_id", "adapter", "adapter_version",
)  # fmt: skip
"""Fields that are passed on unchanged."""
_TYPES: Mapping[str, Any] = {
    "float": float,
    "int": int,
    "bool": bool,
    "Sequence[int]": Items[int],
    "Sequence[str]": Items[str],
    "str | Sequence[str]": str | Items[str],
    "Mapping[int, float]": dict[str, Any],
    "bool | str": bool | Literal["never"],
}
"""Type in the table of sampling parameters -> type in a body. A grammar has separate fields."""

FORMAT_FIELDS = (
    "response_format", "text", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
_COMPLETION_TOKENS = 16
"""The API's default of max_tokens for completions; chat answers have no default limit."""
_MAX_KEY_BYTES = 512
_DAY_S = 86_400.0
_MAX_TEMPLATE_KWARGS = 16
_MAX_TEMPLATE_VALUE_CHARS = 256


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _with_sampling(name: str, base: type[BaseModel], *, responses: bool) -> Any:
    """`base` with a field for each sampling parameter of the Responses API, or of the other two APIs."""
    rows = {name: row for name, row in SAMPLING.items() if row.responses == responses}
    fields: dict[str, Any] = {
        name: (_TYPES[row.check.type_name] | None, None) for name, row in rows.items() if row.check.type_name in _TYPES
    }
    return create_model(name, __base__=base, **fields)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=True)


class Sampled(_with_sampling("_Sampled", _Strict, responses=True)):  # type: ignore[misc]
    """Common fields of all requests."""

    model: str = ""
    adapter: str | None = None
    adapter_version: int | None = None
    use_beam_search: bool | None = None
    stream: bool | None = None
    user: str | None = None
    request_id: str | None = None
    local_prefill_max_tokens: int | None = None
    priority: int | None = None
    resume_after: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = None
    cache_ttl_s: float | None = None
    cache_priority: int | None = None
    session_id: str | None = None
    prefetch: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    failure_policy: Literal["fail", "recompute", "retry", ""] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None


class _Common(_with_sampling("_Answers", Sampled, responses=False)):  # type: ignore[misc]
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None


class ChatCompletionRequest(_Common):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(_Common):
    """Body of POST /v1/completions. A prompt is text or token ids; there may be several."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    echo: bool | None = None
    add_special_tokens: bool | None = None


@dataclass(slots=True)
class ParsedRequest:
    """A parsed request: what to generate, and how to format the response. `renamed` maps a parameter to the name that
    the caller used. `more`: the further prompts. `warnings`: ignored fields, for the caller."""

    spec: UncheckedRequest
    stream: bool
    make_form: Callable[[ResponseContext], ResponseFormatter]
    renamed: Mapping[str, str]
    more: tuple[UncheckedRequest, ...] = ()
    warnings: tuple[str, ...] = ()


def chat_call(body: dict[str, Any], *, features: ModelFeatures, unknown: UnknownFields) -> ParsedRequest:
    """Raises: InvalidRequestError naming the field."""
    reject_unsupported(body, CHAT_NOT_BUILT)
    request = validate(ChatCompletionRequest, body)
    for message in body["messages"]:
        for name in ("function_call", "audio"):
            if message.get(name):
                raise InvalidRequestError(f"messages: {name} is not supported", param="messages")
    warnings = note_unknown(ChatCompletionRequest, body, CHAT_NOT_BUILT, unknown)
    parallel = request.parallel_tool_calls is not False
    offer = tool_options(request.tools, request.tool_choice, features, parallel=parallel)
    grammar, renamed = grammar_of(request, offer)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs requires logprobs=true", param="top_logprobs")
    max_tokens = request.max_tokens
    renamed["logprobs"] = "top_logprobs"
    if request.max_completion_tokens is not None:
        max_tokens, renamed["max_tokens"] = request.max_completion_tokens, "max_completion_tokens"
    messages = template_messages(request.messages)
    spec = _spec(
        request,
        {"max_tokens": max_tokens, "logprobs": (request.top_logprobs or 0) if request.logprobs else None},
        messages=messages,
        more_text=text_beside(messages, offer.shown),
        tools=offer.shown,
        grammar=grammar,
        chat_template_kwargs=template_kwargs(request.chat_template_kwargs, request.reasoning_effort, features),
        **ending(request.add_generation_prompt, request.continue_final_message),
    )
    options = _response_options(
        request,
        tool_names=offer.names,
        parallel_tool_calls=parallel,
        include_reasoning=request.include_reasoning is not False,
    )
    return ParsedRequest(spec, bool(request.stream), partial(ChatForm, options), renamed, (), warnings)


def completion_call(body: dict[str, Any], *, features: ModelFeatures, unknown: UnknownFields) -> ParsedRequest:
    """Raises: InvalidRequestError naming the field."""
    reject_unsupported(body, COMPLETION_NOT_BUILT)
    request = validate(CompletionRequest, body)
    warnings = note_unknown(CompletionRequest, body, COMPLETION_NOT_BUILT, unknown)
    prompts = _prompts(request.prompt)
    sources = [{"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt} for prompt in prompts]
    sampling: dict[str, object] = {}
    most = request.prompt_logprobs
    if request.echo and request.logprobs is not None and (most is None or 0 <= most < request.logprobs):
        sampling["prompt_logprobs"] = request.logprobs
    prompt_only = request.max_tokens == 0
    if prompt_only and request.min_tokens:
        raise InvalidRequestError("min_tokens must be between 0 and max_tokens=0", param="min_tokens")
    grammar, renamed = grammar_of(request)
    if prompt_only:
        sampling["max_tokens"] = 1  # the engine has no step without a token
    spec = _spec(
        request,
        sampling,
        default_max_tokens=_COMPLETION_TOKENS,
        grammar=grammar,
        echo=bool(request.echo),
        add_special_tokens=request.add_special_tokens is not False,
        **sources[0],
    )
    if "token_ids" in sources[0]:
        renamed |= {"token_ids": "prompt"}
    further = tuple(replace(spec, **source) for source in sources[1:])
    options = _response_options(request, echo=bool(request.echo), prompt_only=prompt_only)
    return ParsedRequest(spec, bool(request.stream), partial(CompletionForm, options), renamed, further, warnings)


def _prompts(given: str | list[Any]) -> list[str | list[int]]:
    """Raises: InvalidRequestError."""
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt has {len(given)} prompts: at most {MAX_PROMPTS} are taken", param="prompt")
    return given


def grammar_of(request: Sampled, offer: ToolOptions | None = None) -> tuple[Grammar | None, dict[str, str]]:
    """The answer's grammar, and the parameter that errors of it name. Raises: InvalidRequestError naming the field."""
    given = request.model_fields_set.intersection(FORMAT_FIELDS)
    wanted = grammar_request({name: _plain(getattr(request, name)) for name in given}) if given else None
    found = wanted if offer is None else offer.grammar_with(wanted)
    return (None, {}) if found is None else (found.grammar, {"grammar": found.field})


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else value


def spec_fields(request: Sampled, sampling: Mapping[str, object]) -> dict[str, Any]:
    """Arguments of an UncheckedRequest that are common to all requests. `sampling`: values that this kind of request
    passes in another way; None: not given."""
    given = request.model_fields_set
    values = {**{name: getattr(request, name) for name in SAMPLING if name in given}, **sampling}
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    fields = {name: getattr(request, name) for name in _UNCHANGED if name in given}
    values = {name: value for name, value in values.items() if value is not None}
    return (
        fields
        | _retention(request)
        | {
            "sampling": values,
            "sampling_key": _key_of(values),
            "model": request.model,
            "request_id": request.request_id or "",
            "failure_policy": request.failure_policy or "",
            "resume_id": request.resume_after,
        }
    )


def _retention(request: Sampled) -> dict[str, Any]:
    """OpenAI's fields for it have an effect where Diptych's are not given. Raises: InvalidRequestError."""
    fields: dict[str, Any] = {"prefetch": bool(request.prefetch)}
    if request.session_id is None and request.prompt_cache_key:
        fields["session_id"] = session_text(request.prompt_cache_key, "prompt_cache_key")
    if request.cache_ttl_s is None and request.prompt_cache_retention is not None:
        if request.prompt_cache_retention == "24h":
            fields["cache_ttl_s"] = _DAY_S
        elif request.cache_priority is None:
            fields["cache_priority"] = DEFAULT_CACHE_PRIORITY  # a claim, for the router's default time
    return fields


def _key_of(sampling: Mapping[str, object]) -> bytes:
    """See UncheckedRequest.sampling_key."""
    try:
        key = b"json" + msgspec.json.encode(sampling)
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeEncodeError):
        return b""  # the values' check will say why
    return key if len(key) <= _MAX_KEY_BYTES else b""


def _spec(request: _Common, sampling: Mapping[str, object], **more: Any) -> UncheckedRequest:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options requires stream=true", param="stream_options")
    for name in ("prompt_logprobs", "best_of", "use_beam_search", "beam_width"):
        if request.stream and getattr(request, name) not in (None, False):
            raise InvalidRequestError(f"{name} requires stream=false", param=name)
    return UncheckedRequest(**spec_fields(request, sampling) | more)


def _response_options(request: _Common, **more: Any) -> ResponseOptions:
    options = request.stream_options or StreamOptions()
    return ResponseOptions(
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        prompt_logprobs=request.prompt_logprobs,
        **more,
    )


def ending(add_generation_prompt: bool | None, continue_final_message: bool | None) -> dict[str, Any]:
    """How a chat prompt ends. Raises: InvalidRequestError for conflicting values."""
    if add_generation_prompt and continue_final_message:
        rule = "continue_final_message cannot be combined with add_generation_prompt"
        raise InvalidRequestError(rule, param="continue_final_message")
    return {
        "add_generation_prompt": add_generation_prompt is not False,
        "continue_final_message": bool(continue_final_message),
    }


def template_kwargs(
    values: dict[str, Any] | None, effort: str | None, features: ModelFeatures
) -> dict[str, Any] | None:
    """Variables of the model's template, such as enable_thinking: scalars only, so that a template cannot loop over
    them."""
    if effort not in (None, "none") and not features.takes_effort:
        raise InvalidRequestError(
            "this model's chat template does not support reasoning_effort", param="reasoning_effort"
        )
    param = "chat_template_kwargs"
    if features.takes_effort and effort is not None:
        values = {"reasoning_effort": effort} | (values or {})
    if values is None:
        return None
    if len(values) > _MAX_TEMPLATE_KWARGS:
        raise InvalidRequestError(f"{param} takes at most {_MAX_TEMPLATE_KWARGS} values", param=param)
    for name, value in values.items():
        plain = value is None or isinstance(value, (bool, int, float, str))
        if not plain or len(name) > 64 or (isinstance(value, str) and len(value) > _MAX_TEMPLATE_VALUE_CHARS):
            raise InvalidRequestError(f"{param}.{name[:64]} must be a number, true, false or a short text", param=param)
    return values


def validate(model: type[_Model], body: dict[str, Any], *, at: str = "", param: str = "") -> _Model:
    """Args:
        at, param: path of the body, and its top-level field; empty: the whole body.
    Raises: InvalidRequestError naming the first invalid field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = param or (str(first["loc"][0]) if first["loc"] else "body")
        if param in _UNION_FORMS and param in body:
            raise InvalidRequestError(f"{param} must be {_UNION_FORMS[param]}", param=param) from None
        path = ".".join(str(part) for part in ([at, *first["loc"]] if at else first["loc"]))
        raise InvalidRequestError(f"{path}: {first['msg'].removeprefix('Value error, ')}", param=param) from None


def note_unknown(
    model: type[BaseModel], body: dict[str, Any], not_built: Mapping[str, object], unknown: UnknownFields
) -> tuple[str, ...]:
    """Warnings for the caller about unknown fields. Raises: InvalidRequestError where they are rejected."""
    known = model.model_fields
    names = [name for name in body if name not in known and name not in not_built and name not in HARMLESS]
    return unknown.note(names, known) if names else ()
