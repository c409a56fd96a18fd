"""uvicorn's HTTP/1.1 with one answer changed: a request head that never ends within the limit is 431, not 400.

A client that closes its sending side is taken to have left, as in most servers: over TCP the two look the same until
something is written, and a client that left must free its blocks at once.
"""

from __future__ import annotations

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from diptych.common.ids import new_request_id
from diptych.router.http_errors import error_object

_TOO_LARGE = 431


class HttpProtocol(H11Protocol):
    def send_400_response(self, msg: str) -> None:
        """Called for whatever is no HTTP; h11 itself knows what status that deserves."""
        status = _TOO_LARGE if self.conn.their_state is h11.ERROR and self._head_is_too_long() else 400
        text = "the request head is too large" if status == _TOO_LARGE else msg
        body = msgspec.json.encode(error_object(status, text, code="headers_too_large" if status == 431 else None))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", new_request_id().encode()),
        ]
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # half of another answer is out already
            self.transport.close()
            return
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _head_is_too_long(self) -> bool:
        return len(self.conn.trailing_data[0]) > (self.config.h11_max_incomplete_event_size or 0)
