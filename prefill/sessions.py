"""The hand-off of one prompt, or of cached blocks, to one worker: a session, from the call's start to its end.

    validate --fails--> typed status
       |
    QUEUED      an EngineRequest(PREFILL) is sent
       | Admitted -> PrefillStarted
    COMPUTING   RangePacked -> publish -> Computed(handle)      (any number of times, while later chunks are computed)
       |        PromptComputed, TokensOut -> FirstTokens, as soon as the token is known; they carry a digest of the tokens
       |        that the runner actually computed
       | PrefillComplete -> PrefillFinished
    SETTLING    until decode acknowledged every slab, or its lease expired
       |
    CLOSED      normal end of the call

    before QUEUED   an adapter that is not here is loaded
                    with a source, leading blocks are pulled from another worker's cache (worker.reads); then they are a hit

    from any state: the call is cancelled (decode's cancel), its deadline passes, the engine fails, the worker stops,
                    or decode sends nothing for a whole slab lease
                    -> CLOSED: engine Cancel, transfer.release; ranges that are packed later are returned as free grants

A session of cached blocks (`fetch`) computes nothing: after PrefillStarted its ranges are packed at once.

A slab packed for a session that has ended never leaves the worker: PrefillSessions returns its grant.

Decode gives up a silent worker. So a session sends PrefillAlive after `alive_every_s` without other messages, while the
engine makes progress: neither a stopped process nor one with a stuck engine sends it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from enum import Enum

import msgspec
import structlog

from diptych.common.errors import (
    DiptychError,
    InternalError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestDeadlineError,
    TransferError,
    WorkerDrainedError,
)
from diptych.engine.messages import (
    Admitted,
    AttemptEvent,
    Cancel,
    EngineEvent,
    EngineRequest,
    Failed,
    FirstCandidates,
    PrefillComplete,
    PromptComputed,
    PromptLogprobs,
    RangePacked,
    TokensOut,
)
from diptych.kvtransfer.api import SlabPublisher
from diptych.kvtransfer.fabric.transport import peer_key
from diptych.prefill.request import PrefillSessionRequest, parse_fetch, parse_request
from diptych.rpc.convert import logprobs_to_proto
from diptych.rpc.v1 import prefill_pb2, types_pb2
from diptych.worker import wire
from diptych.worker.adapters import Adapters, NoAdapters
from diptych.worker.incoming import Limits
from diptych.worker.ports import Engine
from diptych.worker.reads.block_pulls import BlockPulls, KvSource, PullFacts, pull_to_proto
from diptych.worker.role_spec import PREFILL, SOURCE

log = structlog.get_logger(__name__)


def _first_tokens(event: TokensOut) -> prefill_pb2.FirstTokens:
    tokens = [prefill_pb2.FirstToken(choice=event.choice, token_id=token_id) for token_id in event.token_ids]
    for token, entry in zip(tokens, event.logprobs, strict=False):  # no logprobs: none were requested
        token.logprobs.CopyFrom(logprobs_to_proto(entry))
    return prefill_pb2.FirstTokens(tokens=tokens)


def _first_candidates(event: FirstCandidates) -> prefill_pb2.FirstTokens:
    out = prefill_pb2.FirstTokens()
    for candidate in event.candidates:
        message = out.candidates.add(token_id=candidate.token_id, score=candidate.score)
        if candidate.logprobs is not None:
            message.logprobs.CopyFrom(logprobs_to_proto(candidate.logprobs))
    return out


class SessionState(Enum):
    QUEUED = "queued"
    COMPUTING = "computing"
    SETTLING = "settling"
    CLOSED = "closed"


class PrefillSession:
    """One call's state. Engine and transfer call it through PrefillSessions; the call reads `events`."""

    def __init__(self, request: PrefillSessionRequest, publisher: SlabPublisher) -> None:
        self.request = request
        self.state = SessionState.QUEUED
        self.peer = peer_key(request.decode.worker_id, request.decode.incarnation)
        """The incarnation of its decode worker."""
        self._publisher = publisher
        self._events: asyncio.Queue[prefill_pb2.PrefillEvent | DiptychError | None] = asyncio.Queue()
        self._open_slabs: set[int] = set()
        self._num_ranges = 0
        self._num_settled = 0
        self._computed: prefill_pb2.FirstTokens | None = None
        """What every message of first tokens says about the prompt; None: it is not computed."""
        self.pulled: PullFacts | None = None
        self.holds_adapter = False

    async def next_event(self, within_s: float) -> prefill_pb2.PrefillEvent | None:
        """The next event; None: everything is settled. Raises: the error that ended the session; TimeoutError: no event
        within that time."""
        async with asyncio.timeout(within_s):
            event = await self._events.get()
        if isinstance(event, DiptychError):
            raise event
        return event

    def on_engine(self, event: EngineEvent) -> None:
        match event:
            case Admitted(num_cached_tokens=cached, tiers=tiers, num_kept_tokens=kept):
                self.state = SessionState.COMPUTING
                pulled = None if self.pulled is None else pull_to_proto(self.pulled)
                from_tiers = wire.tier_tokens_to_proto(tiers)
                started = prefill_pb2.PrefillStarted(
                    cached_tokens=cached, pid=os.getpid(), pulled=pulled, tiers=from_tiers, kept_tokens=kept
                )
                self._put(prefill_pb2.PrefillEvent(started=started))
            case RangePacked():
                self._publish(event)
            case PromptComputed(computed_from=source):
                self._computed = prefill_pb2.FirstTokens(
                    computed_from=prefill_pb2.ComputedFrom(
                        num_tokens=source.num_tokens, digest=source.digest, block_size=source.block_size
                    ),
                    num_ranges_overlapped=self._num_settled,
                    compute_s=event.compute_s,
                )
                if not self.request.samples:
                    # no token is sampled, but the KV is confirmed all the same
                    self._send_first_tokens(prefill_pb2.FirstTokens())
            case TokensOut():
                self._send_first_tokens(_first_tokens(event))
            case FirstCandidates():
                self._send_first_tokens(_first_candidates(event))
            case PromptLogprobs(first_token=first, logprobs=entries):
                known = types_pb2.PromptLogprobs(first_token=first, logprobs=map(logprobs_to_proto, entries))
                self._put(prefill_pb2.PrefillEvent(prompt_logprobs=known))
            case PrefillComplete():
                self._complete()
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

    def _send_first_tokens(self, first: prefill_pb2.FirstTokens) -> None:
        if self._computed is not None:
            first.MergeFrom(self._computed)
        self._put(prefill_pb2.PrefillEvent(first_tokens=first))

    def _complete(self) -> None:
        self.state = SessionState.SETTLING
        finished = prefill_pb2.PrefillFinished(num_ranges=self._num_ranges)
        self._put(prefill_pb2.PrefillEvent(finished=finished))
        self._maybe_settled()

    def _maybe_settled(self) -> None:
        if self.state is SessionState.SETTLING and not self._open_slabs:
            self._events.put_nowait(None)

    def _put(self, event: prefill_pb2.PrefillEvent) -> None:
        self._events.put_nowait(event)


