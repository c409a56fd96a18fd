"""The Prefill and Source services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import grpc

from diptych.common.errors import ConfigError, TransferError
from diptych.prefill.sessions import PrefillSessions
from diptych.prefill.spans import traced
from diptych.rpc.channels import trace_context
from diptych.rpc.errors import errors_to_status
from diptych.rpc.v1 import prefill_pb2, prefill_pb2_grpc


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, handoffs: PrefillSessions) -> None:
        self._handoffs = handoffs

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        parent = trace_context(context.invocation_metadata())
        served = traced(self._handoffs.serve(request), request, parent)
        async with errors_to_status(context), aclosing(served) as events:
            async for event in events:
                yield event


class SourceServicer(prefill_pb2_grpc.SourceServicer):
    """Args: begin: called before the first fetch, and idempotent. Raises: ConfigError when this worker cannot publish."""

    def __init__(self, handoffs: PrefillSessions, begin: Callable[[], None]) -> None:
        self._handoffs = handoffs
        self._begin = begin

    async def Fetch(
        self, request: prefill_pb2.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        async with errors_to_status(context), aclosing(self._handoffs.fetch(request)) as events:
            try:
                self._begin()
            except ConfigError as error:
                raise TransferError(f"this worker cannot publish: {error}") from error
            async for event in events:
                yield event
