"""The gRPC service for operators: diptych.rpc.v1.Operations. It needs no API key but the cluster secret, see rpc/operator.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

from diptych.router.api.grpc.requests import parse
from diptych.rpc.errors import errors_to_status
from diptych.rpc.operator import METADATA, SERVICE, check_proof
from diptych.rpc.v1 import router_pb2

MoveRequest = Callable[[str, str], Awaitable[router_pb2.MoveResponse]]
"""See Frontend.move_request."""


class OperationsService:
    """Checks the proof, and calls `move_request`. `key`: see operator_key."""

    def __init__(self, key: bytes, move_request: MoveRequest) -> None:
        self._key = key
        self._move_request = move_request

    def handler(self) -> grpc.GenericRpcHandler:
        """For `server.add_generic_rpc_handlers`."""
        move = grpc.unary_unary_rpc_method_handler(
            self.move, response_serializer=router_pb2.MoveResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Move": move})

    async def move(self, body: bytes, context: grpc.aio.ServicerContext) -> router_pb2.MoveResponse:
        async with errors_to_status(context):
            given = [value for name, value in context.invocation_metadata() or () if name == METADATA]
            check_proof(self._key, "Move", body, str(given[0]) if len(given) == 1 else "")
            request = parse(router_pb2.MoveRequest, body)
            return await self._move_request(request.request_id, request.to)