class PrefillSessions:
    """All sessions of this worker. A worker of any role has them.

    Args:
        max_sessions: sessions held at once, queued and computing; a further call is rejected with OverloadedError.
        alive_every_s: interval of PrefillAlive without other messages.
        why_stuck: why the engine makes no progress; empty: it does.
        adapters: default: requests with an adapter are rejected.
    """

    def __init__(
        self,
        engine: Engine,
        publisher: SlabPublisher,
        limits: Limits,
        *,
        max_sessions: int,
        alive_every_s: float = 1.0,
        why_stuck: Callable[[], str] = lambda: "",
        adapters: Adapters | None = None,
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._limits = limits
        self._max_sessions = max_sessions
        self._alive_every_s = alive_every_s
        self._why_stuck = why_stuck
        self._adapters = adapters or NoAdapters()
        self._sessions: dict[str, PrefillSession] = {}
        self._refused: set[str] = set()
        """Services that take no call now."""
        self._idle = {service: asyncio.Event() for service in (PREFILL, SOURCE)}
        for idle in self._idle.values():
            idle.set()
        self.pulls: BlockPulls | None = None
        """None: sources of requests are ignored."""

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def states(self, service: str = "") -> dict[str, int]:
        """Number of sessions by state, for the audit. `service`: of these only."""
        out: dict[str, int] = {}
        for session in self._sessions.values():
            if service and session.request.service != service:
                continue
            out[session.state.value] = out.get(session.state.value, 0) + 1
        return out

    async def serve(self, message: prefill_pb2.PrefillRequest) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """One call. Closing the iterator in any state frees everything of the session. Raises: InvalidRequestError,
        StaleReferenceError, OverloadedError before any work; then the engine's errors, or RequestDeadlineError."""
        self._check_accepting(PREFILL)
        async with aclosing(self._run(parse_request(message, self._limits))) as events:
            async for event in events:
                yield event

    async def fetch(self, message: prefill_pb2.FetchRequest) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        """As `serve`, for blocks of the prefix cache."""
        self._check_accepting(SOURCE)
        async with aclosing(self._run(parse_fetch(message, self._limits))) as events:
            async for event in events:
                yield event

    def _check_accepting(self, service: str) -> None:
        if service in self._refused:
            raise NoWorkerError("this worker is draining", retry_after_s=1.0)

    async def _run(self, request: PrefillSessionRequest) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        attempt = request.engine_request.attempt
        if attempt in self._sessions:
            raise InvalidRequestError(f"attempt {attempt} already exists", param="attempt")
        if len(self._sessions) >= self._max_sessions:
            raise OverloadedError(f"{len(self._sessions)} prompts are already running", retry_after_s=1.0)
        session = self._sessions[attempt] = PrefillSession(request, self._publisher)
        self._idle[request.service].clear()
        timer = asyncio.get_running_loop().call_later(
            request.remaining_s, session.fail, RequestDeadlineError("the session's deadline passed")
        )
        entering: asyncio.Task[None] | None = None
        adapter = request.adapter
        session.holds_adapter = bool(adapter) and self._adapters.hold(adapter)
        if session.holds_adapter == bool(adapter) and (request.source is None or self.pulls is None):
            self._engine.send(request.engine_request)
        else:
            entering = asyncio.create_task(self._enter(session), name=f"prepare {attempt}")
        try:
            while True:
                try:
                    event = await session.next_event(self._alive_every_s)
                except TimeoutError:
                    if not self._why_stuck():
                        yield prefill_pb2.PrefillEvent(alive=prefill_pb2.PrefillAlive())
                    continue
                if event is None:
                    return
                yield event
        finally:
            timer.cancel()
            if entering is not None:
                entering.cancel()
            self._close(attempt, session)

    async def _enter(self, session: PrefillSession) -> None:
        request = session.request
        try:
            if request.adapter and not session.holds_adapter:
                await self._adapters.load_and_hold(request.adapter, request.adapter_folder)
                session.holds_adapter = True
        except DiptychError as error:
            session.fail(error)
            return
        except Exception as error:  # a bug must not leave the request hanging
            log.exception("unexpected error in loading an adapter", attempt=request.engine_request.attempt)
            session.fail(InternalError(f"unexpected error in loading an adapter: {error!r}"))
            return
        if request.source is not None and self.pulls is not None:
            await self._pull_first(self.pulls, request.source, session)
        self._engine.send(request.engine_request)

    async def _pull_first(self, pulls: BlockPulls, source: KvSource, session: PrefillSession) -> None:
        request = session.request
        assert isinstance(request.engine_request, EngineRequest)
        try:
            prompt, outputs = request.engine_request.prompt, request.engine_request.output_token_ids
            session.pulled = await pulls.pull(
                source,
                msgspec.structs.replace(prompt, token_ids=(*prompt.token_ids, *outputs)),
                attempt=request.engine_request.attempt,
                request_id=request.request_id,
                remaining_s=request.remaining_s,
                vouch=True,
            )
        except Exception:  # a bug must not leave the request hanging
            log.exception("unexpected error in a pull", attempt=request.engine_request.attempt)

    def _close(self, attempt: str, session: PrefillSession) -> None:
        self._sessions.pop(attempt, None)
        if session.state is not SessionState.SETTLING:
            self._engine.send(Cancel(attempt))
        if session.holds_adapter:  # after the Cancel: what the engine is told about the adapter comes later
            session.holds_adapter = False
            self._adapters.release(session.request.adapter)
        session.state = SessionState.CLOSED
        self._publisher.release(attempt)
        service = session.request.service
        if all(other.request.service != service for other in self._sessions.values()):
            self._idle[service].set()

    # ---- from the step thread and the transfer thread, on the event loop ----

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if not isinstance(event, AttemptEvent):
                continue
            attempt = event.attempt
            session = self._sessions.get(attempt)
            if session is None:
                if isinstance(event, RangePacked):
                    self._publisher.return_grant(event.slab)
                continue
            try:
                session.on_engine(event)
            except DiptychError as error:
                log.warning(
                    "session failed",
                    request_id=session.request.request_id,
                    attempt=attempt,
                    reason=error.reason,
                    error=error.message,
                )
                session.fail(error)

    def on_settled(self, attempt: str, slab: int) -> None:
        session = self._sessions.get(attempt)
        if session is not None:
            session.on_settled(slab)

    def on_silent(self, peer: str) -> None:
        """Its slabs were not acknowledged for a whole lease. End its sessions, else every further range would wait one
        lease."""
        for session in self._sessions.values():
            if session.peer == peer:
                session.fail(TransferError(f"{peer} did not acknowledge its slabs for a whole lease"))

    # ---- shutdown, and change of role ----

    def accept(self, service: str) -> None:
        self._refused.discard(service)

    def stop_accepting(self, service: str) -> None:
        self._refused.add(service)

    async def drained(self, service: str) -> None:
        """Wait until no session of it is left: computed, packed and read."""
        await self._idle[service].wait()

    def fail_all(self, error: DiptychError | None = None, service: str = "") -> None:
        """`service`: those that came by it only."""
        for session in self._sessions.values():
            if not service or session.request.service == service:
                session.fail(error or WorkerDrainedError("this worker shuts down"))
