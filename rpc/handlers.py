"""gRPC services that can be exchanged while their server runs. A server itself takes handlers before its start only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from diptych.common.errors import DiptychError
from diptych.rpc.errors import abort


class _Collector:
    """Stands in for a server in the generated `add_..._to_server`."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self.handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """The same methods again, for servers that look them up before they start."""


class ExchangeableHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Install it in a server once. A running call keeps the handler with which it began.

    Args:
        known: full names of the services that may be installed at some time.
        refusal: the error of a call to one of them that is not.
    """

    def __init__(self, known: Sequence[str], refusal: Callable[[str], DiptychError]) -> None:
        self._known = frozenset(known)
        self._refusal = refusal
        self._handlers: tuple[grpc.GenericRpcHandler, ...] = ()

    def install(self, add_to: Callable[[Any], None]) -> None:
        """Calls from now on are for the services that `add_to` adds to the server that it is given."""
        collector = _Collector()
        add_to(collector)
        self._handlers = tuple(collector.handlers)

    def service(self, handler_call_details: Any) -> Any:
        for handler in self._handlers:
            if (found := handler.service(handler_call_details)) is not None:
                return found
        name = handler_call_details.method.split("/")[1]
        return self._refusing(name) if name in self._known else None

    def _refusing(self, name: str) -> Any:
        async def refuse(requests: object, context: grpc.aio.ServicerContext) -> None:
            await abort(context, self._refusal(name))

        return grpc.stream_stream_rpc_method_handler(refuse)
