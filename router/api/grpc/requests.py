"""Conversion of gRPC request bytes to an UncheckedRequest. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from diptych.common.errors import InvalidRequestError
from diptych.common.sampling import SAMPLING
from diptych.router.api.grpc.tools import chat_of, grammar_of
from diptych.router.requests.messages import FAILURE_POLICIES, ModelFeatures, UncheckedRequest
from diptych.router.tools.options import ToolOptions, text_beside
from diptych.rpc.convert import early_stopping_from_proto, unknown_fields
from diptych.rpc.v1 import router_pb2, types_pb2

_Message = TypeVar("_Message", bound=Message)
_MAX_REMEMBERED_BYTES = 512
MAX_TOKEN_IDS = 1_000_000
"""Most token ids of one prompt, for any model; the model's context is checked later."""
_POLICIES = {number: name for name, number in FAILURE_POLICIES.items()}


def parse(kind: type[_Message], body: bytes) -> _Message:
    """Raises: InvalidRequestError naming the request body."""
    try:
        return kind.FromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"request body: not a valid {kind.DESCRIPTOR.name}", param="request body") from error


def spec_from(
    request: router_pb2.GenerateRequest, remaining_s: float | None, features: ModelFeatures, tenant: str = ""
) -> tuple[UncheckedRequest, ToolOptions]:
    """The request and its tools. Raises: InvalidRequestError naming the field."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError("input: one of prompt, token_ids and chat must be set", param="input")
    if request.failure_policy not in _POLICIES:
        raise InvalidRequestError(f"failure_policy {request.failure_policy} is unknown", param="failure_policy")
    sampling = request.sampling
    messages, offer = chat_of(request, features)
    wire = sampling.SerializeToString()
    short = len(wire) <= _MAX_REMEMBERED_BYTES
    spec = UncheckedRequest(
        model=request.model,
        adapter=request.adapter,
        adapter_version=request.adapter_version,
        prompt=request.prompt if kind == "prompt" else None,
        token_ids=_few(request.token_ids.token_ids, "token_ids", MAX_TOKEN_IDS) if kind == "token_ids" else None,
        messages=messages,
        more_text=0 if messages is None else text_beside(messages, offer.shown),
        tools=offer.shown,
        grammar=grammar_of(sampling, offer),
        idempotency_key=request.idempotency_key,
        resume_after=(
            _few(request.resume_after.token_ids, "resume_after", MAX_TOKEN_IDS)
            if request.HasField("resume_after")
            else None
        ),
        request_id=request.request_id,
        explain=request.explain,
        local_prefill_max_tokens=_given(request, "local_prefill_max_tokens"),
        failure_policy=_POLICIES[request.failure_policy],
        priority=None if request.prefetch and not request.priority else request.priority,
        cache_ttl_s=_given(request, "cache_ttl_s"),
        cache_priority=_given(request, "cache_priority"),
        session_id=request.session_id,
        prefetch=request.prefetch,
        timeout_s=remaining_s,
        tenant=tenant,
        sampling_key=wire if short else b"",
        sampling=_short_sampling(wire) if short else _sampling_values(wire),
    )
    return spec, offer


def _sampling_values(wire: bytes) -> Mapping[str, object]:
    """See UncheckedRequest.sampling."""
    found: dict[str, Any] = {}
    message = types_pb2.SamplingParams.FromString(wire)
    if unknown := unknown_fields(message):
        raise InvalidRequestError(f"sampling: field {unknown} is unknown to this router", param="sampling")
    for field, value in message.ListFields():
        name = field.name
        row = SAMPLING.get(name)
        if row is None or name == "grammar":
            continue  # set by the router from bad_words; see service_tools.grammar_of
        if name == "early_stopping":
            value = early_stopping_from_proto(value)
        elif name == "logit_bias":
            value = dict(_few(value.items(), name, row.at_most))
        elif row.at_most:
            value = tuple(_few(value, name, row.at_most))
        found[name] = value
    return found


_short_sampling = lru_cache(1024)(_sampling_values)
"""Cached: requests repeat their sampling values, and comparing their bytes is faster than parsing them."""


def _few(values: Any, field: str, most: int) -> list[Any]:
    """Raises: InvalidRequestError before each of too many entries is examined, which would block the event loop."""
    if len(values) > most:
        raise InvalidRequestError(f"{field} takes at most {most} entries, got {len(values)}", param=field)
    return list(values)


def _given(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
