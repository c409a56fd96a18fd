"""The hand-off of one prompt to one decode worker: a leg, owned here from the call's start to its end.

    validate --fails--> typed status
       |
    QUEUED      an EngineRequest(PREFILL) is out
       | Admitted -> PrefillStarted
    COMPUTING   RangePacked -> publish -> Computed(handle)      (any number of times, while later chunks are computed)
       |        PromptComputed, TokensOut -> FirstTokens, as soon as the token is known; they name the tokens whose rows
       |        were computed for it, by the runner's word, not by the call's
       | PrefillComplete -> PrefillFinished
    SETTLING    until decode acknowledged every slab, or its lease ran out
       |
    CLOSED      normal end of the call

    from any state: the call is cancelled (decode's cancel), its deadline passes, the engine fails, the worker stops
                    or decode says nothing for a whole slab lease
                    -> CLOSED: engine Cancel, transfer.release; ranges that are packed later go back as free grants

A slab that was packed for a leg that is gone by then never leaves the worker: PrefillSessions returns its grant.

Decode gives a silent worker up. So a leg says PrefillAlive whenever it had nothing else to say for `alive_every_s`, as long as
the engine makes progress: a stopped process says nothing, and neither does one whose engine hangs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from enum import Enum

import structlog

from diptych.common.errors import (
    DiptychError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestDeadlineError,
    TransferError,
    WorkerLostError,
)
from diptych.engine.messages import (
    Admitted,
    AttemptEvent,
    Cancel,
    EngineEvent,
    Failed,
    FirstCandidates,
    PrefillComplete,
    PromptComputed,
    PromptLogprobs,
    RangePacked,
    TokensOut,
)
from diptych.kvtransfer.api import SlabPublisher
from diptych.kvtransfer.transport import peer_key
from diptych.prefill.request import PrefillSessionRequest, parse_request
from diptych.rpc.convert import logprobs_to_proto
from diptych.rpc.v1 import prefill_pb2, types_pb2
from diptych.worker import wire
from diptych.worker.incoming import Limits
from diptych.worker.ports import Engine

log = structlog.get_logger(__name__)


def _computed_from(event: PromptComputed) -> prefill_pb2.ComputedFrom:
    known = event.computed_from
    return prefill_pb2.ComputedFrom(num_tokens=known.num_tokens, digest=known.digest, block_size=known.block_size)


def _first_tokens(event: TokensOut) -> prefill_pb2.FirstTokens:
    tokens = [prefill_pb2.FirstToken(choice=event.choice, token_id=token_id) for token_id in event.token_ids]
    for token, entry in zip(tokens, event.logprobs, strict=False):  # no logprobs: none were asked for
        token.logprobs.CopyFrom(logprobs_to_proto(entry))
    return prefill_pb2.FirstTokens(tokens=tokens)


def _first_candidates(event: FirstCandidates) -> prefill_pb2.FirstTokens:
    out = prefill_pb2.FirstTokens()
    for candidate in event.candidates:
        message = out.candidates.add(token_id=candidate.token_id, score=candidate.score)
        if candidate.logprobs is not None:
            message.logprobs.CopyFrom(logprobs_to_proto(candidate.logprobs))
    return out


class LegState(Enum):
    QUEUED = "queued"
    COMPUTING = "computing"
    SETTLING = "settling"
    CLOSED = "closed"


class PrefillSession:
    """One call's state. Engine and transfer speak to it through PrefillSessions; the call reads `events`."""

    def __init__(self, request: PrefillSessionRequest, publisher: SlabPublisher) -> None:
        self.request = request
        self.state = LegState.QUEUED
        self.peer = peer_key(request.decode.worker_id, request.decode.incarnation)
        """The life of the decode worker that it is for."""
        self._publisher = publisher
        self._events: asyncio.Queue[prefill_pb2.PrefillEvent | DiptychError | None] = asyncio.Queue()
        self._open_slabs: set[int] = set()
        self._num_ranges = 0
        self._num_settled = 0
        self._num_overlapped: int | None = None
        self._computed_from: prefill_pb2.ComputedFrom | None = None

    async def next_event(self, within_s: float) -> prefill_pb2.PrefillEvent | None:
        """None: everything is settled. Raises: the error that ended the leg; TimeoutError: nothing to say for so long."""
        async with asyncio.timeout(within_s):
            event = await self._events.get()
        if isinstance(event, DiptychError):
            raise event
        return event

    def on_engine(self, event: EngineEvent) -> None:
        match event:
            case Admitted(num_cached_tokens=cached):
                self.state = LegState.COMPUTING
                started = prefill_pb2.PrefillStarted(cached_tokens=cached, pid=os.getpid())
                self._put(prefill_pb2.PrefillEvent(started=started))
            case RangePacked():
                self._publish(event)
            case PromptComputed():
                self._last_chunk_computed()
                self._computed_from = _computed_from(event)
                if self.request.engine_request.output_token_ids:
                    self._say_first(prefill_pb2.FirstTokens())  # none is drawn, and the KV is vouched for all the same
            case TokensOut():
                self._say_first(_first_tokens(event))
            case FirstCandidates():
                self._say_first(_first_candidates(event))
            case PromptLogprobs(first_token=first, logprobs=entries):
                known = types_pb2.PromptLogprobs(first_token=first, logprobs=map(logprobs_to_proto, entries))
                self._put(prefill_pb2.PrefillEvent(prompt_logprobs=known))
            case PrefillComplete(compute_s=compute_s):
                self._complete(compute_s)
            case Failed(error=error):
                self.fail(error)

    def on_settled(self, slab: int) -> None:
        if slab in self._open_slabs:
            self._open_slabs.discard(slab)
            self._num_settled += 1
            self._maybe_settled()

    def fail(self, error: DiptychError) -> None:
        self._events.put_nowait(error)

    def _publish(self, packed: RangePacked) -> None:
        try:
            handle = self._publisher.publish(self.peer, packed)
        except DiptychError:
            self._publisher.return_grant(packed.slab)
            raise
        self._open_slabs.add(packed.slab)
        self._num_ranges += 1
        computed = prefill_pb2.Computed(
            first_token=packed.first_token, num_tokens=packed.num_tokens, handles=[wire.handle_to_proto(handle)]
        )
        self._put(prefill_pb2.PrefillEvent(computed=computed))

    def _say_first(self, first: prefill_pb2.FirstTokens) -> None:
        if self._computed_from is not None:
            first.computed_from.CopyFrom(self._computed_from)
        self._put(prefill_pb2.PrefillEvent(first_tokens=first))

    def _last_chunk_computed(self) -> None:
        if self._num_overlapped is None:
            self._num_overlapped = self._num_settled

    def _complete(self, compute_s: float) -> None:
        self._last_chunk_computed()
        self.state = LegState.SETTLING
        finished = prefill_pb2.PrefillFinished(
            num_ranges=self._num_ranges, num_ranges_overlapped=self._num_overlapped or 0, compute_s=compute_s
        )
        self._put(prefill_pb2.PrefillEvent(finished=finished))
        self._maybe_settled()

    def _maybe_settled(self) -> None:
        if self.state is LegState.SETTLING and not self._open_slabs:
            self._events.put_nowait(None)

    def _put(self, event: prefill_pb2.PrefillEvent) -> None:
        self._events.put_nowait(event)


