"""One `Decode.Attach` stream to one incarnation of a decode worker, shared by all requests of this router.

    CLOSED --start--> CONNECTING --channel ready--> UP --stream ends--> CONNECTING (after a pause)
    any --close--> CLOSED

When a stream breaks, each attempt ends with WorkerLostError. Decode cancels them, but for those of Submit.keep, which it
keeps for another router; if this router lives, it cancels them on its next stream. The stream is always read; events that
an attempt's reader has not taken are merged up to a limit, then the attempt is cancelled. A message has a fixed cost, so
tokens after the first are delivered at most every LEAST_GAP_S; starts, ends and errors at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import grpc
import structlog

from diptych.common.clock import Clock, MonotonicClock
from diptych.common.errors import (
    DiptychError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    WorkerLostError,
)
from diptych.router.cluster.token_pace import TokenPace
from diptych.rpc.channels import MAX_MESSAGE_BYTES
from diptych.rpc.v1 import decode_pb2, decode_pb2_grpc, router_pb2

log = structlog.get_logger(__name__)

_CONNECT_TIMEOUT_S = 2.0
_PAUSE_S, _MAX_PAUSE_S = 0.1, 1.0
MAX_BUFFERED_BYTES = 1024 * 1024
_TOKEN_BYTES = 8
_COMMAND_OVERHEAD_BYTES = 64


class Attempt:
    """One request's events on this worker. Call `next` until End or an error; then it is over."""

    def __init__(self, stream: DecodeStream, attempt: str, max_buffered_bytes: int) -> None:
        self._stream = stream
        self.id = attempt
        self._max_buffered_bytes = max_buffered_bytes
        self._events: deque[decode_pb2.Event] = deque()
        self._buffered_bytes = 0
        self._last: router_pb2.TokenDelta | None = None
        """The tokens of the last buffered event, if it has some; _last_end: the offset after them."""
        self._last_end = 0
        self._error: DiptychError | None = None
        self._waiter: asyncio.Future[None] | None = None
        """Set by `wake`; None: the reader is not waiting."""
        self._busy_since: float | None = None
        """When the reader was woken for its current event, or took it; None: it is waiting, or has left."""
        self._due = False
        """The reader need not wait any longer. Only set with something to read, else the next token would wake no
        reader."""
        self._begun = False
        self.woken_at = 0.0
        """When something was last due, on the stream's clock."""
        self.over = False
        """No event will be added."""
        self.resuming = False
        """All of its events will come again: until then, others are of the one that had it on this stream before."""

    async def next(self) -> decode_pb2.Event:
        """The next event; tokens that arrived meanwhile are merged. For one reader. Raises: WorkerLostError,
        OverloadedError."""
        self._rest()
        try:
            while not (self._due and self._events):
                if self._error is not None:
                    raise self._error
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        except BaseException:
            self._rest()
            raise
        finally:
            self._waiter = None
        event = self._events.popleft()
        self._due = bool(self._events)
        if self._due:
            self._buffered_bytes -= _size(event, event.WhichOneof("event"))
        else:
            self._buffered_bytes, self._last = 0, None
        if event.HasField("end"):
            self._rest()
        else:
            self._work(self._stream.now())
        return event

    def _work(self, now: float) -> None:
        """The reader has work from now on."""
        if self._busy_since is None:
            self._busy_since = now
            self._stream.pace.on_wake()

    def _rest(self) -> None:
        """The reader has done its work."""
        if self._busy_since is not None:
            self._stream.pace.on_served(self._stream.now() - self._busy_since)
            self._busy_since = None

    def cancel(self) -> None:
        """Leave; decode is notified unless the attempt is over. Idempotent, never blocks."""
        self._rest()
        if not self.over:
            self.over = True
            self._stream.forget(self.id, cancel=True)

    @property
    def has_event(self) -> bool:
        """Whether `next` returns without waiting."""
        return self._due and bool(self._events)

    def wake(self, now: float) -> None:
        """Deliver the buffered events."""
        self._due = bool(self._events)
        if not self._due and self._error is None:
            return
        self.woken_at = now
        if self._waiter is not None:
            self._work(now)
            if not self._waiter.done():
                self._waiter.set_result(None)

    def put(self, event: decode_pb2.Event, kind: str) -> None:
        """`kind`: of the event."""
        if kind != "tokens":
            self._last = None
            self._events.append(event)
            self._buffered_bytes += _size(event, kind)
        else:
            tokens = event.tokens
            count = len(tokens.token_ids)
            self._buffered_bytes += _tokens_size(tokens, count)
            if self._last is None or not self._merged(self._last, tokens, count):
                self._events.append(event)
                self._last, self._last_end = tokens, tokens.offset + count
        if kind == "end":
            self.over = True
        elif self._buffered_bytes > self._max_buffered_bytes:
            self._events.clear()
            self._last = None
            self.cancel()
            self._error = OverloadedError("the answer was read too slowly and was cancelled")
        elif kind == "tokens" and self._begun:
            if not self._due:
                self._stream.wake_in_time(self)
            return
        self._begun |= kind == "tokens"
        self.wake(self._stream.now())

    def _merged(self, mine: router_pb2.TokenDelta, more: router_pb2.TokenDelta, count: int) -> bool:
        """Whether these `count` tokens were merged into the previous event's; the reader checks gaps and repeats."""
        if more.offset != self._last_end or more.choice != mine.choice:
            return False
        self._last_end += count
        mine.token_ids.extend(more.token_ids)
        if more.text:
            mine.text += more.text
        if more.logprobs:
            mine.logprobs.extend(more.logprobs)
        return True

    def fail(self, error: DiptychError) -> None:
        """End the attempt after the buffered events."""
        self.over = True
        self.interrupt(error)

    def interrupt(self, error: DiptychError) -> None:
        """Let `next` raise the error after the buffered events; the attempt runs until `cancel`."""
        self._error = self._error or error
        self.wake(self._stream.now())


