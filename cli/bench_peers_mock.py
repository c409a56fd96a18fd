"""The mock worker behind every router of `bench_peers`: one process, two doors, one script.

    python -P -m diptych.cli.bench_peers_mock SECRET_FILE     prints `serves HTTP_PORT DECODE_ADDRESS CLIENT_ADDRESS`

A step of the mock gives every running request its next token, as an engine does; steps follow one another as fast as the
process can, so that routers and not the mock's clock set the pace. The HTTP door speaks what the peers forward
(/v1/completions, streamed as one SSE chunk a token, or whole); it parses as little as it can. The gRPC door is
diptych.router.fake_decode.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import cast

import uvloop

from diptych.common.secret import derive_key, load_secret
from diptych.common.ticket import PURPOSE
from diptych.router.fake_decode import FakeDecode

MODEL = "mock"
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
_STREAM = re.compile(rb'"stream":\s*true')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def _event(number: int) -> bytes:
    choice = {"index": 0, "text": f"t{number} ", "logprobs": None, "finish_reason": None}
    body = {"id": "c", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


_EVENTS = [_event(number) for number in range(4096)]


class Steps:
    """Every running stream gets a token a step."""

    def __init__(self) -> None:
        self._running: dict[HttpDoor, tuple[int, int]] = {}
        self._wake = asyncio.Event()

    def add(self, door: HttpDoor, num_tokens: int) -> None:
        self._running[door] = (0, num_tokens)
        self._wake.set()

    def drop(self, door: HttpDoor) -> None:
        self._running.pop(door, None)

    async def run(self) -> None:
        while True:
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
            for door, (number, total) in list(self._running.items()):
                if number < total:
                    door.write(_EVENTS[number % len(_EVENTS)])
                    self._running[door] = (number + 1, total)
                else:
                    door.write(_DONE)
                    self.drop(door)
            await asyncio.sleep(0)


class HttpDoor(asyncio.Protocol):
    """One connection: request after request."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._buffer = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.drop(self)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, end)
            size = int(length[1]) if length else 0
            if len(self._buffer) < end + 4 + size:
                return
            line, body = self._buffer[: self._buffer.find(b"\r\n")], self._buffer[end + 4 : end + 4 + size]
            self._buffer = self._buffer[end + 4 + size :]
            self._answer(line, body)

    def _answer(self, line: bytes, body: bytes) -> None:
        if b"/v1/completions" not in line:
            facts = {"status": "healthy", "model_path": MODEL, "data": [{"id": MODEL, "object": "model"}]}
            self._whole(json.dumps(facts).encode())
            return
        found = _MAX_TOKENS.search(body)
        num_tokens = int(found[1]) if found else 16
        if _STREAM.search(body):
            self.write(_SSE_HEAD)
            self._steps.add(self, num_tokens)
            return
        text = "".join(f"t{number} " for number in range(num_tokens))
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}
        whole = {
            "id": "c",
            "object": "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
        }
        self._whole(json.dumps(whole).encode())

    def _whole(self, body: bytes) -> None:
        self.write(_HEAD % (len(body), body))


async def run(secret_file: Path) -> None:
    steps = Steps()
    server = await asyncio.get_running_loop().create_server(lambda: HttpDoor(steps), "127.0.0.1", 0)
    worker = await FakeDecode(ticket_key=derive_key(load_secret(secret_file), PURPOSE)).start()
    print("serves", server.sockets[0].getsockname()[1], worker.address, worker.client_address, flush=True)
    await steps.run()


if __name__ == "__main__":
    uvloop.run(run(Path(sys.argv[1])))
