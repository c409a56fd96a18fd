"""Checks before routing: the request's size and framing, and the caller's key.

Only health and the status page's static files, spelled exactly, need no key; every other path needs one, known or not.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.common.errors import AuthenticationError, DiptychError
from diptych.router.api.auth.authenticator import ANYBODY, STRANGER, Authenticator, current_caller
from diptych.router.api.openai.errors import error_response
from diptych.router.observe.access_log import current_access
from diptych.router.observe.status_page import STATIC_PATHS

MAX_HEADER_BYTES = 32 * 1024
OPEN_PATHS = frozenset({"/live", "/health"}) | STATIC_PATHS
PROBE_PATHS = frozenset({"/metrics", "/ready"})
"""Need no key with `open_metrics`."""


class HeadersTooLargeError(DiptychError):
    grpc_code, http_status, reason = 8, 431, "HEADERS_TOO_LARGE"


class FramingError(DiptychError):
    grpc_code, http_status, reason = 3, 400, "AMBIGUOUS_FRAMING"


class GuardMiddleware:
    """Middleware for these checks. `keys`: None: every caller is the default tenant. `open_metrics`: /metrics and
    /ready need no key."""

    def __init__(self, app: ASGIApp, keys: Authenticator | None, *, open_metrics: bool = False) -> None:
        self._app = app
        self._keys = keys
        self._open = OPEN_PATHS | (PROBE_PATHS if open_metrics else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # only HTTP is served
            await self._app(scope, receive, send)
            return
        try:
            size, names = 0, set()
            for name, value in scope["headers"]:
                size += len(name) + len(value) + 4
                names.add(name)
            if size > MAX_HEADER_BYTES:
                raise HeadersTooLargeError(f"the headers have {size} bytes; at most {MAX_HEADER_BYTES} are taken")
            if b"content-length" in names and b"transfer-encoding" in names:
                # A proxy may have used the other header: what follows could be another client's request (request
                # smuggling).
                raise FramingError("content-length and transfer-encoding cannot be combined")
            current_caller.set(ANYBODY if self._keys is None else STRANGER)
            if self._keys is not None and scope["path"] not in self._open:
                caller = self._keys.identify(_authorization(scope))
                current_caller.set(caller)
                if (access := current_access.get()) is not None:
                    access.tenant = caller.tenant
        except DiptychError as error:
            extra = {"connection": "close"} if isinstance(error, FramingError) else None
            await error_response(error, extra=extra)(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as GET; the server sends no body
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) > 1:
        raise AuthenticationError("more than one Authorization header")
    return values[0].decode("latin-1") if values else ""
