"""The mock worker behind every router of routers.py: one process, an HTTP and gRPC servers, one script.

    python -P -m diptych.bench.peers.mock SECRET_FILE     prints `serves HTTP_PORT DECODE_ADDRESS CLIENT_ADDRESS`

A step of the mock gives every running request its next token, as an engine does. Steps follow each other as fast as
possible, so that the routers set the pace. The HTTP server handles what the peers forward (/v1/completions, streamed as
one SSE chunk a token, or whole), the gRPC servers our router and clients. Both send pre-encoded pieces, so that the
mock costs little.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, cast

import grpc
import uvloop

from diptych.common.secret import derive_key, load_secret
from diptych.common.ticket import PURPOSE, unseal
from diptych.rpc.channels import bind, new_server
from diptych.rpc.health import Health
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2

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
        self._running: dict[HttpServer, tuple[int, int]] = {}
        self._streams: set[StepStream] = set()
        self._wake = asyncio.Event()

    def add(self, door: HttpServer, num_tokens: int) -> None:
        self._running[door] = (0, num_tokens)
        self._wake.set()

    def drop(self, door: HttpServer) -> None:
        self._running.pop(door, None)

    def add_stream(self, stream: StepStream) -> None:
        self._streams.add(stream)
        self._wake.set()

    async def run(self) -> None:
        while True:
            if not self._running and not self._streams:
                self._wake.clear()
                await self._wake.wait()
            for door, (number, total) in list(self._running.items()):
                if number < total:
                    door.write(_EVENTS[number % len(_EVENTS)])
                    self._running[door] = (number + 1, total)
                else:
                    door.write(_DONE)
                    self.drop(door)
            for stream in list(self._streams):
                stream.step()
                if not stream.running:
                    self._streams.discard(stream)
            await asyncio.sleep(0)


class HttpServer(asyncio.Protocol):
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


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(128 | (number & 127))
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, body: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _tokens(number: int) -> bytes:
    """Field `tokens` of an Event."""
    delta = router_pb2.TokenDelta(offset=number, token_ids=[number], text=f"t{number} ")
    return _field(decode_pb2.Event.TOKENS_FIELD_NUMBER, delta.SerializeToString())


_TOKENS = [_tokens(number) for number in range(4096)]


class StepStream:
    """One Attach stream: encoded pieces of StepBatch, which protobuf allows to concatenate."""

    def __init__(self, steps: Steps, routers: list[StepStream] | None) -> None:
        self._steps = steps
        self._routers = routers
        self._out: list[bytes] = []
        self._news: dict[str, decode_pb2.TicketStatus] = {}
        """As in a worker's outbox: buffered messages of one attempt are merged."""
        self._ready = asyncio.Event()
        self.running: dict[bytes, list[int]] = {}

    def put(self, piece: bytes) -> None:
        self._out.append(piece)
        self._ready.set()

    def put_status(self, news: decode_pb2.TicketStatus) -> None:
        self._news.setdefault(news.attempt, decode_pb2.TicketStatus()).MergeFrom(news)
        self._ready.set()

    def begin(self, submit: decode_pb2.Submit) -> None:
        event = decode_pb2.Event(attempt=submit.attempt, accepted=decode_pb2.Accepted())
        self.put(decode_pb2.StepBatch(events=[event]).SerializeToString())
        self.running[submit.attempt.encode()] = [0, submit.sampling.max_tokens, len(submit.prompt_token_ids)]
        self._steps.add_stream(self)
        self._tell(decode_pb2.TicketStatus(attempt=submit.attempt, taken=True))

    def step(self) -> None:
        for attempt, state in list(self.running.items()):
            if state[0] < state[1]:
                self.put(_field(1, _field(1, attempt) + _TOKENS[state[0]]))
                if not state[0]:
                    self._tell(decode_pb2.TicketStatus(attempt=attempt.decode(), first_token=True))
                state[0] += 1
            else:
                del self.running[attempt]
                self._end(attempt.decode(), state)

    def _end(self, attempt: str, state: list[int]) -> None:
        usage = types_pb2.Usage(prompt_tokens=state[2], completion_tokens=state[1])
        finished = router_pb2.Finished(
            finish_reason=types_pb2.FINISH_REASON_LENGTH, usage=usage, explanation=types_pb2.Explanation(decode="d0")
        )
        event = decode_pb2.Event(attempt=attempt, end=decode_pb2.End(finished=finished))
        self.put(decode_pb2.StepBatch(events=[event]).SerializeToString())
        self._tell(decode_pb2.TicketStatus(attempt=attempt, ended=True, completion_tokens=state[1], finished=finished))

    def _tell(self, news: decode_pb2.TicketStatus) -> None:
        for router in self._routers or ():
            router.put_status(news)

    async def batches(self) -> AsyncIterator[bytes]:
        while True:
            await self._ready.wait()
            self._ready.clear()
            out, self._out = self._out, []
            if self._news:
                news, self._news = self._news, {}
                out.append(decode_pb2.StepBatch(ticket_status=news.values()).SerializeToString())
            yield b"".join(out)


