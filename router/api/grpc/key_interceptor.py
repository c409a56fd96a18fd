"""With keys enabled every gRPC method requires one, including health and unknown methods: the check precedes routing.
Only operators' calls do not, which prove that their caller has the cluster secret."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from diptych.common.errors import AuthenticationError
from diptych.router.api.auth.authenticator import Authenticator, current_caller
from diptych.router.observe.access_log import Access
from diptych.rpc.errors import abort
from diptych.rpc.operator import SERVICE

_OPERATIONS = f"/{SERVICE}/"


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc brings no types
    def __init__(self, keys: Authenticator) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if str(handler_call_details.method).startswith(_OPERATIONS):
            return await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        values = [value for name, value in metadata if name == "authorization"]
        try:
            if len(values) > 1:
                raise AuthenticationError("more than one Authorization header")
            # Interceptor and method run in one task, so the context variable is set for this call only.
            current_caller.set(self._keys.identify(values[0] if values else ""))
        except AuthenticationError as error:
            access = Access("grpc", str(handler_call_details.method))
            access.failed(error)
            access.write()
            return _refuse(error)
        return await continuation(handler_call_details)


def _refuse(error: AuthenticationError) -> grpc.RpcMethodHandler:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    # This handler kind reads nothing before it answers, whatever the kind of the method.
    return grpc.stream_stream_rpc_method_handler(refuse)
