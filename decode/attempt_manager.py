"""All attempts of this decode worker, by session; distributes the engine's events to them.

Attach stream -> Session -> submit / cancel -> Attempt
step thread   -> on_step(events of one step) -> Attempt -> Outbox of its session -> one StepBatch

An attempt of Submit.keep has a Transcript before its outbox, and outlives its stream:
attached --stream breaks--> detached --Resume on another stream--> attached
                               |--detach_s, Cancel, its deadline--> ended
ended well --detach_s--> forgotten; until then it can be resumed, too

A router that was asked with an idempotency key, and knows no more, asks for the ref of the attempt that has it (`find`).
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from diptych.common.errors import (
    DiptychError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestCancelledError,
    StaleReferenceError,
    WorkerDrainedError,
)
from diptych.common.grammar import Grammar, check_grammar
from diptych.decode.attempt import Attempt, CompileGrammar
from diptych.decode.outbox import Events, Outbox
from diptych.decode.remote_prefill import RemotePrefillContext
from diptych.decode.submission import parse_submit
from diptych.decode.ticket_statuses import TicketStatuses
from diptych.decode.transcript import MAX_TOTAL_BYTES, Budget, Transcript
from diptych.engine.grammar.program import Program
from diptych.engine.messages import (
    Admitted,
    ChoiceFinished,
    EngineEvent,
    Failed,
    Finished,
    Preempted,
    PromptLogprobs,
    TokensOut,
)
from diptych.rpc.convert import grammar_from_proto
from diptych.rpc.errors import to_failure
from diptych.rpc.v1 import decode_pb2
from diptych.worker.adapters import Adapters, NoAdapters
from diptych.worker.incoming import Limits
from diptych.worker.ports import Engine

log = structlog.get_logger(__name__)


async def no_grammars(grammar: Grammar) -> tuple[Program, bytes]:
    raise InvalidRequestError("grammar: not supported by this worker (see --grammar-backend)", param="grammar")


class Session:
    """One router's or client's stream, and its attempts."""

    def __init__(self, intake: AttemptManager, *, max_buffer_bytes: int) -> None:
        self._intake = intake
        self.attempts: set[str] = set()
        self.outbox = Outbox(
            max_bytes=max_buffer_bytes, on_overflow=lambda: self.close(OverloadedError("the router reads too slowly"))
        )

    def on_command(self, command: decode_pb2.Command) -> None:
        match command.WhichOneof("command"):
            case "submit":
                self._intake.submit(self, command.submit)
            case "cancel":
                self._intake.cancel(self, command.cancel.attempt)
            case "prepare":
                self._intake.prepare(command.prepare)
            case "resume":
                self._intake.resume(self, command.resume)
            case _:
                log.warning("a command of an unknown kind was ignored")

    def detach(self) -> None:
        """The stream broke: keep the attempts that may be kept, cancel the others. Idempotent."""
        for attempt in list(self.attempts):
            self._intake.detach(attempt)
        self.close()

    def close(self, error: DiptychError | None = None) -> None:
        """End the attempts of this stream, and the stream. Idempotent."""
        error = error or RequestCancelledError("the router's stream ended")
        for attempt in list(self.attempts):
            self._intake.end(attempt, error)
        self.outbox.close()
        self._intake.close_session(self)


@dataclass(slots=True)
class _Kept:
    """An attempt of Submit.keep. `session`: None: it is detached. `key`, `ref`: see find; b"": it has none. `timer`: ends its
    keeping."""

    transcript: Transcript
    cache_salt: bytes
    session: Session | None
    key: bytes = b""
    ref: str = ""
    timer: asyncio.TimerHandle | None = None


class AttemptManager:
    """The attempts of the worker.

    Args:
        max_attempts: attempts held at once, running and waiting; a further Submit is rejected with OverloadedError.
        compile_grammar: None: requests with a grammar are rejected.
        adapters: default: requests with an adapter are rejected.
        detach_s: how long an attempt of Submit.keep outlives its stream, and its events outlive its end; 0: not at all.
        max_kept_bytes: of the events of all of them.
    """

    def __init__(
        self,
        engine: Engine,
        context: RemotePrefillContext,
        limits: Limits,
        *,
        path: str,
        max_attempts: int,
        max_buffer_bytes: int = 32 * 1024 * 1024,
        compile_grammar: CompileGrammar | None = None,
        adapters: Adapters | None = None,
        detach_s: float = 0.0,
        max_kept_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        self._engine = engine
        self._context = context
        self._limits = limits
        self._path = path
        self._compile_grammar = compile_grammar or no_grammars
        self._adapters = adapters or NoAdapters()
        self._max_attempts = max_attempts
        self._max_buffer_bytes = max_buffer_bytes
        self._attempts: dict[str, tuple[Attempt, Session]] = {}
        self._detach_s = detach_s
        self._kept: dict[str, _Kept] = {}
        self._by_key: dict[bytes, str] = {}
        """The latest attempt of each idempotency key."""
        self._budget = Budget(max_kept_bytes)
        self._sessions: set[Session] = set()
        self._routers: set[Session] = set()
        self._endpoint: decode_pb2.DirectEndpoint | None = None
        self._ticket_statuses = TicketStatuses()
        self._idle = asyncio.Event()
        self._idle.set()
        self._accepting = True
        self._preparing: set[asyncio.Task[None]] = set()

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    def states(self) -> dict[str, int]:
        """Number of attempts by state, for the audit."""
        out: dict[str, int] = {}
        for attempt, _ in self._attempts.values():
            out[attempt.state.value] = out.get(attempt.state.value, 0) + 1
        return out

    def open_session(self, *, client: bool = False, max_buffer_bytes: int = 0) -> Session:
        """`client`: the session receives only events of its own attempts."""
        session = Session(self, max_buffer_bytes=max_buffer_bytes or self._max_buffer_bytes)
        self._sessions.add(session)
        if not client:
            self._routers.add(session)
            if self._endpoint is not None:
                session.outbox.direct_endpoint(self._endpoint)
            for status in self._ticket_statuses.recent(asyncio.get_running_loop().time()):
                session.outbox.ticket_status(status)
        return session

    def close_session(self, session: Session) -> None:
        self._sessions.discard(session)
        self._routers.discard(session)

    def set_direct_endpoint(self, endpoint: decode_pb2.DirectEndpoint) -> None:
        """Send every router the address for clients, and the ticket epoch."""
        self._endpoint = endpoint
        for session in self._routers:
            session.outbox.direct_endpoint(endpoint)

    def send_ticket_status(self, status: decode_pb2.TicketStatus) -> None:
        """To every router, and to those that come soon: a stream may have broken."""
        self._ticket_statuses.add(status, asyncio.get_running_loop().time())
        for session in list(self._routers):
            session.outbox.ticket_status(status)

    # ---- from the router ----

    def submit(self, session: Session, message: decode_pb2.Submit, outbox: Events | None = None) -> None:
        """Accept an attempt, or send its End at once. `outbox`: default: the session's."""
        outbox = outbox or session.outbox
        try:
            if not self._accepting:
                raise NoWorkerError("this decode worker is draining", retry_after_s=1.0)
            submission = parse_submit(message, self._limits)
            if submission.attempt in self._attempts:
                raise InvalidRequestError(f"attempt {submission.attempt} already exists", param="attempt")
            if len(self._attempts) >= self._max_attempts:
                raise OverloadedError(f"{len(self._attempts)} requests are already running", retry_after_s=1.0)
        except DiptychError as error:
            outbox.end(message.attempt, decode_pb2.End(failure=to_failure(error)))
            return
        if message.keep and self._detach_s:
            on_full = partial(self._on_full, submission.attempt)
            outbox = Transcript(submission.attempt, outbox, self._budget, on_full)
            key, ref = submission.idempotency, submission.resume_ref
            self._kept[submission.attempt] = _Kept(outbox, message.cache_salt, session, key, ref)
            if key:
                self._by_key[key] = submission.attempt
        attempt = Attempt(
            submission,
            outbox,
            self._engine,
            self._context,
            path=self._path,
            forget=self._forget,
            compile_grammar=self._compile_grammar,
            adapters=self._adapters,
        )
        self._attempts[submission.attempt] = (attempt, session)
        session.attempts.add(submission.attempt)
        self._idle.clear()
        attempt.start()

    def prepare(self, message: decode_pb2.Prepare) -> None:
        """Compile a grammar in advance. Attempts that come with it learn whether that is possible."""
        task = asyncio.create_task(self._prepare(message), name="compile a grammar in advance")
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _prepare(self, message: decode_pb2.Prepare) -> None:
        try:
            grammar = check_grammar(grammar_from_proto(message.grammar))
            if grammar is not None:
                await self._compile_grammar(grammar)
        except DiptychError as error:
            log.info("a grammar was not compiled in advance", reason=error.reason, error=error.message)

    def cancel(self, session: Session, attempt: str) -> None:
        """Only the session that has an attempt may cancel it, and any router's one that no session has; an unknown one
        has ended."""
        kept = self._kept.get(attempt)
        detached = kept is not None and kept.session is None and session in self._routers
        if attempt in session.attempts or detached:
            self.end(attempt, RequestCancelledError("cancelled by the router"))

    def find(self, key: bytes) -> str:
        """The ref of the attempt of this idempotency key; "": none is kept. `key`: a hash, which only routers can make."""
        name = self._by_key.get(key)
        return self._kept[name].ref if name is not None else ""

    def resume(self, session: Session, message: decode_pb2.Resume) -> None:
        """Give the attempt to this session, with all its events so far; one that had it loses it."""
        name, kept = message.attempt, self._kept.get(message.attempt)
        if kept is None or not kept.transcript.whole or not hmac.compare_digest(kept.cache_salt, message.cache_salt):
            gone = StaleReferenceError("this worker has no such attempt, or no longer")
            session.outbox.end(name, decode_pb2.End(failure=to_failure(gone)))
            return
        before, kept.session = kept.session, session
        if before is not None and name in before.attempts and before is not session:
            before.attempts.discard(name)
            taken = RequestCancelledError("another router goes on with this answer")
            before.outbox.end(name, decode_pb2.End(failure=to_failure(taken)))
        if before is session:
            session.outbox.forget(name)
        if (running := self._attempts.get(name)) is not None:
            if kept.timer is not None:
                kept.timer.cancel()
                kept.timer = None
            self._attempts[name] = (running[0], session)
            session.attempts.add(name)
        kept.transcript.attach(session.outbox)
        log.info("another router goes on with an attempt", attempt=name, running=running is not None)

    def detach(self, attempt: str) -> None:
        """Its stream broke: keep it for detach_s, if it may be kept."""
        kept, running = self._kept.get(attempt), self._attempts.get(attempt)
        if running is None or kept is None or not kept.transcript.whole:
            return
        kept.session = kept.transcript.outbox = None
        running[1].attempts.discard(attempt)
        self._keep(attempt, kept)
        log.info("an attempt has lost its router", attempt=attempt, kept_s=self._detach_s)

    def _keep(self, attempt: str, kept: _Kept) -> None:
        """For detach_s from now on, or until its timer that runs already."""
        if kept.timer is None:
            kept.timer = asyncio.get_running_loop().call_later(self._detach_s, self._drop, attempt)

    def _drop(self, attempt: str) -> None:
        """End the attempt if no session has it, and forget its events."""
        kept = self._kept.pop(attempt)
        if kept.timer is not None:
            kept.timer.cancel()
        if self._by_key.get(kept.key) == attempt:
            del self._by_key[kept.key]
        kept.transcript.drop()
        if kept.session is None:
            self.end(attempt, RequestCancelledError("its router is gone, and no other one went on with it"))

    def _on_full(self, attempt: str) -> None:
        log.info("an attempt is too large to be kept", attempt=attempt)
        self._drop(attempt)

    def end(self, attempt: str, error: DiptychError) -> None:
        entry = self._attempts.get(attempt)
        if entry is not None:
            entry[0].end_with(error)

    # ---- from the engine ----

    def on_step(self, events: Sequence[EngineEvent]) -> None:
        """All events of one step, in order. Their messages to one outbox leave in one batch."""
        for event in events:
            if not isinstance(
                event, (Admitted, Preempted, TokensOut, ChoiceFinished, PromptLogprobs, Finished, Failed)
            ):
                continue
            entry = self._attempts.get(event.attempt)
            if entry is None:
                continue
            attempt = entry[0]
            match event:
                case Admitted():
                    attempt.on_admitted(event)
                case Preempted():
                    attempt.on_preempted(event)
                case TokensOut():
                    attempt.on_tokens(event)
                case ChoiceFinished():
                    attempt.on_choice_finished(event)
                case PromptLogprobs():
                    attempt.on_prompt_logprobs(event)
                case Finished():
                    attempt.on_finished(event)
                case Failed():
                    attempt.on_failed(event)

    def _forget(self, attempt: str) -> None:
        entry = self._attempts.pop(attempt, None)
        if entry is not None:
            entry[1].attempts.discard(attempt)
        if (kept := self._kept.get(attempt)) is not None:
            if kept.transcript.ended_well:
                self._keep(attempt, kept)
            else:
                self._drop(attempt)
        if not self._attempts:
            self._idle.set()

    # ---- shutdown, and change of role ----

    def accept(self) -> None:
        self._accepting = True

    def stop_accepting(self) -> None:
        self._accepting = False

    async def drained(self) -> None:
        """Wait until no attempt is left."""
        await self._idle.wait()

    def fail_all(self, error: DiptychError | None = None) -> None:
        """End every attempt, and every router's stream after its pending messages."""
        for task in self._preparing:
            task.cancel()
        for session in list(self._sessions):
            session.close(error or WorkerDrainedError("this decode worker shuts down"))
        for attempt in list(self._kept):
            self._drop(attempt)
