"""Answers streamed directly by a decode worker. One stream carries all of this client's requests to that worker."""

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
    """The stream to one decode worker.

    Args:
        open_call: opens Lookaside.Attach at this worker.
        address: host:port, for error messages.
    """

    def __init__(self, open_call: Callable[[], Any], address: str) -> None:
        super().__init__(open_call)
        self._address = address
        self._requests: dict[str, DirectRequest] = {}
        self._redeem: list[decode_pb2.Redeem] = []
        self._cancel: list[str] = []

    def redeem(self, attempt: str, ticket: bytes, remaining_s: float) -> DirectRequest:
        """Redeem a ticket at the worker."""
        request = self._requests[attempt] = DirectRequest(self, attempt, remaining_s)
        self._redeem.append(decode_pb2.Redeem(attempt=attempt, ticket=ticket, remaining_s=remaining_s))
        self._send()
        return request

    def forget(self, attempt: str) -> None:
        self._requests.pop(attempt, None)

    def leave(self, attempt: str) -> None:
        if self._requests.pop(attempt, None) is not None and self._call is not None:
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
            request = self._requests.get(event.attempt)
            if request is not None:
                request.put(event)

    def _broken(self, error: grpc.RpcError | None) -> None:
        self._redeem, self._cancel = [], []
        requests, self._requests = self._requests, {}
        why = error.details() if isinstance(error, grpc.Call) else "it closed the stream"
        for request in requests.values():
            request.fail(WorkerLostError(f"the decode worker at {self._address} was lost: {why}"))


class DirectRequest:
    """The events of one request at the worker. Call `next` until it returns End or raises.

    Args:
        remaining_s: seconds until the client's deadline, at which the request is cancelled.
    """

    def __init__(self, stream: DirectStream, attempt: str, remaining_s: float) -> None:
        self._stream = stream
        self._attempt = attempt
        self._events: deque[decode_pb2.Event] = deque()
        self._error: DiptychError | None = None
        self._ready = asyncio.Event()
        self._sink: Callable[[decode_pb2.Event], None] | None = None
        self._over = False
        self.first_token_at: float | None = None
        self.longest_gap_s = 0.0
        """Between two messages with tokens."""
        self._tokens_at = 0.0
        """Seconds on the loop's clock."""
        self._timer = asyncio.get_running_loop().call_later(remaining_s, self._late)

    async def next(self) -> decode_pb2.Event:
        """Raises: WorkerLostError."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        return self._events.popleft()

    async def forward_all(self, sink: Callable[[decode_pb2.Event], None]) -> None:
        """Pass every event to `sink` until the end or an error; the task wakes once. `next` then raises the error.

        Args:
            sink: called with every event on arrival. A DiptychError raised by it cancels the request.
        """
        events, self._events = self._events, deque()
        for event in events:
            sink(event)
        self._sink = sink
        while not self._over:
            self._ready.clear()
            await self._ready.wait()

    def put(self, event: decode_pb2.Event) -> None:
        if event.HasField("tokens"):
            now = asyncio.get_running_loop().time()
            if self.first_token_at is None:
                self.first_token_at = now
            else:
                self.longest_gap_s = max(self.longest_gap_s, now - self._tokens_at)
            self._tokens_at = now
        if ended := event.HasField("end"):
            self._stream.forget(self._attempt)
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
        """Cancel the request at the worker unless it has ended. Idempotent, never blocks."""
        if self._over:
            return
        self._stream.leave(self._attempt)
        self.fail(why or RequestCancelledError("the stream was closed"))
