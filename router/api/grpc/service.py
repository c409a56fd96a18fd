"""The gRPC server: service diptych.rpc.v1.Router.

Requests arrive as bytes and are parsed inside the call, so that invalid ones are reported as the caller's error; gRPC's
deserializer would report INTERNAL.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import grpc
from google.protobuf.message import Message

from diptych.common.errors import InternalError
from diptych.router.api.auth.authenticator import current_caller, require_admin
from diptych.router.api.grpc.adapters import CALLS, LIST, serialized
from diptych.router.api.grpc.requests import parse, spec_from
from diptych.router.api.grpc.tools import Splitter
from diptych.router.api.interface import RouterApi, accepted
from diptych.router.api.json_body import Bodies
from diptych.router.observe.access_log import Access, logged
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    GenerateEvent,
    ModelFeatures,
    PromptLogprobsEvent,
    StartedEvent,
    TokenEvent,
    UncheckedRequest,
)
from diptych.router.requests.placements import place, serve_placements
from diptych.router.requests.seam import ALL, Seam
from diptych.router.tools.options import ToolOptions
from diptych.rpc.channels import trace_context
from diptych.rpc.convert import finish_reason_to_proto, logprobs_to_proto
from diptych.rpc.errors import errors_to_status
from diptych.rpc.v1 import router_pb2, types_pb2

SERVICE = "diptych.rpc.v1.Router"


class RouterService:
    """Parse, prepare, relay. A client that cancels ends the method's task, which closes the frontend's iterator and so
    cancels the request on its workers. `bodies`: parses large requests; closed by its owner.
    `parsing`: entered while a request for an answer is read; an error leaves it."""

    def __init__(
        self,
        router_api: RouterApi,
        bodies: Bodies | None = None,
        parsing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._router_api = router_api
        self._bodies = bodies or Bodies()
        self._parsing = parsing

    def handler(self) -> grpc.GenericRpcHandler:
        """For `server.add_generic_rpc_handlers`."""
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
            "CloseSession": grpc.unary_unary_rpc_method_handler(
                self.close_session, response_serializer=router_pb2.CloseSessionResponse.SerializeToString
            ),
            "Place": grpc.unary_unary_rpc_method_handler(
                self.place, response_serializer=router_pb2.Placed.SerializeToString
            ),
            **{
                name: grpc.unary_unary_rpc_method_handler(
                    partial(self.adapter_call, name), response_serializer=serialized
                )
                for name in CALLS
            },
            "Placements": grpc.stream_stream_rpc_method_handler(self.placements),  # bytes in, bytes out
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, body: bytes, context: grpc.aio.ServicerContext) -> None:
        access = Access("grpc", f"/{SERVICE}/Generate", tenant=current_caller.get().tenant)
        async with errors_to_status(context):
            with logged(access):
                await self._generate(body, context, access)

    async def _generate(self, body: bytes, context: grpc.aio.ServicerContext, access: Access) -> None:
        remaining_s, tenant = context.time_remaining(), current_caller.get().tenant

        def read() -> tuple[router_pb2.GenerateRequest, ModelFeatures, UncheckedRequest, ToolOptions]:
            request = parse(router_pb2.GenerateRequest, body)
            features = self._router_api.features(request.model, tenant)
            return request, features, *spec_from(request, remaining_s, features)

        with self._parsing():
            request, features, spec, offer = await self._bodies.off_loop(read, len(body))
        spec.tenant = tenant
        spec.traceparent = trace_context(context.invocation_metadata())
        spec.resume_id, spec.resumable = request.resume_id or None, True
        access.asked(spec)
        prepared = await self._router_api.prepare(spec)
        splitter = Splitter.of(request, offer, prepared, features)
        seam = None if prepared.seen is None else Seam(prepared.seen)
        finished = False
        async with accepted(self._router_api, prepared) as (started, events):
            response = response_from(started)
            response.started.seed = prepared.sampling.seed
            await context.write(response)
            async for event in events:
                for part, drop in ((event, 0),) if seam is None else seam.parts(event):
                    response = response_from(part)
                    if splitter is not None:
                        splitter.fill(response, part)
                    if drop != ALL:
                        # Tokens that arrive during this write are merged into one event.
                        await context.write(response)
                finished = isinstance(event, FinishedEvent)
        if not finished:
            raise InternalError("the answer ended without FinishedEvent")

    async def list_models(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.ListModelsResponse:
        async with errors_to_status(context):
            parse(router_pb2.ListModelsRequest, body)
            models = [
                router_pb2.Model(
                    id=model.id, max_model_len=model.max_model_len, created=model.created, parent=model.parent
                )
                for model in self._router_api.models(current_caller.get().tenant)
            ]
            return router_pb2.ListModelsResponse(models=models)

    async def explain(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.ExplainResponse:
        async with errors_to_status(context):
            request = parse(router_pb2.ExplainRequest, body)
            return await self._router_api.explain(request.request_id, current_caller.get().tenant)

    async def close_session(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.CloseSessionResponse:
        async with errors_to_status(context):
            request = parse(router_pb2.CloseSessionRequest, body)
            return await self._router_api.close_session(request.session_id, current_caller.get().tenant)

    async def adapter_call(self, name: str, body: bytes, context: grpc.aio.ServicerContext) -> Message:
        async with errors_to_status(context):
            caller = current_caller.get()
            if name != LIST:
                require_admin(caller)
            return await CALLS[name](self._router_api.adapters, body, caller.tenant)

    async def what_if(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.WhatIfResponse:
        access = Access("grpc", f"/{SERVICE}/WhatIf", tenant=current_caller.get().tenant)
        async with errors_to_status(context):
            with logged(access):
                return await self._what_if(body, context)

    async def _what_if(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.WhatIfResponse:
        remaining_s, tenant = context.time_remaining(), current_caller.get().tenant

        def read() -> tuple[router_pb2.WhatIfRequest, UncheckedRequest]:
            request = parse(router_pb2.WhatIfRequest, body)
            features = self._router_api.features(request.request.model, tenant)
            return request, spec_from(request.request, remaining_s, features)[0]

        request, spec = await self._bodies.off_loop(read, len(body))
        spec.tenant = tenant
        return self._router_api.what_if(await self._router_api.prepare(spec), request.pool)

    async def place(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.Placed:
        async with errors_to_status(context):
            request = await self._bodies.off_loop(lambda: parse(router_pb2.PlaceRequest, body), len(body))
            if not request.remaining_s:
                request.remaining_s = context.time_remaining() or 0.0
            return await place(self._router_api, request, current_caller.get().tenant)

    async def placements(self, bodies: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await serve_placements(self._router_api, bodies, context)


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
        started = router_pb2.Started(
            request_id=event.request_id,
            model=event.model,
            prompt_tokens=event.prompt_tokens,
            resume_ref=event.resume_ref,
            adapter="" if event.adapter is None else event.adapter.name,
            adapter_version=0 if event.adapter is None else event.adapter.version.number,
        )
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