def _size(event: decode_pb2.Event, kind: str | None) -> int:
    if kind == "tokens":
        return _tokens_size(event.tokens, len(event.tokens.token_ids))
    return event.prompt_logprobs.ByteSize() if kind == "prompt_logprobs" else 0


def _tokens_size(tokens: router_pb2.TokenDelta, count: int) -> int:
    size = count * _TOKEN_BYTES + len(tokens.text)
    if tokens.logprobs:
        size += sum(entry.ByteSize() for entry in tokens.logprobs)
    return size


class DecodeStream:
    """The stream of one worker.

    Args:
        channel: to the worker; not closed here.
        on_change: called when the stream goes up or down.
        on_ticket_status: called with the worker's TicketStatus messages about clients' attempts.
        pace: shared by all streams of this event loop.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        worker_id: str,
        *,
        pace: TokenPace | None = None,
        clock: Clock | None = None,
        on_change: Callable[[], None] | None = None,
        on_ticket_status: Callable[[decode_pb2.TicketStatus], None] | None = None,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self._channel = channel
        self._worker_id = worker_id
        self.pace = pace or TokenPace()
        self.now = (clock or MonotonicClock()).now
        self._on_change = on_change
        self._on_ticket_status = on_ticket_status
        self.direct_endpoint: decode_pb2.DirectEndpoint | None = None
        """Where clients may redeem tickets; None: nowhere."""
        self._max_buffered_bytes = max_buffered_bytes
        self._attempts: dict[str, Attempt] = {}
        self._left: list[str] = []
        """Attempts that the worker may keep since the last stream broke: nobody here waits for them."""
        self._commands: asyncio.Queue[decode_pb2.Command | None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._late: set[Attempt] = set()
        self._late_timer: asyncio.TimerHandle | None = None
        self.num_drops = 0
        self.num_batches = 0
        """Incremented by every message: a sign of life."""

    @property
    def up(self) -> bool:
        return self._commands is not None

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"attach-{self._worker_id}")

    async def close(self, why: str = "the router is stopping") -> None:
        """Break the stream: its attempts end with WorkerLostError. Idempotent."""
        task, self._task = self._task, None
        self._down(why)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def open(self, submit: decode_pb2.Submit) -> Attempt:
        """Submit an attempt. Raises: WorkerLostError when the stream is down, InvalidRequestError when it is too large."""
        if submit.ByteSize() > MAX_MESSAGE_BYTES - _COMMAND_OVERHEAD_BYTES:
            # gRPC would break the whole stream, and with it every other request.
            raise InvalidRequestError(f"the request takes {submit.ByteSize()} bytes on the wire: too many")
        return self._opened(submit.attempt, decode_pb2.Command(submit=submit))

    def resume(self, attempt: str, cache_salt: bytes) -> Attempt:
        """Go on with an attempt that another router has begun. It ends with StaleReferenceError if the worker does not have
        it. Raises: WorkerLostError when the stream is down."""
        command = decode_pb2.Command(resume=decode_pb2.Resume(attempt=attempt, cache_salt=cache_salt))
        before = self._attempts.pop(attempt, None)
        opened = self._opened(attempt, command)
        opened.resuming = True
        if before is not None:
            before.fail(RequestCancelledError("this answer goes on with another request"))
        return opened

    def _opened(self, name: str, command: decode_pb2.Command) -> Attempt:
        if self._commands is None:
            raise WorkerLostError(f"decode worker {self._worker_id} cannot be reached")
        attempt = self._attempts[name] = Attempt(self, name, self._max_buffered_bytes)
        self._commands.put_nowait(command)
        return attempt

    def prepare(self, message: decode_pb2.Prepare) -> None:
        """Have a grammar compiled in advance, unless the stream is down."""
        if self._commands is not None:
            self._commands.put_nowait(decode_pb2.Command(prepare=message))

    def forget(self, attempt: str, *, cancel: bool) -> None:
        if self._attempts.pop(attempt, None) is not None and cancel and self._commands is not None:
            self._commands.put_nowait(decode_pb2.Command(cancel=decode_pb2.Cancel(attempt=attempt)))

    def wake_in_time(self, attempt: Attempt) -> None:
        """Tokens arrived: deliver them at once, or when the pace says. One timer serves all waiting attempts."""
        now = self.now()
        wait_s = self.pace.wait_s(attempt.woken_at, now)
        if not wait_s:
            attempt.wake(now)
            return
        self._late.add(attempt)
        if self._late_timer is None:
            self._late_timer = asyncio.get_running_loop().call_later(wait_s, self._wake_late)

    def _wake_late(self) -> None:
        """Wake all of them: one that is slightly early must not wait for a second timer."""
        late, self._late, self._late_timer = self._late, set(), None
        now = self.now()
        for attempt in late:
            attempt.wake(now)

    def fail_attempts(self, why: str) -> None:
        """The worker is considered dead though the stream is open: end its attempts, and cancel them there."""
        for attempt in list(self._attempts.values()):
            self.forget(attempt.id, cancel=True)
            attempt.fail(WorkerLostError(f"decode worker {self._worker_id} was lost: {why}"))

    async def _run(self) -> None:
        pause_s = _PAUSE_S
        while True:
            why = "cannot be reached"
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    await self._channel.channel_ready()
                pause_s = _PAUSE_S
                why = await self._serve()
            except TimeoutError:
                pass
            except grpc.aio.UsageError:
                return  # the channel was closed meanwhile
            finally:
                self._down(why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _serve(self) -> str:
        """Run one stream to its end. Returns why it ended."""
        commands: asyncio.Queue[decode_pb2.Command | None] = asyncio.Queue()
        stub = decode_pb2_grpc.DecodeStub(self._channel)  # type: ignore[no-untyped-call]
        call = stub.Attach(_drain(commands))
        self._commands = commands
        left, self._left = self._left, []
        for attempt in left:
            commands.put_nowait(decode_pb2.Command(cancel=decode_pb2.Cancel(attempt=attempt)))
        self._notify()
        try:
            async for batch in call:
                self.num_batches += 1
                for event in batch.events:
                    self._deliver(event)
                if batch.HasField("direct_endpoint"):
                    self.direct_endpoint = batch.direct_endpoint
                if self._on_ticket_status is not None:
                    for status in batch.ticket_status:
                        self._on_ticket_status(status)
        except grpc.aio.AioRpcError as err:
            return f"{err.code().name}: {err.details()}"
        finally:
            commands.put_nowait(None)
            call.cancel()
        return "it closed the stream"

    def _deliver(self, event: decode_pb2.Event) -> None:
        attempt = self._attempts.get(event.attempt)
        if attempt is None:
            return  # cancelled meanwhile
        kind = event.WhichOneof("event")
        if kind is None:
            log.warning("event of an unknown kind", worker=self._worker_id)
            return
        if attempt.resuming:
            attempt.resuming = kind != "accepted" and not event.end.HasField("failure")
            if attempt.resuming:
                return
        attempt.put(event, kind)
        if attempt.over:
            self._attempts.pop(event.attempt, None)

    def _down(self, why: str) -> None:
        if self._late_timer is not None:
            self._late_timer.cancel()
            self._late, self._late_timer = set(), None
        was_up, self._commands, self.direct_endpoint = self.up, None, None
        attempts, self._attempts = list(self._attempts.values()), {}
        self._left += [attempt.id for attempt in attempts]
        for attempt in attempts:
            attempt.fail(WorkerLostError(f"decode worker {self._worker_id} was lost: {why}"))
        if was_up:
            self.num_drops += 1
            say = (
                log.warning if attempts else log.info
            )  # without attempts this is an ordinary end of a worker or router
            say("stream to decode went down", worker=self._worker_id, why=why, attempts=len(attempts))
            self._notify()

    def _notify(self) -> None:
        if self._on_change is not None:
            self._on_change()


async def _drain(commands: asyncio.Queue[decode_pb2.Command | None]) -> AsyncIterator[decode_pb2.Command]:
    while (command := await commands.get()) is not None:
        yield command
