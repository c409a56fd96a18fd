"""Errors in the OpenAI API's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from diptych.common.errors import DiptychError
from diptych.router.api.openai.unsupported import no_route_message, not_allowed
from diptych.router.observe.access_log import current_access

DEFAULT_RETRY_AFTER_S = 1.0
WARNING_HEADER = "x-diptych-warning"
MAX_WARNING_CHARS = 1024
RETRY_STATUSES = frozenset({429, 503, 529})

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    505: "invalid_request_error",
    529: "overloaded_error",
}
_CODES = {"INVALID_ARGUMENT": "invalid_value", "PROMPT_TOO_LONG": "context_length_exceeded"}


def error_object(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": _TYPES.get(status, "server_error"), "param": param, "code": code}}


def error_body(error: DiptychError) -> dict[str, Any]:
    """The body of an error response, or of the error event of a stream."""
    code = _CODES.get(error.reason, error.reason.lower())
    return error_object(error.http_status, error.message, param=error.param, code=code)


def retry_headers(status: int, retry_after_s: float | None) -> dict[str, str]:
    """Without these headers OpenAI clients retry at once."""
    if status not in RETRY_STATUSES:
        return {}
    wait_s = DEFAULT_RETRY_AFTER_S if retry_after_s is None else max(0.0, retry_after_s)
    return {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(math.ceil(wait_s * 1000))}


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """Ignored fields, for people: printable ASCII, at most MAX_WARNING_CHARS."""
    if not warnings:
        return {}
    text = ""
    for number, warning in enumerate(warnings):
        plain = "".join(char if char.isprintable() and char.isascii() else "?" for char in warning)
        rest = f"; and {len(warnings) - number} more"
        if len(text) + len(plain) + len(rest) + 2 > MAX_WARNING_CHARS:
            text += rest
            break
        text += f"; {plain}" if text else plain
    return {WARNING_HEADER: text}


def error_response(error: DiptychError, request_id: str = "", extra: Mapping[str, str] | None = None) -> Response:
    if (access := current_access.get()) is not None:
        access.failed(error)
    headers = dict(extra or {}) | retry_headers(error.http_status, error.retry_after_s)
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    if request_id:
        headers["x-request-id"] = request_id
    return json_response(error_body(error), error.http_status, headers)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def bug_response() -> Response:
    return json_response(error_object(500, "internal error; the server's log has the traceback", code="internal"), 500)


def gone_response() -> Response:
    """The client disconnected while sending its body."""
    return Response(status_code=499)


def install(app: FastAPI) -> None:
    """Convert every kind of error to the same form."""

    async def on_diptych(request: Request, error: Exception) -> Response:
        assert isinstance(error, DiptychError)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        message, code = str(error.detail), None
        if error.status_code == 404:
            known = {route.path for route in app.routes if isinstance(route, Route)}
            message, code = no_route_message(request.method, request.url.path, known), "unknown_url"
        elif error.status_code == 405:
            allowed = headers.get("Allow", "").split(", ")
            message, code = not_allowed(request.method, request.url.path, allowed), "method_not_supported"
        return json_response(error_object(error.status_code, message, code=code), error.status_code, headers)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0] if error.errors() else {"loc": (), "msg": "the request cannot be used"}
        param = next((str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")), None)
        return json_response(error_object(400, f"{param}: {first['msg']}", param=param, code="invalid_value"), 400)

    async def on_bug(request: Request, error: Exception) -> Response:
        return bug_response()

    async def on_gone(request: Request, error: Exception) -> Response:
        return gone_response()

    app.add_exception_handler(DiptychError, on_diptych)
    app.add_exception_handler(ClientDisconnect, on_gone)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_bug)
