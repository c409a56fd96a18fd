"""uvicorn's HTTP/1.1 with deadlines, and with responses to malformed requests.

    nothing, or half a head, for head_timeout_s    closed (half a head gets a 408 first)
    answered before the body was read              the rest must arrive within LINGER_S
    a request head over the limit                  431
    HTTP/2 by prior knowledge, as gRPC uses it     505, in HTTP/1.1: gRPC reports that, and backs off

A half-closed connection is treated as a disconnect, as in most servers: over TCP the two are indistinguishable until a
write, and a disconnected client must free its blocks at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from diptych.common.ids import new_request_id
from diptych.router.api.openai.errors import error_object
from diptych.router.observe.access_log import Access

LINGER_S = 5.0
_TIMEOUT, _TOO_LARGE, _NOT_HTTP_1 = 408, 431, 505
_CODES = {_TIMEOUT: "head_timeout", _TOO_LARGE: "headers_too_large", _NOT_HTTP_1: "http_version_not_supported"}
CHUNKS = "chunks"
"""Key of HttpProtocol.write_chunk in the ASGI scope's state."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class HttpProtocol(H11Protocol):
    """Args: head_timeout_s: see HttpOptions."""

    def __init__(self, *args: Any, head_timeout_s: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self.app_state = {**self.app_state, CHUNKS: self.write_chunk}
        self._head_timeout_s = head_timeout_s
        self._begin: bytes | None = b""
        """The connection's first bytes while they may be an HTTP/2 preface; None: they are not."""
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: tuple[object, object] | None = None

    async def write_chunk(self, data: bytes) -> None:
        """Write a part, not empty, of the running response's body, which has begun, has chunks and goes on: the bytes that
        h11 would write. A chunk changes none of its states, and ASGI's message with h11's event and checks cost as much
        as all of the formatting."""
        cycle = self.cycle
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._begin is not None:
            self._begin += data
            if self._begin.startswith(_PREFACE):
                self._answer(_NOT_HTTP_1, "this port speaks HTTP/1.1, not HTTP/2; gRPC has a port of its own")
                return
            if _PREFACE.startswith(self._begin):
                return  # the deadline is running
            data, self._begin = self._begin, None
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Set a deadline while the rest of a request is awaited and no other timer covers it."""
        awaited: tuple[object, object] | None = None
        their = self.conn.their_state
        if self.transport.is_closing():
            pass
        elif their is h11.IDLE:
            if self.cycle is None or self.conn.trailing_data[0]:
                awaited = (self.cycle, their)
            elif self.timeout_keep_alive_task is None:  # the end of a discarded body arrived
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        elif their is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
            awaited = (self.cycle, their)
        if awaited == self._awaited:
            return
        self._unwatch()
        self._awaited = awaited
        if awaited is not None:
            wait_s = self._head_timeout_s if their is h11.IDLE else LINGER_S
            self._deadline = self.loop.call_later(wait_s, self._late)

    def _unwatch(self) -> None:
        self._awaited = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._answer(_TIMEOUT, f"the request head did not arrive within {self._head_timeout_s:g} s")
        else:
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Some clients offer HTTP/2 with every request; they accept HTTP/1.1."""

    def send_400_response(self, msg: str) -> None:
        """Called for input that is not HTTP; h11 chooses the status."""
        if self.conn.their_state is h11.ERROR and self._head_is_too_long():
            self._answer(_TOO_LARGE, "the request head is too large")
        else:
            self._answer(400, msg)

    def _answer(self, status: int, text: str) -> None:
        """Write a final response in place of the application's and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # part of another response is already sent
            self.transport.close()
            return
        body = msgspec.json.encode(error_object(status, text, code=_CODES.get(status)))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", new_request_id().encode()),
        ]
        access = Access("http", "", status=status, request_id=dict(headers)[b"x-request-id"].decode())
        access.fail(_CODES.get(status) or "BAD_HTTP", text)
        access.write()
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _head_is_too_long(self) -> bool:
        return len(self.conn.trailing_data[0]) > (self.config.h11_max_incomplete_event_size or 0)
