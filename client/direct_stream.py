"""Answers straight from a decode worker: all of this client's tickets for it over one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from diptych.client.pipe import Pipe
from diptych.common.errors import DiptychError, RequestCancelledError, RequestDeadlineError, WorkerLostError
from diptych.rpc.v1 import decode_pb2


class DirectStream(Pipe):
    """Args:
    open_call: of Lookaside.Attach at this worker.
    address: for the text of errors.
    """

    def __init__(self, open_call: Callable[[], Any], address: str) -> None:
        super().__init__(open_call)
        self._address = address
        self._visits: dict[str, DirectRequest] = {}
        self._redeem: list[decode_pb2.Redeem] = []
        self._cancel: list[str] = []

    def visit(self, attempt: str, ticket: bytes, remaining_s: float) -> DirectRequest:
        """Hand in a ticket."""
        visit = self._visits[attempt] = DirectRequest(self, attempt, remaining_s)
        self._redeem.append(decode_pb2.Redeem(attempt=attempt, ticket=ticket, remaining_s=remaining_s))
        self._send()
        return visit

    def forget(self, attempt: str) -> None:
        self._visits.pop(attempt, None)

    def leave(self, attempt: str) -> None:
        if self._visits.pop(attempt, None) is not None and self._call is not None:
            self._cancel.append(attempt)
            self._send()

    def _outgoing(self) -> decode_pb2.TicketCommands | None:
        if not self._redeem and not self._cancel:
            return None
        message = decode_pb2.TicketCommands(redeem=self._redeem, cancel=self._cancel)
        self._redeem, self._cancel = [], []
        return message

    def _incoming(self, message: decode_pb2.StepBatch) -> None:
        for event in message.events:
            visit = self._visits.get(event.attempt)
            if visit is not None:
                visit.put(event)

    def _broken(self, error: grpc.RpcError | None) -> None:
        self._redeem, self._cancel = [], []
        visits, self._visits = self._visits, {}
        why = error.details() if isinstance(error, grpc.Call) else "it closed the stream"
        for visit in visits.values():
            visit.fail(WorkerLostError(f"the decode worker at {self._address} was lost: {why}"))


class DirectRequest:
    """One request's events there. Read with `next` until End or an error.

    Args:
        remaining_s: until the client's deadline, at which the visit ends.
    """

    def __init__(self, doorway: DirectStream, attempt: str, remaining_s: float) -> None:
        self._doorway = doorway
        self._attempt = attempt
        self._events: deque[decode_pb2.Event] = deque()
        self._error: DiptychError | None = None
        self._ready = asyncio.Event()
        self._sink: Callable[[decode_pb2.Event], None] | None = None
        self._over = False
        self.first_token_at: float | None = None
        """On the loop's clock."""
        self._timer = asyncio.get_running_loop().call_later(remaining_s, self._late)

    async def next(self) -> decode_pb2.Event:
        """Raises: WorkerLostError."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        return self._events.popleft()

    async def whole(self, sink: Callable[[decode_pb2.Event], None]) -> None:
        """Until the end or an error, which `next` then raises; woken once.

        Args:
            sink: is given every event as it comes; a DiptychError that it raises is the visit's.
        """
        events, self._events = self._events, deque()
        for event in events:
            sink(event)
        self._sink = sink
        while not self._over:
            self._ready.clear()
            await self._ready.wait()

    def put(self, event: decode_pb2.Event) -> None:
        if self.first_token_at is None and event.HasField("tokens"):
            self.first_token_at = asyncio.get_running_loop().time()
        if ended := event.HasField("end"):
            self._doorway.forget(self._attempt)
            self._timer.cancel()
        if self._sink is None:
            self._events.append(event)
        else:
            try:
                self._sink(event)
            except DiptychError as error:
                self.leave(error)
        if ended:
            self._over = True
        elif self._sink is not None:
            return
        self._ready.set()

    def _late(self) -> None:
        self.leave(RequestDeadlineError("no answer within timeout_s", param="timeout_s"))

    def fail(self, error: DiptychError) -> None:
        self._timer.cancel()
        self._over = True
        self._error = self._error or error
        self._ready.set()

    def leave(self, why: DiptychError | None = None) -> None:
        """Cancel it there unless it has ended. Idempotent, never blocks."""
        if self._over:
            return
        self._doorway.leave(self._attempt)
        self.fail(why or RequestCancelledError("the stream was closed"))