class GrpcServers:
    """Decode.Attach for the router, Lookaside.Attach for clients, and the router's health checks."""

    def __init__(self, steps: Steps, key: bytes) -> None:
        self._steps = steps
        self._key = key
        self._routers: list[StepStream] = []
        self.client_address = ""

    async def start(self) -> str:
        server, clients = self._servers = new_server(), new_server()
        for target, service, method, kind in (
            (server, "Decode", self._router, decode_pb2.Command),
            (clients, "Lookaside", self._client, decode_pb2.TicketCommands),
        ):
            handler = grpc.stream_stream_rpc_method_handler(method, request_deserializer=kind.FromString)
            target.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"diptych.rpc.v1.{service}", {"Attach": handler}),)
            )
        health = Health()
        await health.install(server)
        address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
        self.client_address = f"127.0.0.1:{bind(clients, '127.0.0.1', 0)}"
        await server.start()
        await clients.start()
        await health.set(True)
        return address

    async def _router(self, commands: AsyncIterator[decode_pb2.Command], _: Any) -> AsyncIterator[bytes]:
        stream = StepStream(self._steps, None)
        self._routers.append(stream)
        door = decode_pb2.DirectEndpoint(address=self.client_address, ticket_epoch=1)
        stream.put(decode_pb2.StepBatch(direct_endpoint=door).SerializeToString())

        async def read() -> None:
            async for command in commands:
                if command.HasField("submit"):
                    stream.begin(command.submit)

        try:
            async for batch in _answer(stream, read()):
                yield batch
        finally:
            self._routers.remove(stream)

    async def _client(self, messages: AsyncIterator[decode_pb2.TicketCommands], _: Any) -> AsyncIterator[bytes]:
        stream = StepStream(self._steps, self._routers)

        async def read() -> None:
            async for message in messages:
                for redeem in message.redeem:
                    stream.begin(decode_pb2.TicketClaims.FromString(unseal(self._key, redeem.ticket)).submit)

        async for batch in _answer(stream, read()):
            yield batch


async def _answer(stream: StepStream, read: Coroutine[Any, Any, None]) -> AsyncIterator[bytes]:
    """What `stream` says while `read` takes in what it is asked for."""
    reader = asyncio.create_task(read)
    try:
        async for batch in stream.batches():
            yield batch
    finally:
        reader.cancel()
        stream.running.clear()


async def run(secret_file: Path) -> None:
    steps = Steps()
    server = await asyncio.get_running_loop().create_server(lambda: HttpServer(steps), "127.0.0.1", 0)
    doors = GrpcServers(steps, derive_key(load_secret(secret_file), PURPOSE))
    address = await doors.start()
    print("serves", server.sockets[0].getsockname()[1], address, doors.client_address, flush=True)
    await steps.run()


if __name__ == "__main__":
    uvloop.run(run(Path(sys.argv[1])))
