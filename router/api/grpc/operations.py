"""The gRPC service for operators: diptych.rpc.v1.Operations. It needs no API key but the cluster secret, see rpc/operator.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import grpc
from google.protobuf.message import Message

from diptych.router.adapters.operations import AdapterOperations
from diptych.router.api.grpc.adapters import CALLS, serialized
from diptych.router.api.grpc.requests import parse
from diptych.rpc.errors import errors_to_status
from diptych.rpc.operator import METADATA, SERVICE, check_proof
from diptych.rpc.v1 import router_pb2

MoveRequest = Callable[[str, str], Awaitable[router_pb2.MoveResponse]]
"""See Frontend.move_request."""


class OperationsService:
    """Checks the proof, and calls `move_request` or an operation on adapters. `key`: see operator_key."""

    def __init__(self, key: bytes, move_request: MoveRequest, adapters: AdapterOperations) -> None:
        self._key = key
        self._move_request = move_request
        self._adapters = adapters

    def handler(self) -> grpc.GenericRpcHandler:
        """For `server.add_generic_rpc_handlers`."""
        calls = {"Move": self.move, **{name: partial(self.adapter_call, name) for name in CALLS}}
        methods = {
            name: grpc.unary_unary_rpc_method_handler(call, response_serializer=serialized)
            for name, call in calls.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _check(self, method: str, body: bytes, context: grpc.aio.ServicerContext) -> None:
        """Raises: AuthenticationError."""
        given = [value for name, value in context.invocation_metadata() or () if name == METADATA]
        check_proof(self._key, method, body, str(given[0]) if len(given) == 1 else "")

    async def move(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.MoveResponse:
        async with errors_to_status(context):
            self._check("Move", body, context)
            request = parse(router_pb2.MoveRequest, body)
            return await self._move_request(request.request_id, request.to)

    async def adapter_call(self, name: str, body: bytes, context: grpc.aio.ServicerContext) -> Message:
        async with errors_to_status(context):
            self._check(name, body, context)
            return await CALLS[name](self._adapters, body, None)
