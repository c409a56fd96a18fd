"""The gRPC face: service diptych.rpc.v1.Router.

Requests arrive here as bytes and are parsed inside the call: what does not decode is the caller's error and is answered as
one, where gRPC's own deserializer would report INTERNAL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from diptych.common.errors import InternalError, InvalidRequestError
from diptych.router.auth import current_caller
from diptych.router.faces import Door, accepted
from diptych.router.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    GenerateEvent,
    GenerateSpec,
    PromptLogprobsEvent,
    StartedEvent,
    TokenEvent,
)
from diptych.rpc.channels import trace_context
from diptych.rpc.convert import early_stopping_from_proto, finish_reason_to_proto, logprobs_to_proto
from diptych.rpc.errors import errors_to_status
from diptych.rpc.v1 import router_pb2, types_pb2

SERVICE = "diptych.rpc.v1.Router"

_Message = TypeVar("_Message", bound=Message)
_OPTIONAL = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "n",
    "best_of",
    "beam_width",
    "length_penalty",
    "logprobs",
    "prompt_logprobs",
)
_POLICIES = {
    router_pb2.FAILURE_POLICY_UNSPECIFIED: "",
    router_pb2.FAILURE_POLICY_FAIL: "fail",
    router_pb2.FAILURE_POLICY_RECOMPUTE: "recompute",
    router_pb2.FAILURE_POLICY_RETRY: "retry",
}


class RouterService:
    """Parse, prepare, relay; the frontend does the rest. A client that cancels ends the method's task, which leaves the
    frontend's iterator and so cancels the request on its workers."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def handler(self) -> grpc.GenericRpcHandler:
        """To be given to `server.add_generic_rpc_handlers`."""
        methods = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, response_serializer=router_pb2.GenerateResponse.SerializeToString
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models, response_serializer=router_pb2.ListModelsResponse.SerializeToString
            ),
            "Explain": grpc.unary_unary_rpc_method_handler(
                self.explain, response_serializer=router_pb2.ExplainResponse.SerializeToString
            ),
            "WhatIf": grpc.unary_unary_rpc_method_handler(
                self.what_if, response_serializer=router_pb2.WhatIfResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, body: bytes, context: grpc.aio.ServicerContext) -> None:
        async with errors_to_status(context):
            request = parse(router_pb2.GenerateRequest, body)
            prepared = await self._door.prepare(
                replace(
                    spec_from(request, context.time_remaining()),
                    tenant=current_caller.get().tenant,
                    traceparent=trace_context(context.invocation_metadata()),
                )
            )
            finished = False
            async with accepted(self._door, prepared) as (started, events):
                await context.write(response_from(started))
                async for event in events:
                    # Tokens that come while this write is pending are waiting in one event afterwards.
                    await context.write(response_from(event))
                    finished = isinstance(event, FinishedEvent)
            if not finished:
                raise InternalError("the answer ended without its end")

    async def list_models(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.ListModelsResponse:
        async with errors_to_status(context):
            parse(router_pb2.ListModelsRequest, body)
            models = [
                router_pb2.Model(id=model.id, max_model_len=model.max_model_len, created=model.created)
                for model in self._door.models()
            ]
            return router_pb2.ListModelsResponse(models=models)

    async def explain(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.ExplainResponse:
        async with errors_to_status(context):
            request = parse(router_pb2.ExplainRequest, body)
            return self._door.explain(request.request_id, current_caller.get().tenant)

    async def what_if(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.WhatIfResponse:
        async with errors_to_status(context):
            request = parse(router_pb2.WhatIfRequest, body)
            spec = replace(spec_from(request.request, context.time_remaining()), tenant=current_caller.get().tenant)
            return self._door.what_if(await self._door.prepare(spec), request.pool)


def parse(kind: type[_Message], body: bytes) -> _Message:
    """Raises: InvalidRequestError naming the request body."""
    try:
        return kind.FromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"request body: not a valid {kind.DESCRIPTOR.name}", param="request body") from error


def spec_from(request: router_pb2.GenerateRequest, remaining_s: float | None) -> GenerateSpec:
    """Raises: InvalidRequestError naming the field."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError("input: one of prompt, token_ids and chat must be set", param="input")
    if request.failure_policy not in _POLICIES:
        raise InvalidRequestError(f"failure_policy {request.failure_policy} is unknown", param="failure_policy")
    sampling = request.sampling
    messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
    return GenerateSpec(
        model=request.model,
        prompt=request.prompt if kind == "prompt" else None,
        token_ids=list(request.token_ids.token_ids) if kind == "token_ids" else None,
        messages=messages if kind == "chat" else None,
        temperature=_given(sampling, "temperature"),
        top_p=_given(sampling, "top_p"),
        top_k=_given(sampling, "top_k"),
        seed=_given(sampling, "seed"),
        max_tokens=_given(sampling, "max_tokens"),
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop),
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        bad_words=list(sampling.bad_words) or None,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        **{name: _given(sampling, name) for name in _OPTIONAL},
        early_stopping=early_stopping_from_proto(sampling.early_stopping) if sampling.early_stopping else None,
        request_id=request.request_id,
        explain=request.explain,
        local_prefill_max_tokens=_given(request, "local_prefill_max_tokens"),
        failure_policy=_POLICIES[request.failure_policy],
        timeout_s=remaining_s,
    )


def response_from(event: GenerateEvent) -> router_pb2.GenerateResponse:
    if isinstance(event, TokenEvent):
        tokens = router_pb2.TokenDelta(
            offset=event.offset,
            token_ids=event.token_ids,
            text=event.text,
            choice=event.choice,
            logprobs=[logprobs_to_proto(entry) for entry in event.logprobs],
        )
        return router_pb2.GenerateResponse(tokens=tokens)
    if isinstance(event, StartedEvent):
        started = router_pb2.Started(request_id=event.request_id, model=event.model, prompt_tokens=event.prompt_tokens)
        return router_pb2.GenerateResponse(started=started)
    if isinstance(event, PromptLogprobsEvent):
        entries = [logprobs_to_proto(entry) for entry in event.logprobs]
        known = types_pb2.PromptLogprobs(first_token=event.first_token, logprobs=entries)
        return router_pb2.GenerateResponse(prompt_logprobs=known)
    if isinstance(event, ChoiceFinishedEvent):
        ended = types_pb2.ChoiceFinished(
            choice=event.choice,
            finish_reason=finish_reason_to_proto(event.reason),
            stop_string=event.stop_string,
            stop_token_id=event.stop_token_id,
        )
        return router_pb2.GenerateResponse(choice_finished=ended)
    usage = types_pb2.Usage(
        prompt_tokens=event.usage.prompt_tokens,
        completion_tokens=event.usage.completion_tokens,
        cached_tokens=event.usage.cached_tokens,
    )
    finished = router_pb2.Finished(
        finish_reason=finish_reason_to_proto(event.reason),
        stop_string=event.stop_string,
        stop_token_id=event.stop_token_id,
        usage=usage,
        explanation=event.explanation,
    )
    return router_pb2.GenerateResponse(finished=finished)


def _given(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
