"""The client of routers.py: one process on uvloop, `concurrency` requests at any time.

    python -P -m diptych.bench.peers.client '{"target": ..., ...}'      prints one line of JSON

HTTP uses keep-alive connections with minimal parsing (a cheap client favours the HTTP routers); gRPC is the ordinary
SDK.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import uvloop

from diptych.client import AsyncClient

_END = b"\r\n\r\n"
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one run. `target`: "http://host:port", "grpc://host:port" or "lookaside://host:port". `stream`: HTTP:
    as SSE; the SDK always streams."""

    target: str
    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    stream: bool
    model: str


def body_of(load: Load) -> dict[str, Any]:
    """The prompt is text of this many words: the peers forward it without tokenizing."""
    prompt = " ".join(f"w{i}" for i in range(load.prompt_tokens))
    return {"model": load.model, "prompt": prompt, "max_tokens": load.output_tokens, "stream": load.stream}


class Connection(asyncio.Protocol):
    """One request at a time; `ask` returns the number of received tokens."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._answer: asyncio.Future[int] | None = None
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the router closed the connection"))

    def ask(self, request: bytes) -> asyncio.Future[int]:
        assert self._transport is not None
        self._data.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        held = self._data
        held += data
        answer = self._answer
        if answer is None or answer.done():
            return
        if not held.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")) and _END in held:
            answer.set_exception(ConnectionError(bytes(held[:200]).decode("utf-8", "replace")))
        elif held.endswith((b"\r\n0\r\n\r\n", b"\n0\r\n\r\n")):
            answer.set_result(_unchunked(bytes(held[held.find(_END) + 4 :])).count(b'"text":'))
        elif (end := held.find(_END)) >= 0:
            head = bytes(held[:end]).lower()
            at = head.find(b"content-length:")
            if at >= 0 and len(held) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]):
                whole = json.loads(held[end + 4 :])
                answer.set_result(whole["usage"]["completion_tokens"])


def _unchunked(data: bytes) -> bytes:
    """The body without chunk framing; chunks may be cut anywhere."""
    parts, at = [], 0
    while size := int(data[at : (line := data.index(b"\r\n", at))], 16):
        parts.append(data[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return b"".join(parts)


async def over_http(load: Load) -> tuple[list[Callable[[], Awaitable[int]]], Callable[[], Awaitable[None]]]:
    host, port = load.target.removeprefix("http://").split(":")
    body = json.dumps(body_of(load)).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    request = "\r\n".join((*head, "", "")).encode() + body
    loop = asyncio.get_running_loop()
    found = [await loop.create_connection(Connection, host, int(port)) for _ in range(load.concurrency)]

    async def close() -> None:
        for transport, _ in found:
            transport.close()

    return [lambda one=one: one.ask(request) for _, one in found], close  # type: ignore[misc]


async def over_grpc(load: Load) -> tuple[list[Callable[[], Awaitable[int]]], Callable[[], Awaitable[None]]]:
    scheme, _, address = load.target.partition("://")
    client = AsyncClient(address, lookaside=scheme == "lookaside", timeout_s=TIMEOUT_S)
    ids = [1000 + i for i in range(load.prompt_tokens)]

    async def ask() -> int:
        answer = await client.generate(token_ids=ids, max_tokens=load.output_tokens, local_prefill_max_tokens=0)
        return len(answer.token_ids)

    return [ask] * load.concurrency, client.close


async def run(load: Load) -> dict[str, Any]:
    askers, close = await (over_http if load.target.startswith("http") else over_grpc)(load)
    left, walls, tokens = load.requests, [], 0

    async def one(ask: Callable[[], Awaitable[int]]) -> None:
        nonlocal left, tokens
        while left > 0:
            left -= 1
            began = time.perf_counter()
            count = await ask()
            walls.append(time.perf_counter() - began)
            if count != load.output_tokens:
                raise RuntimeError(f"{count} tokens arrived, {load.output_tokens} were requested")
            tokens += count

    await asyncio.gather(*(ask() for ask in askers))  # warm-up: connections, streams, first use
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await asyncio.gather(*(one(ask) for ask in askers))
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    await close()
    p50, p99 = np.percentile(walls, [50, 99])
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "requests": len(walls), "wall_s": wall_s, "tokens": tokens, "client_cpu_s": cpu_s,
        "p50_ms": 1e3 * float(p50), "p99_ms": 1e3 * float(p99),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(Load(**json.loads(sys.argv[1]))))))
