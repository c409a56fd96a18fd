"""ASGI middleware: every response carries x-request-id, also errors before routing; every request has a line in the
log."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.common.ids import new_request_id
from diptych.router.api.http.guard import OPEN_PATHS, PROBE_PATHS
from diptych.router.observe.access_log import Access, logged

_PROBES = OPEN_PATHS | PROBE_PATHS | {"/status", "/status.json"}
_MAX_ROUTE = 256
_CLIENT_LEFT = 499


class RequestIdMiddleware:
    """A route that created a request id sets the header itself; this sets it for the others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        route = f"{scope['method']} {scope['path']}"
        with logged(Access("http", route[:_MAX_ROUTE], quiet=scope["path"] in _PROBES)) as access:

            async def send_with_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = message.get("headers", [])
                    own = next((value for name, value in headers if name == b"x-request-id"), None)
                    if own is None:
                        own = (access.request_id or new_request_id()).encode()
                        message["headers"] = [*headers, (b"x-request-id", own)]
                    access.request_id, access.status = own.decode("latin-1"), message["status"]
                await send(message)

            await self._app(scope, receive, send_with_id)
            if not access.status or access.status == _CLIENT_LEFT:
                access.cancelled = True
