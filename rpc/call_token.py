"""Calls to a worker carry a token that shows that the caller has the cluster secret.

    client: with_token(channel, token) -> metadata `diptych-call-token` of every call
    server: TokenInterceptor           -> the method; UNAUTHENTICATED without the token; health checks need none

`common.secret.call_token` makes it. It is for one address: whoever takes over the port of a dead worker receives no
token that another worker accepts. A cluster with mTLS has no tokens: there the certificates show it.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

HEADER = "diptych-call-token"
_OPEN = "/grpc.health.v1.Health/"


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc brings no types
    """Refuses calls without the token of this server. It refuses all until `expect`."""

    def __init__(self) -> None:
        self._token = b""
        self._address = ""

    def expect(self, token: str, address: str) -> None:
        """Args: address: of this server, as callers know it, for the refusal's text."""
        self._token, self._address = token.encode(), address

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if not handler_call_details.method.startswith(_OPEN):
            given = [value for name, value in handler_call_details.invocation_metadata or () if name == HEADER]
            if not self._token or len(given) != 1 or not hmac.compare_digest(given[0].encode(), self._token):
                return self._refusal()
        return await continuation(handler_call_details)

    def _refusal(self) -> grpc.RpcMethodHandler:
        why = (
            f"the worker at {self._address} answers only calls with a token of the cluster secret: "
            "name the cluster's file in --secret-file"
        )

        async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
            # A bare status: not an error of a request, which would be sent on to the client of the router.
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

        # This handler kind reads nothing before it answers, whatever the kind of the method.
        return grpc.stream_stream_rpc_method_handler(refuse)


def with_token(channel: Any, token: str) -> Any:
    """The channel, of grpc or grpc.aio, with the token in the metadata of every call."""
    return _TokenChannel(channel, ((HEADER, token),))


class _TokenChannel:
    """Wraps methods instead of calls: grpc.aio's client interceptors would handle every message of a stream."""

    def __init__(self, channel: Any, token: tuple[tuple[str, str]]) -> None:
        self._channel = channel
        self._token = token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def __enter__(self) -> _TokenChannel:
        self._channel.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._channel.__exit__(*error)

    async def __aenter__(self) -> _TokenChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._channel.__aexit__(*error)

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return self._tokened(self._channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return self._tokened(self._channel.unary_stream(*method, **options))

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return self._tokened(self._channel.stream_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return self._tokened(self._channel.stream_stream(*method, **options))

    def _tokened(self, method: Any) -> Callable[..., Any]:
        def call(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
            return method(*arguments, metadata=(*(metadata or ()), *self._token), **options)

        return call
