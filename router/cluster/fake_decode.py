"""A decode worker without an engine, over real gRPC on loopback, for tests of `Decode.Attach`.

It answers every attempt with the tokens 0, 1, 2, ... as the words "t0 ", "t1 ", ..., one batch a token; after the tokens
that the attempt has already. Choice k has the tokens 10k, 10k + 1, ... Tests make it hold, refuse, stop answering, or
skip a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc

from diptych.common.errors import (
    DiptychError,
    InvalidRequestError,
    RequestCancelledError,
    StaleReferenceError,
    TicketRefusedError,
)
from diptych.common.ticket import unseal
from diptych.common.tiers import DEVICE
from diptych.rpc import channels
from diptych.rpc.errors import errors_to_status, to_failure
from diptych.rpc.health import Health
from diptych.rpc.v1 import decode_pb2, decode_pb2_grpc, router_pb2, types_pb2, worker_pb2, worker_pb2_grpc


@dataclass
class FakeDecode(decode_pb2_grpc.DecodeServicer, worker_pb2_grpc.WorkerServicer):
    """The fake worker.

    Args:
        ticket_key: clients may redeem tickets signed with it, on a separate port; None: routers only.
        ticket_epoch: epoch of the accepted tickets.
        tokens_at_once: tokens per event.
        step_s: the tokens of all answers come together, at multiples of it, as from an engine's steps; 0: at once.
        first_token: of every answer.
        refuse: ends every new attempt with this error instead of accepting it.
        go: a gate; while it is cleared no token is sent.
        hold_from: the gate closes by itself before this token, of any attempt, and earlier ones are sent.
        accept: a gate before Accepted.
        skip_offset: this token is left out of the stream.
        lengths: by choice, of its answer, where it is shorter than max_tokens.
        words: text of each token, where it is not "t0 ", ...
        forgets: answers every Command.resume as for an unknown attempt. Else an attempt of Submit.keep outlives its stream.
        dump: (epoch, sequence, keys) of DumpBlocks.
        adapters: by folder, what LoadAdapter finds there; an error is raised.
        answer_gate: while it is cleared, calls other than Attach do not answer.
    """

    worker_id: str = "d0"
    ticket_key: bytes | None = None
    ticket_epoch: int = 1
    tokens_at_once: int = 1
    step_s: float = 0.0
    incarnation: str = "i1"
    refuse: DiptychError | None = None
    skip_offset: int = -1
    hold_from: int = -1
    lengths: dict[int, int] = field(default_factory=dict)
    forgets: bool = False
    resumes: list[str] = field(default_factory=list)
    finds: list[bytes] = field(default_factory=list)
    kept: dict[str, _Kept] = field(default_factory=dict)
    words: Sequence[str] = ()
    dump: tuple[int, int, tuple[bytes, ...]] = (0, 0, ())
    go: asyncio.Event = field(default_factory=asyncio.Event)
    accept: asyncio.Event = field(default_factory=asyncio.Event)
    submits: list[decode_pb2.Submit] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    prepared: list[str] = field(default_factory=list)
    adapters: dict[str, worker_pb2.LoadAdapterResponse | DiptychError] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    """Folders."""
    answer_gate: asyncio.Event = field(default_factory=asyncio.Event)
    unloaded: list[str] = field(default_factory=list)
    """Ids of adapters."""
    released: list[bytes] = field(default_factory=list)
    """Sessions that were closed."""
    sent: dict[str, int] = field(default_factory=dict)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    num_streams: int = 0
    num_client_streams: int = 0
    first_token: int = 0
    num_dumps: int = 0
    address: str = ""
    client_address: str = ""
    health: Health = field(default_factory=Health)
    _routers: list[_Out] = field(default_factory=list)
    clients: list[_Out] = field(default_factory=list)

    async def start(self, port: int = 0) -> FakeDecode:
        self.go.set()
        self.answer_gate.set()
        self.accept.set()
        self._server = channels.new_server()
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        if self.ticket_key is not None:
            self._clients = channels.new_server()
            decode_pb2_grpc.add_LookasideServicer_to_server(FakeLookaside(self), self._clients)  # type: ignore[no-untyped-call]
            self.client_address = f"127.0.0.1:{channels.bind(self._clients, '127.0.0.1', 0)}"
            await self._clients.start()
        await self.health.install(self._server)
        self.address = f"127.0.0.1:{channels.bind(self._server, '127.0.0.1', port)}"
        await self._server.start()
        await self.health.set(True)
        return self

    async def kill(self) -> None:
        """Break all connections at once."""
        await self._server.stop(None)
        tasks = [kept.task for kept in self.kept.values() if kept.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.ticket_key is not None:
            await self._clients.stop(None)

    async def DumpBlocks(
        self, request: worker_pb2.DumpBlocksRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.DumpBlocksResponse]:
        self.num_dumps += 1
        await self.answer_gate.wait()
        epoch, sequence, keys = self.dump
        held = worker_pb2.TierBlocks(tier=DEVICE, sequence=sequence, block_keys=b"".join(keys))
        yield worker_pb2.DumpBlocksResponse(epoch=epoch, tiers=[held])

    async def ReleaseSession(
        self, request: worker_pb2.ReleaseSessionRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ReleaseSessionResponse:
        self.released.append(request.session)
        await self.answer_gate.wait()
        return worker_pb2.ReleaseSessionResponse(freed_tokens=16)

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.LoadAdapterResponse:
        async with errors_to_status(context):
            self.loaded.append(request.folder)
            await self.answer_gate.wait()
            found = self.adapters.get(request.folder) or InvalidRequestError(f"no adapter in {request.folder}")
            if isinstance(found, DiptychError):
                raise found
            return found

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.UnloadAdapterResponse:
        self.unloaded.append(request.id)
        await self.answer_gate.wait()
        return worker_pb2.UnloadAdapterResponse(found=True)

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.Command], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.StepBatch]:
        self.num_streams += 1
        out = _Out()
        self._routers.append(out)
        if self.ticket_key is not None:
            out.put(decode_pb2.DirectEndpoint(address=self.client_address, ticket_epoch=self.ticket_epoch))

        async def read() -> None:
            async for command in request_iterator:
                if command.HasField("submit"):
                    self.take(command.submit, out)
                elif command.HasField("prepare"):
                    self.prepared.append(command.prepare.grammar.source)
                elif command.HasField("resume"):
                    self._resume(command.resume, out)
                else:
                    self.drop(command.cancel.attempt, out)

        reader = asyncio.create_task(read())
        try:
            while not out.broken:
                yield await out.batch()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the test")
        finally:
            self._routers.remove(out)
            for kept in self.kept.values():
                kept.leave(out)
            await out.close(reader)

    def _resume(self, resume: decode_pb2.Resume, out: _Out) -> None:
        self.resumes.append(resume.attempt)
        kept = self.kept.get(resume.attempt)
        if self.forgets or kept is None or kept.cache_salt != resume.cache_salt:
            gone = to_failure(StaleReferenceError("no such attempt"))
            out.put(decode_pb2.Event(attempt=resume.attempt, end=decode_pb2.End(failure=gone)))
        else:
            kept.give(out)

    def take(self, submit: decode_pb2.Submit, out: _Out) -> None:
        self.submits.append(submit)
        if submit.keep:
            kept = self.kept[submit.attempt] = _Kept(submit.cache_salt, out)
            kept.task = asyncio.create_task(self._answer(submit, kept))
            return
        task = out.answers[submit.attempt] = asyncio.create_task(self._answer(submit, out))
        if out.client:
            self.tell(decode_pb2.TicketStatus(attempt=submit.attempt, taken=True))
            task.add_done_callback(lambda done: self._left(submit.attempt) if done.cancelled() else None)

    async def Find(self, request: decode_pb2.FindRequest, context: grpc.aio.ServicerContext) -> decode_pb2.FindResponse:
        self.finds.append(request.idempotency)
        await self.answer_gate.wait()
        refs = [
            one.resume_ref
            for one in self.submits
            if one.attempt in self.kept and one.idempotency == request.idempotency
        ]
        return decode_pb2.FindResponse(resume_ref=refs[-1] if refs else "")

    def drop(self, attempt: str, out: _Out) -> None:
        self.cancels.append(attempt)
        self.cancelled.set()
        kept = self.kept.get(attempt)
        task = out.answers.get(attempt)
        if kept is not None and kept.belongs_to(out):
            task = self.kept.pop(attempt).task
        if task is not None:
            task.cancel()

    def _left(self, attempt: str) -> None:
        """The TicketStatus of an attempt that its client has cancelled."""
        sent, reason = self.sent.get(attempt, 0), RequestCancelledError.reason
        self.tell(decode_pb2.TicketStatus(attempt=attempt, ended=True, completion_tokens=sent, reason=reason))

    def break_clients(self) -> None:
        """Break the streams of all clients; they may reconnect."""
        for out in self.clients:
            out.fail()

    def tell(self, status: decode_pb2.TicketStatus) -> None:
        for out in self._routers:
            out.put(status)

    async def _answer(self, submit: decode_pb2.Submit, out: _Out | _Kept) -> None:
        attempt, count = submit.attempt, submit.sampling.max_tokens
        if self.refuse is not None:
            out.put(decode_pb2.Event(attempt=attempt, end=decode_pb2.End(failure=to_failure(self.refuse))))
            if out.client:
                self.tell(decode_pb2.TicketStatus(attempt=attempt, ended=True, reason=self.refuse.reason))
            return
        await self.accept.wait()
        out.put(decode_pb2.Event(attempt=attempt, accepted=decode_pb2.Accepted()))
        begin = len(submit.output_token_ids)
        choices = range(submit.sampling.n) if submit.sampling.n > 1 else [submit.choice]
        sizes = {choice: min(count, self.lengths.get(choice, count)) for choice in choices}
        for offset in range(begin, max(sizes.values()), self.tokens_at_once):
            if offset == self.hold_from:
                self.go.clear()
            if offset >= self.hold_from:
                await self.go.wait()
            for choice in choices if offset != self.skip_offset else ():
                places = range(offset, min(sizes[choice], offset + self.tokens_at_once))
                if not places:
                    continue
                text = "".join(
                    self.words[i] if self.words else f"{f'c{choice}' if choice else ''}t{i} " for i in places
                )
                ids = [self.first_token + i + 10 * choice for i in places]
                tokens = router_pb2.TokenDelta(offset=offset, token_ids=ids, text=text, choice=choice)
                cached = 0 if offset > begin or choice != choices[0] else 16
                out.put(decode_pb2.Event(attempt=attempt, tokens=tokens, cached_tokens=cached))
                self.sent[attempt] = self.sent.get(attempt, 0) + len(ids)
                if offset == begin and out.client:
                    self.tell(decode_pb2.TicketStatus(attempt=attempt, first_token=True, cached_tokens=cached))
            await asyncio.sleep(self.step_s - time.monotonic() % self.step_s if self.step_s else 0)
        for choice in choices if len(choices) > 1 else ():
            ended = types_pb2.ChoiceFinished(
                choice=choice, finish_reason=types_pb2.FINISH_REASON_LENGTH, completion_tokens=sizes[choice]
            )
            out.put(decode_pb2.Event(attempt=attempt, choice_finished=ended))
        finished = router_pb2.Finished(
            finish_reason=types_pb2.FINISH_REASON_LENGTH,
            usage=types_pb2.Usage(
                prompt_tokens=len(submit.prompt_token_ids), completion_tokens=sum(sizes.values()), cached_tokens=16
            ),
            explanation=types_pb2.Explanation(
                prefill="p0", decode=self.worker_id, transport="fake", kv_bytes=4096, notes=["decode's note"]
            ),
        )
        out.put(decode_pb2.Event(attempt=attempt, end=decode_pb2.End(finished=finished)))
        if out.client:
            status = decode_pb2.TicketStatus(attempt=attempt, ended=True, completion_tokens=count, finished=finished)
            self.tell(status)


class _Out:
    """The outgoing messages of one stream, and the answers that fill it."""

    def __init__(self, *, client: bool = False) -> None:
        self.client = client
        self.answers: dict[str, asyncio.Task[None]] = {}
        self._waiting: list[decode_pb2.Event | decode_pb2.DirectEndpoint | decode_pb2.TicketStatus] = []
        self._ready = asyncio.Event()
        self.broken = False

    def fail(self) -> None:
        self.broken = True
        self._ready.set()

    def put(self, what: decode_pb2.Event | decode_pb2.DirectEndpoint | decode_pb2.TicketStatus) -> None:
        self._waiting.append(what)
        self._ready.set()

    async def batch(self) -> decode_pb2.StepBatch:
        await self._ready.wait()
        self._ready.clear()
        waiting, self._waiting = self._waiting, []
        return decode_pb2.StepBatch(
            events=[what for what in waiting if isinstance(what, decode_pb2.Event)],
            direct_endpoint=next((what for what in waiting if isinstance(what, decode_pb2.DirectEndpoint)), None),
            ticket_status=[what for what in waiting if isinstance(what, decode_pb2.TicketStatus)],
        )

    async def close(self, reader: asyncio.Task[None]) -> None:
        for task in (reader, *self.answers.values()):
            task.cancel()
        await asyncio.gather(reader, *self.answers.values(), return_exceptions=True)


class _Kept:
    """The events of an attempt of Submit.keep. `out`: where they go, too; None: nowhere."""

    client = False

    def __init__(self, cache_salt: bytes, out: _Out) -> None:
        self.cache_salt = cache_salt
        self._out: _Out | None = out
        self._events: list[decode_pb2.Event] = []
        self.task: asyncio.Task[None] | None = None

    def put(self, event: decode_pb2.Event) -> None:
        self._events.append(event)
        if self._out is not None:
            self._out.put(event)

    def belongs_to(self, out: _Out) -> bool:
        """Or to nobody."""
        return self._out in (None, out)

    def leave(self, out: _Out) -> None:
        if self._out is out:
            self._out = None

    def give(self, out: _Out) -> None:
        """To another stream, from the first event on."""
        before, self._out = self._out, out
        if before is not None and before is not out:
            taken = to_failure(RequestCancelledError("another router has it"))
            before.put(decode_pb2.Event(attempt=self._events[0].attempt, end=decode_pb2.End(failure=taken)))
        for event in self._events:
            out.put(event)


class FakeLookaside(decode_pb2_grpc.LookasideServicer):
    """The clients' service: accepts tickets of the right key and epoch."""

    def __init__(self, worker: FakeDecode) -> None:
        self._worker = worker

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.TicketCommands], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[decode_pb2.StepBatch]:
        out = _Out(client=True)

        async def read() -> None:
            async for message in request_iterator:
                for redeem in message.redeem:
                    self._redeem(redeem, out)
                for attempt in message.cancel:
                    self._worker.drop(attempt, out)

        self._worker.num_client_streams += 1
        reader = asyncio.create_task(read())
        self._worker.clients.append(out)
        try:
            while not out.broken:
                yield await out.batch()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the test")
        finally:
            self._worker.clients.remove(out)
            await out.close(reader)

    def _redeem(self, message: decode_pb2.Redeem, out: _Out) -> None:
        try:
            claims = decode_pb2.TicketClaims.FromString(unseal(self._worker.ticket_key or b"", message.ticket))
            if claims.epoch != self._worker.ticket_epoch:
                raise TicketRefusedError("the placement ticket has expired")
        except TicketRefusedError as error:
            out.put(decode_pb2.Event(attempt=message.attempt, end=decode_pb2.End(failure=to_failure(error))))
            return
        self._worker.take(claims.submit, out)
