"""From untrusted bytes to a JSON object: size, time, encoding, nesting and numbers are bounded here."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from diptych.common.errors import DiptychError, InvalidRequestError

MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT_S = 30.0
MAX_INTEGER_DIGITS = 40
"""More digits than any field takes: a longer integer is replaced by one that is out of every range, and so refused by name."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyTooLargeError(DiptychError):
    grpc_code, http_status, reason = 8, 413, "BODY_TOO_LARGE"


class BodyTimeoutError(DiptychError):
    grpc_code, http_status, reason, retryable = 4, 408, "BODY_TIMEOUT", True


async def read_body(request: Request, *, limit: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body. Raises: BodyTooLargeError (as soon as it is known), BodyTimeoutError, ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise BodyTooLargeError(f"the body has {declared} bytes; at most {limit} are taken")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise BodyTooLargeError(f"the body has more than {limit} bytes")
                parts.append(part)
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not arrive within {timeout_s:g} s") from None
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """NaN and Infinity are let through as floats: the field's own check refuses them by name.

    Raises: InvalidRequestError for anything but one JSON object in valid UTF-8.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_int=_bounded_int)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not valid UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    if _SURROGATE.search(body):
        _check_text(value)
    return value


def _check_text(value: dict[str, Any]) -> None:
    """JSON can spell half a surrogate pair, which is no text: no tokenizer takes it and no answer can repeat it."""
    for name, part in value.items():
        try:
            json.dumps([name, part], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            shown = name.encode(errors="replace").decode()
            raise InvalidRequestError(f"{shown} holds a lone surrogate: not valid Unicode text", param=shown) from None
        except RecursionError:
            raise InvalidRequestError("the body is nested too deeply") from None


def _bounded_int(digits: str) -> int:
    if len(digits) <= MAX_INTEGER_DIGITS:
        return int(digits)
    huge: int = 10**MAX_INTEGER_DIGITS
    return -huge if digits.startswith("-") else huge


__all__ = ["BodyTimeoutError", "BodyTooLargeError", "ClientDisconnect", "parse_object", "read_body"]
