"""Deadlines of a connection, on a fake clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import openai
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from diptych.router.api.http.options import HttpOptions
from diptych.router.api.http.protocol import LINGER_S, HttpProtocol
from diptych.router.config import RouterConfig

HEAD_S, IDLE_S = 30.0, 5.0
HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"


class Timer:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """The real loop, except for its timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []
        self.create_task = asyncio.get_running_loop().create_task

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay, call)
        self.timers.append(timer)
        return timer

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self.timers if not timer.cancelled and timer.at <= until]:
            timer = min(due, key=lambda one: one.at)
            self.timers.remove(timer)
            self.now = timer.at
            timer.call()
        self.now = until


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def write(self, data: Any) -> None:
        if not self.closed:
            self.sent += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Connection:
    """A connection to an application that answers at once, without reading the body."""

    def __init__(self) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        self.loop = Loop()
        config = uvicorn.Config(
            app,
            http=cast(Any, partial(HttpProtocol, head_timeout_s=HEAD_S)),
            timeout_keep_alive=cast(int, IDLE_S),
            log_config=None,
            access_log=False,
            lifespan="off",
        )
        config.load()
        self.state = ServerState()
        self.protocol = HttpProtocol(config, self.state, {}, cast(Any, self.loop), head_timeout_s=HEAD_S)
        self.transport = Transport()
        self.protocol.connection_made(self.transport)

    async def send(self, data: bytes) -> None:
        self.protocol.data_received(data)
        while self.state.tasks:
            await asyncio.gather(*self.state.tasks)

    @property
    def answers(self) -> int:
        return self.transport.sent.count(b"HTTP/1.1 200")


@pytest.fixture
async def connection() -> Connection:
    return Connection()


async def test_a_connection_that_sends_nothing_is_closed(connection: Connection) -> None:
    connection.loop.advance(HEAD_S - 0.1)
    assert not connection.transport.closed
    connection.loop.advance(0.1)
    assert (connection.transport.closed, connection.transport.sent) == (True, b"")


@pytest.mark.parametrize("after_one", [False, True])
async def test_half_a_head_is_closed_with_408_however_it_drips(connection: Connection, after_one: bool) -> None:
    if after_one:
        await connection.send(HEAD + b"\r\n")
        connection.loop.advance(1)
        connection.transport.sent = b""
    for byte in HEAD[:-2]:
        await connection.send(bytes([byte]))
        connection.loop.advance(1)
    while not connection.transport.closed:
        assert connection.loop.now < HEAD_S + 2
        await connection.send(b"x")
        connection.loop.advance(1)
    head, body = connection.transport.sent.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"] == {
        "message": "the request head did not arrive within 30 s",
        "type": "timeout_error",
        "param": None,
        "code": "head_timeout",
    }


async def test_whole_requests_are_answered_and_the_connection_kept_for_a_while(connection: Connection) -> None:
    for number in range(1, 20):
        await connection.send(HEAD)
        connection.loop.advance(IDLE_S - 1)  # a head may take longer than a connection is kept
        connection.loop.advance(IDLE_S - 1)
        await connection.send(b"\r\n")
        assert connection.answers == number
        connection.loop.advance(IDLE_S - 1)
        assert not connection.transport.closed
    connection.loop.advance(IDLE_S)
    assert connection.transport.closed
    assert not [timer for timer in connection.loop.timers if not timer.cancelled]


async def test_pipelined_requests_do_not_add_up_to_a_late_one(connection: Connection) -> None:
    """Each piece ends one request and begins the next."""
    await connection.send(HEAD)
    for number in range(1, 60):
        connection.loop.advance(HEAD_S / 10)
        await connection.send(b"\r\n" + HEAD)
        assert (connection.answers, connection.transport.closed) == (number, False)
    connection.loop.advance(HEAD_S)
    assert connection.transport.closed


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_never_ends_is_not_read_for_ever(connection: Connection, chunked: bool) -> None:
    """The response is sent; the rest of the body is discarded."""
    kind = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 1000000"
    piece = b"1\r\nx\r\n" if chunked else b"x"
    await connection.send(b"POST / HTTP/1.1\r\nHost: a\r\n" + kind + b"\r\n\r\n" + piece)
    assert connection.answers == 1
    while not connection.transport.closed:
        assert connection.loop.now <= LINGER_S
        connection.loop.advance(0.5)
        await connection.send(piece)


async def test_a_body_that_ends_after_its_answer_leaves_the_connection_open_and_watched(connection: Connection) -> None:
    await connection.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nx")
    connection.loop.advance(LINGER_S - 1)
    await connection.send(b"x")
    connection.loop.advance(IDLE_S - 1)
    assert not connection.transport.closed
    await connection.send(HEAD + b"\r\n")
    assert connection.answers == 2
    connection.loop.advance(IDLE_S)
    assert connection.transport.closed
    connection.protocol.connection_lost(None)
    assert not [timer for timer in connection.loop.timers if not timer.cancelled]


async def test_an_unread_body_that_ends_is_not_kept_for_ever(connection: Connection) -> None:
    await connection.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nx")
    connection.loop.advance(1)
    await connection.send(b"x")
    connection.loop.advance(IDLE_S)
    assert connection.transport.closed


@pytest.mark.parametrize("size", [1, 3, 24, 80])
async def test_an_http2_preface_is_answered_with_words(connection: Connection, size: int) -> None:
    data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for at in range(0, len(data), size):
        if not connection.transport.closed:
            await connection.send(data[at : at + size])
    assert connection.transport.closed
    head, body = connection.transport.sent.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505")
    assert json.loads(body)["error"]["message"] == "this port speaks HTTP/1.1, not HTTP/2; gRPC has a port of its own"


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_what_only_begins_like_http2_is_http1(connection: Connection, size: int) -> None:
    data = b"PROPFIND / HTTP/1.1\r\nHost: a\r\n\r\n"
    for at in range(0, len(data), size):
        await connection.send(data[at : at + size])
    assert connection.answers == 1


def test_idle_connections_are_kept_longer_here_than_by_clients() -> None:
    """A request that meets a connection which the server is closing fails, and its client cannot tell whether it ran."""
    openai_s = openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert openai_s is not None
    aiohttp_s, load_balancers_s, go_s = 15.0, 60.0, 90.0  # by their documentation
    assert HttpOptions().idle_timeout_s > max(openai_s, aiohttp_s, load_balancers_s, go_s)
    assert RouterConfig().http_idle_timeout_s == HttpOptions().idle_timeout_s
