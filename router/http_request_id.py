"""ASGI middleware: every answer carries x-request-id, also those that no route made."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.common.ids import new_request_id


class RequestIdMiddleware:
    """A route that has minted an id of its own sets the header itself; this fills in the rest."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", new_request_id())
            await send(message)

        await self._app(scope, receive, send_with_id)
