"""The client of processes.py: connections of their own, each with one request after another, until a given time.

    python -P -m diptych.bench.router.processes_client '{"url": ..., ...}'      prints one line of JSON

It reads no more of an answer than its status, its end and its usage, so that it costs little beside a router. Over gRPC it
is the SDK, whose clients in one process share one connection.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import cast

import numpy as np
import uvloop

from diptych.client import AsyncClient

_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one client.

    Args:
        url: "http://host:port" or "grpc://host:port".
        users: requests at any time.
        begin, end: on time.monotonic, of the measured answers: those that ended within it. Requests are sent from the start
            on, so that the router is in its stride.
    """

    url: str
    users: int
    prompt_tokens: int
    output_tokens: int
    begin: float
    end: float


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._answer: asyncio.Future[int] | None = None
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the router closed the connection"))

    def ask(self, request: bytes) -> asyncio.Future[int]:
        """The number of tokens that the server reports."""
        assert self.transport is not None
        self._data.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._data += data
        answer = self._answer
        if answer is None or answer.done() or not self._whole():
            return
        usage = _USAGE.findall(self._data)
        if not self._data.startswith(b"HTTP/1.1 200") or not usage:
            answer.set_exception(ConnectionError(bytes(self._data[:300]).decode("utf-8", "replace")))
        else:
            answer.set_result(int(usage[-1]))

    def _whole(self) -> bool:
        if self._data.endswith(b"\r\n0\r\n\r\n"):
            return True
        end = self._data.find(b"\r\n\r\n")
        length = _LENGTH.search(self._data, 0, max(0, end))
        return length is not None and len(self._data) >= end + 4 + int(length[1])


async def _over_http(load: Load, stack: AsyncExitStack) -> list[Callable[[], Awaitable[int]]]:
    host, _, port = load.url.removeprefix("http://").rpartition(":")
    more = {"stream": True, "stream_options": {"include_usage": True}} if load.output_tokens > 1 else {}
    ids = [1000 + number for number in range(load.prompt_tokens)]
    body = json.dumps({"prompt": ids, "max_tokens": load.output_tokens, **more}).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    request = "\r\n".join((*lines, "", "")).encode() + body
    askers: list[Callable[[], Awaitable[int]]] = []
    for _ in range(load.users):
        transport, one = await asyncio.get_running_loop().create_connection(_Connection, host, int(port))
        stack.callback(transport.close)
        askers.append(lambda one=one: one.ask(request))  # type: ignore[misc]
    return askers


async def _over_grpc(load: Load, stack: AsyncExitStack) -> list[Callable[[], Awaitable[int]]]:
    client = await stack.enter_async_context(AsyncClient(load.url.removeprefix("grpc://"), timeout_s=TIMEOUT_S))
    ids = [1000 + number for number in range(load.prompt_tokens)]

    async def ask() -> int:
        answer = await client.generate(token_ids=ids, max_tokens=load.output_tokens)
        return len(answer.token_ids)

    return [ask] * load.users


async def run(load: Load) -> dict[str, object]:
    """Raises: RuntimeError when an answer has not the number of tokens that was asked for."""
    walls: list[float] = []
    sent = 0

    async def user(ask: Callable[[], Awaitable[int]]) -> None:
        nonlocal sent
        while (began := time.monotonic()) < load.end:
            sent += 1
            count = await ask()
            ended = time.monotonic()
            if count != load.output_tokens:
                raise RuntimeError(f"{count} tokens arrived, {load.output_tokens} were requested")
            if load.begin <= ended < load.end:
                walls.append(ended - began)

    async with AsyncExitStack() as stack:
        askers = await (_over_http if load.url.startswith("http") else _over_grpc)(load, stack)
        await asyncio.gather(*map(user, askers))
    return {"sent": sent, "answers": len(walls), "wall_s": np.asarray(walls).round(6).tolist()}


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(Load(**json.loads(sys.argv[1]))))))
