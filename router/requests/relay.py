"""Relays one request from its placement to its end: submits, places again where allowed, and checks decode's stream.
See lifecycle.py for its states, migration.py for what happens when an attempt fails, resume.py for an answer that another
router has begun: its attempt is looked for first, and only where there is none is the request placed.

A request has one attempt at a time. Whatever comes of an earlier one is dropped by its id (decode_stream.py), so a worker
that was stopped and goes on cannot reach the client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

import structlog

from diptych.common.adapters.load_errors import without_details
from diptych.common.clock import Clock
from diptych.common.errors import (
    DiptychError,
    InternalError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestCancelledError,
    RequestDeadlineError,
    StaleReferenceError,
    WorkerLostError,
)
from diptych.common.ids import new_attempt_id
from diptych.common.request import CHOICE, IDEMPOTENCY, RESUME
from diptych.router.cluster.cluster import RETRY_AFTER_S, Cluster
from diptych.router.cluster.decode_stream import Attempt
from diptych.router.fairness.admission import AdmissionDecision
from diptych.router.fairness.admission import Verdict as AdmissionVerdict
from diptych.router.observe.explain import RequestTrace
from diptych.router.observe.metrics import RouterMetrics
from diptych.router.placement.adapters import AdapterNeed
from diptych.router.placement.placer import Incarnation, PromptBlocks
from diptych.router.placement.recent import Decision
from diptych.router.placement.types import Placement
from diptych.router.requests.choice_attempts import ChoiceAttempts
from diptych.router.requests.lifecycle import IllegalMoveError, Lifecycle, Move, State
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    GenerateEvent,
    PromptLogprobsEvent,
    StartedEvent,
    TokenEvent,
    UsageInfo,
    ValidatedRequest,
)
from diptych.router.requests.migration import (
    AnswerSoFar,
    MovedByOperatorError,
    MoveOutcome,
    Moves,
    Verdict,
    is_refusal,
)
from diptych.router.requests.outcomes import record_outcome
from diptych.router.requests.resume import Refs, worker_mark
from diptych.router.requests.submission import adapter_need, placement_request, prompt_so_far, submit_of
from diptych.rpc.convert import finish_reason_from_proto, logprobs_from_proto
from diptych.rpc.errors import from_failure
from diptych.rpc.v1 import decode_pb2, router_pb2

log = structlog.get_logger(__name__)

_REPLACE_WAIT_S = 1.0
MOVE_S = 10.0
BY_OPERATOR = "moved by operator"
"""The failure of such an attempt in an explanation."""
_RUNNING = (State.ACCEPTED, State.STREAMING)


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A move by an operator. `to`: None: to any worker. `done`: gets the name of the worker that has accepted it."""

    to: Incarnation | None
    done: asyncio.Future[str]


