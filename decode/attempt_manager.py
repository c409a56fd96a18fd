"""All attempts of this decode worker, by session; distributes the engine's events to them.

Attach stream -> Session -> submit / cancel -> Attempt
step thread   -> on_step(events of one step) -> Attempt -> Outbox of its session -> one StepBatch
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from diptych.common.errors import (
    DiptychError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestCancelledError,
    WorkerLostError,
)
from diptych.common.grammar import Grammar, check_grammar
from diptych.decode.attempt import Attempt, CompileGrammar
from diptych.decode.outbox import Events, Outbox
from diptych.decode.remote_prefill import RemotePrefillContext
from diptych.decode.submission import parse_submit
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
            case _:
                log.warning("a command of an unknown kind was ignored")

    def close(self, error: DiptychError | None = None) -> None:
        """The stream ended: cancel its attempts. Idempotent."""
        error = error or RequestCancelledError("the router's stream ended")
        for attempt in list(self.attempts):
            self._intake.end(attempt, error)
        self.outbox.close()
        self._intake.close_session(self)


class AttemptManager:
    """The attempts of the worker. `max_attempts`: attempts held at once, running and waiting; a further Submit is
    rejected with OverloadedError. `compile_grammar`: None: requests with a grammar are rejected."""

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
    ) -> None:
        self._engine = engine
        self._context = context
        self._limits = limits
        self._path = path
        self._compile_grammar = compile_grammar or no_grammars
        self._max_attempts = max_attempts
        self._max_buffer_bytes = max_buffer_bytes
        self._attempts: dict[str, tuple[Attempt, Session]] = {}
        self._sessions: set[Session] = set()
        self._routers: set[Session] = set()
        self._endpoint: decode_pb2.DirectEndpoint | None = None
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
        attempt = Attempt(
            submission,
            outbox,
            self._engine,
            self._context,
            path=self._path,
            forget=self._forget,
            compile_grammar=self._compile_grammar,
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
        """Only the session that submitted an attempt may cancel it; an unknown one has ended."""
        if attempt in session.attempts:
            self.end(attempt, RequestCancelledError("cancelled by the router"))

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
            session.close(error or WorkerLostError("this decode worker shuts down"))
