"""A decode worker without an engine, over real gRPC on loopback: the tests' other end of `Decode.Attach`.

It answers every attempt with the tokens 0, 1, 2, ... as the words "t0 ", "t1 ", ..., one batch a token, and does what the
test tells it: hold, refuse, fall silent, skip a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from diptych.common.errors import DiptychError
from diptych.rpc import channels
from diptych.rpc.errors import to_failure
from diptych.rpc.health import Health
from diptych.rpc.v1 import decode_pb2, decode_pb2_grpc, router_pb2, types_pb2, worker_pb2, worker_pb2_grpc


@dataclass
class FakeDecode(decode_pb2_grpc.DecodeServicer, worker_pb2_grpc.WorkerServicer):
    """Args:
    refuse: ends every new attempt with this error instead of accepting it.
    go: a gate; while it is cleared no token comes.
    hold_from: the gate closes by itself before this token.
    accept: a gate before Accepted.
    skip_offset: this token is left out of the stream.
    dump: (epoch, sequence, keys) of DumpBlocks.
    """

    worker_id: str = "d0"
    incarnation: str = "i1"
    refuse: DiptychError | None = None
    skip_offset: int = -1
    hold_from: int = -1
    dump: tuple[int, int, tuple[bytes, ...]] = (0, 0, ())
    go: asyncio.Event = field(default_factory=asyncio.Event)
    accept: asyncio.Event = field(default_factory=asyncio.Event)
    submits: list[decode_pb2.Submit] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    num_streams: int = 0
    num_dumps: int = 0
    address: str = ""
    health: Health = field(default_factory=Health)

    async def start(self, port: int = 0) -> FakeDecode:
        self.go.set()
        self.accept.set()
        self._server = channels.new_server()
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        await self.health.install(self._server)
        self.address = f"127.0.0.1:{channels.bind(self._server, '127.0.0.1', port)}"
        await self._server.start()
        await self.health.set(True)
        return self

    async def kill(self) -> None:
        """Break all connections at once."""
        await self._server.stop(None)

    async def DumpBlocks(
        self, request: worker_pb2.DumpBlocksRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.DumpBlocksResponse]:
        self.num_dumps += 1
        epoch, sequence, keys = self.dump
        yield worker_pb2.DumpBlocksResponse(epoch=epoch, sequence=sequence, block_keys=b"".join(keys))

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.Command], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.StepBatch]:
        self.num_streams += 1
        out: asyncio.Queue[decode_pb2.Event] = asyncio.Queue()
        answers: dict[str, asyncio.Task[None]] = {}

        async def read() -> None:
            async for command in request_iterator:
                if command.HasField("submit"):
                    self.submits.append(command.submit)
                    answers[command.submit.attempt] = asyncio.create_task(self._answer(command.submit, out))
                else:
                    self.cancels.append(command.cancel.attempt)
                    self.cancelled.set()
                    answers[command.cancel.attempt].cancel()

        reader = asyncio.create_task(read())
        try:
            while True:
                events = [await out.get()]
                while not out.empty():
                    events.append(out.get_nowait())
                yield decode_pb2.StepBatch(events=events)
        finally:
            for task in (reader, *answers.values()):
                task.cancel()
            await asyncio.gather(reader, *answers.values(), return_exceptions=True)

    async def _answer(self, submit: decode_pb2.Submit, out: asyncio.Queue[decode_pb2.Event]) -> None:
        attempt, count = submit.attempt, submit.sampling.max_tokens
        if self.refuse is not None:
            out.put_nowait(decode_pb2.Event(attempt=attempt, end=decode_pb2.End(failure=to_failure(self.refuse))))
            return
        await self.accept.wait()
        out.put_nowait(decode_pb2.Event(attempt=attempt, accepted=decode_pb2.Accepted()))
        for offset in range(count):
            if offset == self.hold_from:
                self.go.clear()
            await self.go.wait()
            if offset != self.skip_offset:
                tokens = router_pb2.TokenDelta(offset=offset, token_ids=[offset], text=f"t{offset} ")
                out.put_nowait(decode_pb2.Event(attempt=attempt, tokens=tokens))
            await asyncio.sleep(0)
        finished = router_pb2.Finished(
            finish_reason=types_pb2.FINISH_REASON_LENGTH,
            usage=types_pb2.Usage(
                prompt_tokens=len(submit.prompt_token_ids), completion_tokens=count, cached_tokens=16
            ),
            explanation=types_pb2.Explanation(
                prefill="p0", decode=self.worker_id, transport="fake", kv_bytes=4096, notes=["decode's note"]
            ),
        )
        out.put_nowait(decode_pb2.Event(attempt=attempt, end=decode_pb2.End(finished=finished)))