class Relay:
    """Call `next` until FinishedEvent or an error, and `close` in any case. `migration_attempts`: see Moves. `refs`: None:
    nobody can go on with it elsewhere."""

    def __init__(
        self,
        cluster: Cluster,
        request: ValidatedRequest,
        metrics: RouterMetrics,
        clock: Clock,
        *,
        migration_attempts: int = 0,
        refs: Refs | None = None,
    ) -> None:
        self._cluster = cluster
        self._refs = refs
        self._metrics = metrics
        self._clock = clock
        self._prompt = PromptBlocks(prompt_so_far(request))
        fails = request.failure_policy == router_pb2.FAILURE_POLICY_FAIL
        self._moves = Moves(migration_attempts, allowed=not fails)
        self._may_continue = migration_attempts > 0 and not fails
        self._begin(request)
        self._to_attach = request if request.resume is not None else None
        """It goes on with another router's attempt, which was not looked for yet."""
        self._attaching: ValidatedRequest | None = None
        """The request, until that attempt has answered."""
        self.attached = False
        self._planned: PlannedMove | None = None
        """By an operator, until it has happened."""
        self._started = False
        self._attempt: Attempt | ChoiceAttempts | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Of the deadline, from the first wait."""
        self._loss: WorkerLostError | None = None
        """Of the worker whose request no other one has accepted yet."""
        self._lost_at = 0.0
        self._turn: AdapterNeed | None = None
        """Of its adapter, which it has and has not used yet."""
        self._judgement: AdmissionDecision | None = None
        self._trace = RequestTrace(request.request_id, adapter=request.adapter)
        self._decision = Decision(
            request_id=request.request_id,
            label=request.label,
            prompt_tokens=len(request.prompt.token_ids),
            arrived=request.arrived,
            owner=request.owner,
            trace=self._trace,
        )
        self._outcome_recorded = True
        """The outcome of the attempt was recorded for its workers."""
        self._lost_on: frozenset[Incarnation] = frozenset()
        self._refused_by: frozenset[Incarnation] = frozenset()
        self._left: frozenset[Incarnation] = frozenset()
        """The worker from which an operator moved it last."""
        self.kv_bytes = 0
        self.traceparent = ""
        """The router's span of this request, for decode."""

    def _begin(self, request: ValidatedRequest) -> None:
        """Set what depends on the tokens that the caller has of this request's answer."""
        resumed = len(request.resume_after)
        self._request = request
        self._lifecycle = Lifecycle(num_tokens=resumed, offsets={0: resumed})
        self._answer = AnswerSoFar(request) if self._may_continue else None
        """None: no other attempt may continue it."""
        self._attempt_base = resumed
        """Tokens that the answer had when the attempt was submitted."""

    async def next(self) -> GenerateEvent:
        """StartedEvent once decode accepted, then TokenEvent*, then FinishedEvent. Raises: DiptychError."""
        while True:
            try:
                if self._to_attach is not None:
                    self._attach(self._to_attach)
                if self._attempt is None:
                    await self._wait_for_turn()
                    self._submit()
                attempt = self._attempt
                assert attempt is not None
                if self._timer is None and not attempt.has_event:  # one timer serves all waits of the request
                    left_s = self._request.deadline - self._clock.now()
                    self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._expire)
                event = self._translate(await attempt.next())
            except IllegalMoveError as err:
                self._record_outcome(InternalError.reason)
                self.close()
                log.error("protocol violation by decode", request_id=self._request.request_id, trace=str(err))
                raise InternalError("protocol violation by the decode worker; the answer was stopped") from err
            except DiptychError as err:
                if self._attaching is not None and isinstance(err, (StaleReferenceError, WorkerLostError)):
                    self._leave_attempt(self._attaching, err)
                else:
                    await self._place_again(err)
                continue
            if event is not None:
                return event

    @property
    def trace(self) -> RequestTrace:
        return self._trace

    def close(self) -> None:
        """Cancel the attempt and release its reservation. Idempotent, never blocks."""
        self._end_move()
        self._leave_turn()
        self._cluster.placer.end(self._request.request_id, self._clock.now())
        if not self._lifecycle.ended:
            self._lifecycle.on(Move.CANCEL)
            self._decision.outcome = RequestCancelledError.reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._drop_attempt()

    def _drop_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.cancel()
            self._cluster.reservations.release(attempt.id)
            self._record_outcome(RequestCancelledError.reason)

    def _record_outcome(self, reason: str, faults: Sequence[decode_pb2.PrefillFault] = ()) -> None:
        """Record the attempt's outcome for the breakers. `reason`: "" on success."""
        placement = self._trace.placement
        if self._outcome_recorded or placement is None:
            return
        self._outcome_recorded = True
        facts = self._trace.facts
        prefill = facts.prefill if facts is not None else ""
        record_outcome(self._cluster, placement, reason=reason, prefill=prefill, faults=faults)

    # ---- going on with another router's attempt -------------------------------------------------------------------

    def _attach(self, request: ValidatedRequest) -> None:
        """Ask the worker for the attempt, if it is one that could have it. All of its events come again."""
        point, self._to_attach = request.resume, None
        assert point is not None
        there = self._cluster.keeper_of(point.worker)
        if there is None:
            self._metrics.resumes.labels("computed").inc()
            return
        try:
            placement = self._cluster.place(placement_request(request), self._prompt, self._cluster.only(there))
            attempt = self._cluster.resume(placement, point.attempt, request.prompt, request.tenant)
        except (NoWorkerError, WorkerLostError):
            self._metrics.resumes.labels("computed").inc()
            return
        self._begin(replace(request, resume_after=()))
        self._attaching, self._attempt = request, attempt
        self._trace.placement, self._trace.mode = placement, self._cluster.index_mode(placement)
        self._trace.submitted_s = self._clock.now() - request.arrived
        self._cluster.decisions.add(self._decision)
        self._lifecycle.on(Move.SUBMIT)
        self._outcome_recorded = False

    def _leave_attempt(self, request: ValidatedRequest, error: DiptychError) -> None:
        """It is gone: the request is placed as any other."""
        log.info("an answer is computed again", request_id=request.request_id, error=error.message)
        self._metrics.resumes.labels("computed").inc()
        self._record_outcome(RequestCancelledError.reason)
        self._drop_attempt()
        self._attaching = self._trace.placement = None
        self._begin(request)

    # ---- placing -------------------------------------------------------------------------------------------------

    async def _wait_for_turn(self) -> None:
        """Only for the first placement. Raises: OverloadedError, RequestDeadlineError."""
        if self._lifecycle.num_replacements:
            return
        request, cluster, wait_queue = self._request, self._cluster, self._cluster.wait_queue
        if (need := adapter_need(request)) is not None and self._turn is None:
            waited_s = await cluster.adapter_turns.enter(need, request.tenant, self._left_s())
            self._turn = need
            if waited_s > 0:
                self._trace.notes.append(f"waited {waited_s:.2f} s until a slot was free for its adapter")
        tokens, most = len(request.prompt.token_ids), request.sampling.max_tokens
        limit = cluster.admission.limit(request.arrived, request.deadline, most)
        if wait_queue.may_pass(request.tenant, tokens, limit):
            if limit is not None:
                limit.certain = cluster.certain_if_late(self._prompt, limit.at)
                self._judgement = wait_queue.judge(request.tenant, tokens, limit, request.arrived)
        else:
            tokens = cluster.uncached_tokens(self._prompt)
            if limit is not None:
                limit.certain = cluster.placer.certain_tokens(self._prompt)
            cluster.placer.begin(request.request_id, self._prompt, most)
            self._judgement = await wait_queue.enter(
                request.tenant,
                tokens,
                priority=request.priority,
                left_s=self._left_s(),
                limit=limit,
                arrived=request.arrived,
            )
        if self._judgement is not None and self._judgement.error is not None:
            self._cluster.decisions.add(self._decision)
            if limit is not None and limit.excused:
                self._metrics.judged(False)
            self._refused(self._judgement.error)

    def _place(self, exclude: frozenset[Incarnation]) -> tuple[Placement, dict[int, ValidatedRequest]]:
        """Where the request, or the rest of its answer by choice, would run now. Raises: NoWorkerError."""
        request = self._request
        query, prompt = placement_request(request), self._prompt
        parts: dict[int, ValidatedRequest] = {}
        if self._answer is not None and self._num_sent:
            parts = self._answer.continuations(request)
            longest = max(parts.values(), key=lambda part: len(part.resume_after))
            query, prompt = placement_request(longest), PromptBlocks(prompt_so_far(longest))
            if request.sampling.num_choices > 1:
                query = replace(query, request_fields=query.request_fields | {CHOICE})
        return self._cluster.place(query, prompt, exclude), parts

    def _place_as_planned(self) -> tuple[Placement, dict[int, ValidatedRequest]]:
        """Where an operator wants it, if that is possible still. Raises: NoWorkerError."""
        exclude, target = self._exclusion(), self._planned.to if self._planned is not None else None
        if target is not None and target not in exclude and self._loss is not None:
            with suppress(NoWorkerError):
                return self._place(self._cluster.only(target))
        return self._place(exclude)

    def _submit(self) -> None:
        request, trace, life = self._request, self._trace, self._lifecycle
        placement, parts = self._place_as_planned()
        trace.placement = placement
        trace.mode = self._cluster.index_mode(placement)
        trace.submitted_s = self._clock.now() - request.arrived
        if not trace.ttft_s:
            trace.waited_s = trace.submitted_s
        if not life.num_replacements:
            self._cluster.decisions.add(self._decision)
            self._cluster.retry_budget.on_request()
            self._admit(placement)
            self._cluster.placer.begin(request.request_id, self._prompt, request.sampling.max_tokens)
        left_s = self._left_s()
        life.on(Move.SUBMIT)
        self._attempt_base = life.num_tokens
        if request.sampling.num_choices > 1 and parts:
            self._attempt = self._open_choices(parts, placement, left_s)
        else:
            self._attempt = self._open(parts.get(0, request), placement, left_s)
        self._leave_turn()
        self._outcome_recorded = False
        self._metrics.placements.labels("local" if placement.local_prefill else "remote").inc()
        if life.num_replacements:
            self._metrics.replacements.inc()
            self._metrics.fallbacks.labels("other_decode").inc()

    def _leave_turn(self) -> None:
        """The request is placed, or will not be."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._cluster.adapter_turns.leave(turn)

    def _open(self, request: ValidatedRequest, placement: Placement, left_s: float, choice: int = 0) -> Attempt:
        """Raises: as Cluster.open."""
        submit = submit_of(request, placement, new_attempt_id(), left_s, self.traceparent)
        submit.keep = self._is_kept(request, placement)
        if submit.keep and request.idempotency_key and IDEMPOTENCY in placement.decode.record.request_fields:
            assert self._refs is not None
            submit.idempotency = self._refs.key_of(request.idempotency_key, request.owner)
            submit.resume_ref = self._ref(submit.attempt, placement)
        if choice:
            submit.choice = choice
        return self._cluster.open(placement, submit, request.tenant)

    def _is_kept(self, request: ValidatedRequest, placement: Placement) -> bool:
        """Whether the worker keeps the attempt when this router dies. Only one that sends all of the answer: another router
        needs it from its first token on."""
        wanted = self._refs is not None and request.resumable and not request.resume_after
        return wanted and RESUME in placement.decode.record.request_fields

    def _open_choices(self, parts: dict[int, ValidatedRequest], placement: Placement, left_s: float) -> ChoiceAttempts:
        """Raises: as Cluster.open."""
        reservations, attempts = self._cluster.reservations, dict[int, Attempt]()
        assert self._answer is not None
        try:
            for choice, part in parts.items():
                attempts[choice] = self._open(part, placement, left_s, choice)
        except DiptychError:
            for attempt in attempts.values():
                attempt.cancel()
                reservations.release(attempt.id)
            raise
        return ChoiceAttempts(
            attempts,
            self._answer.num_ended_tokens,
            release=reservations.release,
            first_tokens=reservations.prompt_computed,
        )

    def _admit(self, placement: Placement) -> None:
        """Raises: OverloadedError when the request should not start."""
        if self._judgement is not None:
            self._judgement = self._cluster.judge_pace(self._judgement, placement)
            if self._judgement.error is not None:
                self._refused(self._judgement.error)
            self._metrics.admission.labels(self._judgement.verdict.value).inc()
        else:
            self._metrics.admission.labels(AdmissionVerdict.ADMITTED.value).inc()

    def _refused(self, error: OverloadedError) -> NoReturn:
        """Raises: the error."""
        self._metrics.admission.labels(AdmissionVerdict.REFUSED.value).inc()
        self._trace.notes.append(f"admission: {error.message}")
        raise error

    def _left_s(self) -> float:
        left_s = self._request.deadline - self._clock.now()
        if left_s <= 0:
            raise RequestDeadlineError("the request's deadline passed before it could be placed")
        return left_s

    # ---- moved by an operator ----

    async def move(self, to: str) -> router_pb2.MoveResponse:
        """Move the running request to another decode worker, `to` or any. Returns: once that one has accepted it.

        Raises: InvalidRequestError naming `to`, or `request_id` of a request that cannot move; NoWorkerError: no other worker
            could take it; RequestDeadlineError: it did not move in MOVE_S (its client does not read, for one).
        """
        attempt, placement, state = self._attempt, self._trace.placement, self._lifecycle.state
        if self._planned is not None or attempt is None or placement is None or state not in _RUNNING:
            raise self._immovable("it is being placed now")
        if not self._moves.allowed:
            raise self._immovable("its failure_policy forbids other workers")
        if self._answer is None:
            raise self._immovable("this router moves no requests (migration_attempts is 0)")
        if self._num_sent and not self._answer.continuable:
            raise self._immovable("no other worker can go on from its tokens")
        record = placement.decode.record
        here = (record.worker_id, record.incarnation)
        target = self._target(to, here)
        self._place(frozenset({here}) if target is None else self._cluster.only(target))  # or it raises
        planned = self._planned = PlannedMove(target, asyncio.get_running_loop().create_future())
        moved_by = MovedByOperatorError(f"an operator moved the request from decode worker {record.worker_id}")
        attempt.interrupt(moved_by)
        num_tokens = self._num_sent
        try:
            async with asyncio.timeout(MOVE_S):
                after = await planned.done
        except TimeoutError:
            raise RequestDeadlineError(f"the request did not move within {MOVE_S:g} s") from None
        finally:
            if self._planned is planned:
                self._planned = None
        return router_pb2.MoveResponse(before=record.worker_id, after=after, num_tokens=num_tokens)

    def _immovable(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self._request.request_id} cannot move: {why}", param="request_id")

    def _target(self, to: str, here: Incarnation) -> Incarnation | None:
        """Raises: InvalidRequestError."""
        if not to:
            return None
        if to == here[0]:
            raise InvalidRequestError(f"to: the request runs on {to} already", param="to")
        usable = {view.worker_id: view.record for view in self._cluster.snapshot().decode}
        if to not in usable:
            there = ", ".join(sorted(usable)) or "none"
            raise InvalidRequestError(f"to: {to[:64]!r} is not a usable decode worker; there are: {there}", param="to")
        return to, usable[to].incarnation

    def _end_move(self, after: str = "") -> None:
        """The request has another worker, or has ended."""
        planned = self._planned
        if planned is not None and not planned.done.done():
            if after:
                planned.done.set_result(after)
            else:
                planned.done.set_exception(self._immovable("it has ended"))

    async def _place_again(self, error: DiptychError) -> None:
        """Prepare for another submit, or raise the error."""
        placement, life, loss = self._trace.placement, self._lifecycle, self._loss
        if placement is None and loss is None and isinstance(error, NoWorkerError) and await self._wait_for_worker():
            return
        planned = isinstance(error, MovedByOperatorError)
        self._record_outcome(RequestCancelledError.reason if planned else error.reason)
        verdict: Verdict | MoveOutcome = Verdict.FAIL
        if placement is not None and (self._judgement is None or error is not self._judgement.error):
            verdict = self._moves.judge(
                error,
                accepted=life.state in (State.ACCEPTED, State.STREAMING),
                num_tokens=self._num_sent,
                continuable=self._answer is not None and self._answer.continuable,
            )
        may = verdict is Verdict.MOVE or (verdict is Verdict.REPLACE and self._cluster.retry_budget.take())
        if placement is None or not may:
            raise self._fail(error, verdict if isinstance(verdict, MoveOutcome) else None)
        self._trace.on_lost(BY_OPERATOR if planned else error.reason, life.num_tokens - self._attempt_base)
        self._drop_attempt()
        life.on(Move.REPLACE)
        record = placement.decode.record
        incarnation = {(record.worker_id, record.incarnation)}
        if planned:
            self._left = frozenset(incarnation)
        elif isinstance(error, WorkerLostError):
            self._lost_on |= incarnation
        else:
            self._refused_by |= incarnation
        if verdict is Verdict.MOVE and loss is None:
            assert isinstance(error, WorkerLostError)  # a refusal is moved only after a loss
            self._loss, self._lost_at = error, self._clock.now()
        self._trace.placement = None
        log.warning("placing again", request_id=self._request.request_id, error=error.message, tokens=life.num_tokens)
        await self._wait_for_another(error)

    @property
    def _num_sent(self) -> int:
        """Tokens that the client has from this router."""
        return self._lifecycle.num_tokens - len(self._request.resume_after)

    def _exclusion(self) -> frozenset[Incarnation]:
        """Incarnations that must not be chosen. One that was lost or left may be, if it is usable and no other is; and one that
        would have to compile a slow grammar in mid-answer, if no other has it."""
        both, grammar = self._lost_on | self._refused_by | self._left, self._request.sampling.grammar
        if self._loss is not None and grammar is not None:
            ready_only = both | self._cluster.without_grammar(grammar)
            if self._cluster.snapshot(exclude=ready_only).decode:
                return ready_only
        return both if not both or self._cluster.snapshot(exclude=both).decode else self._refused_by

    async def _wait_for_another(self, error: DiptychError) -> None:
        """Raises: the error when none comes in time; at once when none can come for an answer that has lost its own."""
        waited_until = self._clock.now() + _REPLACE_WAIT_S
        while not self._cluster.snapshot(exclude=self._exclusion()).decode:
            left_s = min(waited_until, self._request.deadline) - self._clock.now()
            if left_s <= 0 or (self._loss is not None and not self._cluster.may_come(self._refused_by)):
                raise self._fail(error)
            await self._cluster.wait_for_change(min(left_s, 0.1))

    async def _wait_for_worker(self) -> bool:
        """Whether a decode worker became usable during the grace period (see startup_grace.py)."""
        if self._cluster.snapshot(exclude=self._refused_by).decode:
            return False  # there are decode workers, so the error has another reason
        while (left_s := min(self._cluster.settling.left_s(), self._request.deadline - self._clock.now())) > 0:
            await self._cluster.wait_for_change(min(left_s, 0.1))
            if self._cluster.snapshot(exclude=self._refused_by).decode:
                return True
        return False

    def _fail(self, error: DiptychError, outcome: MoveOutcome | None = None) -> DiptychError:
        """End the request. Returns: the error to raise: of an answer that could not move, the loss of its worker.
        `outcome`: of its last loss, if it is known."""
        loss = self._loss
        if loss is not None and (isinstance(error, WorkerLostError) or is_refusal(error, self._num_sent)):
            outcome = outcome or MoveOutcome.NO_WORKER
            why = "" if error is loss else f"; no other worker took its request: {error.message}"
            error = WorkerLostError(loss.message + why, retry_after_s=error.retry_after_s or RETRY_AFTER_S)
        if outcome is not None:
            self._metrics.migrations.labels(error.reason, outcome.value).inc()
        if not self._lifecycle.ended:
            self._lifecycle.on(Move.FAIL)
        self._decision.outcome = error.reason
        self._drop_attempt()
        return error

    # ---- relaying ------------------------------------------------------------------------------------------------

    def _for_caller(self, error: DiptychError) -> DiptychError:
        """A worker names itself, the folder and the id of an adapter that it cannot load: that is for operators."""
        adapter = self._request.adapter
        if adapter is None:
            return error
        name, version = adapter.name, adapter.version.number
        shown = without_details(error, f"adapter {name!r} version {version}")
        if shown is not error:
            log.warning("a worker cannot load an adapter", adapter=name, version=version, error=error.message)
        return shown

    def _expire(self) -> None:
        """The deadline has passed."""
        self._timer = None
        if self._attempt is not None:
            self._attempt.interrupt(RequestDeadlineError("the request's deadline passed"))

    def _translate(self, event: decode_pb2.Event) -> GenerateEvent | None:
        """Raises: the failure reported by decode; IllegalMoveError."""
        kind = event.WhichOneof("event")
        if kind == "tokens":
            delta, now = event.tokens, self._clock.now()
            self._trace.on_tokens(now)
            if self._lifecycle.num_tokens == self._attempt_base and self._attempt is not None:
                self._on_first_tokens(self._attempt, event, now)
            ids = tuple(delta.token_ids)
            self._lifecycle.on_tokens(delta.offset, len(ids), delta.choice)
            if self._answer is not None:
                self._answer.extend(delta.choice, ids)
            self._cluster.wait_queue.written(self._request.tenant, self._num_new(delta.choice, delta.offset, len(ids)))
            logprobs = tuple(map(logprobs_from_proto, delta.logprobs)) if delta.logprobs else ()
            return TokenEvent(delta.offset, ids, delta.text, delta.choice, logprobs, event.cached_tokens)
        if kind == "accepted":
            self._lifecycle.on(Move.ACCEPT)
            self._on_accepted()
            if self._planned is not None and self._trace.placement is not None and self._loss is not None:
                self._end_move(self._trace.placement.decode.worker_id)
            if self._loss is not None:
                self._metrics.moved(self._loss.reason, self._clock.now() - self._lost_at)
                self._loss = None
            if self._started:
                return None
            self._started = True
            return self._start()
        if kind == "prompt_logprobs":
            entries = event.prompt_logprobs
            known = tuple(logprobs_from_proto(entry) for entry in entries.logprobs)
            return PromptLogprobsEvent(entries.first_token, known)
        if kind == "choice_finished":
            ended = event.choice_finished
            if self._answer is not None:
                self._answer.end(ended.choice)
            return ChoiceFinishedEvent(
                ended.choice,
                finish_reason_from_proto(ended.finish_reason),
                ended.stop_string,
                ended.stop_token_id if ended.HasField("stop_token_id") else None,
            )
        if event.end.HasField("failure"):
            error = self._for_caller(from_failure(event.end.failure))
            self._record_outcome(error.reason, event.end.prefill_faults)
            raise error
        self._lifecycle.on(Move.END)
        finished = self._finished(event.end.finished)
        self._record_outcome("", event.end.prefill_faults)
        self._metrics.count_deviations(self._trace, [fault.reason for fault in event.end.prefill_faults])
        self._drop_attempt()
        return finished

    def _on_accepted(self) -> None:
        grammar, placement = self._request.sampling.grammar, self._trace.placement
        if self._answer is not None and grammar is not None and placement is not None:
            record, waited_s = (
                placement.decode.record,
                self._clock.now() - self._request.arrived - self._trace.submitted_s,
            )
            self._cluster.on_grammar_compiled(grammar, (record.worker_id, record.incarnation), waited_s)

    def _start(self) -> StartedEvent:
        request, attempt, placement, ref = self._request, self._attempt, self._trace.placement, ""
        assert attempt is not None
        assert placement is not None
        if self._attaching is not None:
            assert request.resume is not None
            self._attaching, self.attached, ref = None, True, request.resume.ref
            self._metrics.resumes.labels("attached").inc()
            self._trace.notes.append("begun at another router, whose attempt went on")
        elif self._is_kept(request, placement):
            ref = self._ref(attempt.id, placement)
        num_prompt = len(request.prompt.token_ids)
        return StartedEvent(request.request_id, request.model, num_prompt, ref, self.attached, request.adapter)

    def _ref(self, attempt: str, placement: Placement) -> str:
        """Of the request's answer, in this attempt at the placement's decode worker."""
        assert self._refs is not None
        request, record = self._request, placement.decode.record
        return self._refs.issue(
            request.request_id,
            attempt,
            worker_mark(record.worker_id, record.incarnation),
            request.prompt,
            request.sampling,
            created=request.created,
            owner=request.owner,
        )

    def num_new(self, event: TokenEvent) -> int:
        """Of its tokens, those that another router has not counted."""
        return self._num_new(event.choice, event.offset, len(event.token_ids))

    def _num_new(self, choice: int, offset: int, count: int) -> int:
        resume = self._request.resume
        if not self.attached or resume is None or choice >= len(resume.seen.choices):
            return count
        return min(count, max(0, offset + count - resume.seen.choices[choice].num_tokens))

    def _on_first_tokens(self, attempt: Attempt | ChoiceAttempts, event: decode_pb2.Event, now: float) -> None:
        """Of the attempt. Those of the request count once, in its times and its cached tokens."""
        self._cluster.reservations.prompt_computed(attempt.id)
        if self._is_continued:
            event.cached_tokens = 0
            return
        self._trace.ttft_s = now - self._request.arrived
        self._trace.cached_tokens = event.cached_tokens
        self._cluster.on_first_token(
            self._trace.placement,
            len(self._request.prompt.token_ids) - event.cached_tokens,
            self._trace.ttft_s - self._trace.submitted_s,
        )
        if self.attached:
            return  # its times are not those of a placement
        self._metrics.predictions(self._trace)
        if self._judgement is not None:
            self._metrics.judged(self._cluster.admission.on_first_token(self._judgement, self._trace.ttft_s))

    @property
    def _is_continued(self) -> bool:
        """The attempt continues after tokens of an earlier one."""
        return self._attempt_base > len(self._request.resume_after)

    def _finished(self, message: router_pb2.Finished) -> FinishedEvent:
        usage = message.usage
        sampling = self._request.sampling
        # tokens of choices discarded by best_of are counted, though not streamed
        withheld = sampling.num_choices > sampling.n
        if usage.completion_tokens < len(self._request.resume_after):
            # The engine also checks these tokens for an end: a stop among them is the caller's error, not decode's.
            raise InvalidRequestError("the answer ends before the last of these tokens", param="resume_after")
        if usage.completion_tokens != self._lifecycle.num_tokens and not withheld:
            raise InternalError(
                f"decode counted {usage.completion_tokens} tokens, {self._lifecycle.num_tokens} were streamed"
            )
        self.kv_bytes = message.explanation.kv_bytes
        trace = self._trace
        trace.on_facts(message.explanation)
        if not self._is_continued:
            trace.cached_tokens = usage.cached_tokens
        self._decision.outcome = "finished"
        trace.total_s = self._clock.now() - self._request.arrived
        if self._judgement is not None and sampling.num_choices == 1 and not self._is_continued:
            answer_s = trace.total_s - trace.ttft_s
            self._cluster.admission.on_answer(self._judgement, usage.completion_tokens, answer_s)
        self._metrics.split(trace, trace.total_s)
        self._cluster.on_computed(message.explanation.prefill, usage.prompt_tokens - usage.cached_tokens)
        return FinishedEvent(
            reason=finish_reason_from_proto(message.finish_reason),
            usage=UsageInfo(usage.prompt_tokens, usage.completion_tokens, trace.cached_tokens),
            stop_string=message.stop_string,
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
            explanation=trace.explanation() if self._request.explain else None,
        )
