"""From untrusted bytes to a JSON object, with bounds on size, time, encoding, nesting, numbers and number of values.

A large body is parsed, and converted to a request, on a thread: see `Bodies`. The JSON parser holds the GIL, so a body
of millions of values (which may be only brackets and commas) is rejected before, by counting without the GIL.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from diptych.common.errors import DiptychError, InvalidRequestError
from diptych.router.preprocess.bounded_executor import LONG_BYTES, BoundedExecutor

MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT_S = 30.0
MAX_VALUES = 1_000_000
"""Most values of one body: 64 prompts of 15,000 token ids."""
MAX_INTEGER_DIGITS = 40
"""More digits than any field accepts: a longer integer is replaced by one out of every range, so that its field rejects
it."""
_LENGTH_DIGITS = 19
_LONG_INTEGER = re.compile(rb"(?<!\d)\d{%d}" % (MAX_INTEGER_DIGITS + 1))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_QUOTE, _COMMA, _COLON = (ord(character) for character in '",:')

_T = TypeVar("_T")


class BodyTooLargeError(DiptychError):
    grpc_code, http_status, reason = 8, 413, "BODY_TOO_LARGE"


class BodyEncodingError(DiptychError):
    grpc_code, http_status, reason = 3, 415, "BODY_ENCODING"


class BodyTimeoutError(DiptychError):
    grpc_code, http_status, reason, retryable = 4, 408, "BODY_TIMEOUT", True


async def read_body(request: Request, *, limit: int = MAX_BODY_BYTES, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body. Raises: BodyTooLargeError (as early as possible), BodyEncodingError, BodyTimeoutError,
    ClientDisconnect."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise BodyEncodingError(f"content-encoding {encoding[:32]!r} is not supported: send the body unencoded")
    declared = request.headers.get("content-length", "").lstrip("0")
    # A number of many digits is not parsed: it is too large anyway.
    if declared.isdecimal() and (len(declared) > _LENGTH_DIGITS or int(declared) > limit):
        shown = declared if len(declared) <= _LENGTH_DIGITS else f"{declared[:_LENGTH_DIGITS]}..."
        raise BodyTooLargeError(f"the body has {shown} bytes; at most {limit} are taken")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect()
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > limit:
                    raise BodyTooLargeError(f"the body has more than {limit} bytes")
                parts.append(part)
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not arrive within {timeout_s:g} s") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Bodies:
    """Work on bodies: small ones at once, large ones on a thread."""

    def __init__(self) -> None:
        self._lanes = BoundedExecutor("large request bodies", "body")

    async def object_of(self, body: bytes, make: Callable[[dict[str, Any]], _T]) -> _T:
        """`make` applied to the body's object. Raises: as parse_object and `make` do, OverloadedError."""
        parse = parse_object if len(body) <= LONG_BYTES else _parse_large
        return await self.off_loop(lambda: make(parse(body)), len(body))

    async def off_loop(self, work: Callable[[], _T], size: int) -> _T:
        """The result of `work`, whose input has about `size` bytes. Raises: OverloadedError, and the errors of `work`."""
        return work() if size <= LONG_BYTES else await self._lanes.run(work, size)

    def close(self) -> None:
        self._lanes.close()


def _parse_large(body: bytes) -> dict[str, Any]:
    if count_values(body) > MAX_VALUES:
        raise InvalidRequestError(f"the body holds more than {MAX_VALUES} values")
    with _uncollected():
        return parse_object(body)


def count_values(body: bytes) -> int:
    """Approximate number of values in a JSON text, including keys: commas and colons outside strings. Releases the GIL."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    text = np.frombuffer(plain, np.uint8)
    inside = np.cumsum(text == _QUOTE, dtype=np.uint8) & 1  # the parity survives the overflow
    parts = (text == _COMMA) | (text == _COLON)
    return int(np.count_nonzero(parts & (inside == 0))) + 1


_collecting = threading.Lock()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection, which would scan every value of a large body repeatedly and block all threads."""
    with _collecting:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as an object. NaN and Infinity pass as floats: the field's check rejects them by name. Raises:
    InvalidRequestError for anything but one JSON object in valid UTF-8."""
    try:
        value = _quickly(body)
        if value is None:
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


def _quickly(body: bytes) -> Any:
    """The body's value by a parser that is six times as fast, and takes less: what it takes has the same value. None: it
    is left to the other."""
    if _LONG_INTEGER.search(body):
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _check_text(value: dict[str, Any]) -> None:
    """Reject half a surrogate pair, which JSON escapes can contain: it can be neither tokenized nor sent."""
    for name, part in value.items():
        left: list[Any] = [name, part]
        while left:
            one = left.pop()
            if isinstance(one, str):
                try:
                    one.encode()
                except UnicodeEncodeError:
                    shown = name.encode(errors="replace").decode()
                    raise InvalidRequestError(
                        f"{shown} holds a lone surrogate: not valid Unicode text", param=shown
                    ) from None
            elif isinstance(one, dict):
                left += one
                left += one.values()
            elif isinstance(one, list):
                left += one


def _bounded_int(digits: str) -> int:
    if len(digits) <= MAX_INTEGER_DIGITS:
        return int(digits)
    huge: int = 10**MAX_INTEGER_DIGITS
    return -huge if digits.startswith("-") else huge