class PrefillSessions:
    """All legs of this prefill worker.

    Args:
        max_legs: legs held at once, queued and computing; beyond it a call is refused with OverloadedError.
        alive_every_s: a leg that has nothing to say says so after this time.
        why_stuck: why the engine must not be called alive; empty: it makes progress.
    """

    def __init__(
        self,
        engine: Engine,
        publisher: SlabPublisher,
        limits: Limits,
        *,
        max_legs: int,
        alive_every_s: float = 1.0,
        why_stuck: Callable[[], str] = lambda: "",
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._limits = limits
        self._max_legs = max_legs
        self._alive_every_s = alive_every_s
        self._why_stuck = why_stuck
        self._legs: dict[str, PrefillSession] = {}
        self._accepting = True
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_legs(self) -> int:
        return len(self._legs)

    def states(self) -> dict[str, int]:
        """Number of legs by state, for the audit."""
        out: dict[str, int] = {}
        for leg in self._legs.values():
            out[leg.state.value] = out.get(leg.state.value, 0) + 1
        return out

    async def serve(self, message: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """One call. Closing the iterator in any state frees everything of the leg.

        Raises: InvalidRequestError, StaleReferenceError, OverloadedError before any work; then what the engine says, or
            RequestDeadlineError.
        """
        if not self._accepting:
            raise NoWorkerError("this prefill worker is draining", retry_after_s=1.0)
        request = parse_request(message, self._limits)
        attempt = request.engine_request.attempt
        if attempt in self._legs:
            raise InvalidRequestError(f"attempt {attempt} is here already", param="attempt")
        if len(self._legs) >= self._max_legs:
            raise OverloadedError(f"{len(self._legs)} prompts are here already", retry_after_s=1.0)
        leg = self._legs[attempt] = PrefillSession(request, self._publisher)
        self._idle.clear()
        timer = asyncio.get_running_loop().call_later(
            request.remaining_s, leg.fail, RequestDeadlineError("the leg's deadline passed")
        )
        self._engine.send(request.engine_request)
        try:
            while True:
                try:
                    event = await leg.next_event(self._alive_every_s)
                except TimeoutError:
                    if not self._why_stuck():
                        yield prefill_pb2.PrefillEvent(alive=prefill_pb2.PrefillAlive())
                    continue
                if event is None:
                    return
                yield event
        finally:
            timer.cancel()
            self._close(attempt, leg)

    def _close(self, attempt: str, leg: PrefillSession) -> None:
        self._legs.pop(attempt, None)
        if leg.state is not LegState.SETTLING:
            self._engine.send(Cancel(attempt))
        leg.state = LegState.CLOSED
        self._publisher.release(attempt)
        if not self._legs:
            self._idle.set()

    # ---- from the step thread and the transfer thread, on the event loop ----

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if not isinstance(event, AttemptEvent):
                continue
            attempt = event.attempt
            leg = self._legs.get(attempt)
            if leg is None:
                if isinstance(event, RangePacked):
                    self._publisher.return_grant(event.slab)
                continue
            try:
                leg.on_engine(event)
            except DiptychError as error:
                log.warning(
                    "leg failed",
                    request_id=leg.request.request_id,
                    attempt=attempt,
                    reason=error.reason,
                    error=error.message,
                )
                leg.fail(error)

    def on_settled(self, attempt: str, slab: int) -> None:
        leg = self._legs.get(attempt)
        if leg is not None:
            leg.on_settled(slab)

    def on_silent(self, peer: str) -> None:
        """Its slabs were waited for in vain for a whole lease. Else every further range of it would be: one lease each."""
        for leg in self._legs.values():
            if leg.peer == peer:
                leg.fail(TransferError(f"{peer} said nothing about its slabs for a whole lease"))

    # ---- shutdown ----

    def stop_accepting(self) -> None:
        self._accepting = False

    async def drained(self) -> None:
        """Until no leg is left: computed, packed and read by decode."""
        await self._idle.wait()

    def fail_all(self, error: DiptychError | None = None) -> None:
        for leg in self._legs.values():
            leg.fail(error or WorkerLostError("this prefill worker shuts down"))
