"""Relays one request from its placement to its end: submits, places again where allowed, and checks decode's stream.
See lifecycle.py for its states."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from diptych.common.clock import Clock
from diptych.common.errors import (
    DiptychError,
    IncompatibleWorkersError,
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
from diptych.router.cluster.cluster import Cluster
from diptych.router.cluster.decode_stream import Attempt
from diptych.router.fairness.admission import AdmissionDecision
from diptych.router.observe.explain import RequestTrace
from diptych.router.observe.metrics import RouterMetrics
from diptych.router.placement.placer import Incarnation, PromptBlocks
from diptych.router.placement.recent import Decision
from diptych.router.placement.types import Placement
from diptych.router.requests.lifecycle import IllegalMoveError, Lifecycle, Move
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
from diptych.router.requests.outcomes import record_outcome
from diptych.router.requests.submission import placement_request, submit_of
from diptych.rpc.convert import finish_reason_from_proto, logprobs_from_proto
from diptych.rpc.errors import from_failure
from diptych.rpc.v1 import decode_pb2, router_pb2

log = structlog.get_logger(__name__)

_REPLACE_WAIT_S = 1.0
_REPLACEABLE = (StaleReferenceError, WorkerLostError, NoWorkerError, OverloadedError, IncompatibleWorkersError)


class Relay:
    """Call `next` until FinishedEvent or an error, and `close` in any case."""

    def __init__(self, cluster: Cluster, request: ValidatedRequest, metrics: RouterMetrics, clock: Clock) -> None:
        self._cluster = cluster
        self._request = request
        self._metrics = metrics
        self._clock = clock
        self._prompt = PromptBlocks(request.prompt)
        resumed = len(request.resume_after)
        self._lifecycle = Lifecycle(num_tokens=resumed, offsets={0: resumed})
        self._started = False
        self._attempt: Attempt | None = None
        self._judgement: AdmissionDecision | None = None
        self._trace = RequestTrace(request.request_id)
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
        self._excluded: frozenset[Incarnation] = frozenset()
        self.kv_bytes = 0
        self.traceparent = ""
        """The router's span of this request, for decode."""

    async def next(self) -> GenerateEvent:
        """StartedEvent once decode accepted, then TokenEvent*, then FinishedEvent. Raises: DiptychError."""
        while True:
            try:
                if self._attempt is None:
                    await self._wait_for_turn()
                    self._submit()
                event = self._translate(await self._receive())
            except IllegalMoveError as err:
                self._record_outcome(InternalError.reason)
                self.close()
                log.error("protocol violation by decode", request_id=self._request.request_id, trace=str(err))
                raise InternalError("protocol violation by the decode worker; the answer was stopped") from err
            except DiptychError as err:
                await self._place_again(err)
                continue
            if event is not None:
                return event

    @property
    def trace(self) -> RequestTrace:
        return self._trace

    def close(self) -> None:
        """Cancel the attempt and release its reservation. Idempotent, never blocks."""
        if not self._lifecycle.ended:
            self._lifecycle.on(Move.CANCEL)
            self._decision.outcome = RequestCancelledError.reason
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

    # ---- placing -------------------------------------------------------------------------------------------------

    async def _wait_for_turn(self) -> None:
        """Only for the first placement. Raises: OverloadedError, RequestDeadlineError."""
        if not self._lifecycle.num_replacements:
            request, wait_queue = self._request, self._cluster.wait_queue
            tokens = len(request.prompt.token_ids)
            if not wait_queue.may_pass(request.tenant, tokens):
                tokens = self._cluster.uncached_tokens(self._prompt)
            await wait_queue.enter(request.tenant, tokens, priority=request.priority, left_s=self._left_s())

    def _submit(self) -> None:
        request = self._request
        query = placement_request(request)
        trace = self._trace
        placement = trace.placement = self._cluster.place(query, self._prompt, self._excluded)
        trace.mode = self._cluster.index_mode(placement)
        trace.waited_s = self._clock.now() - request.arrived
        if not self._lifecycle.num_replacements:
            self._cluster.decisions.add(self._decision)
            self._cluster.retry_budget.on_request()
            self._admit(placement)
        submit = submit_of(request, placement, new_attempt_id(), self._left_s(), self.traceparent)
        self._lifecycle.on(Move.SUBMIT)
        self._attempt = self._cluster.open(placement, submit, request.tenant)
        self._outcome_recorded = False
        self._metrics.placements.labels("local" if placement.local_prefill else "remote").inc()
        if self._lifecycle.num_replacements:
            self._metrics.replacements.inc()
            self._metrics.fallbacks.labels("other_decode").inc()

    def _admit(self, placement: Placement) -> None:
        """Raises: OverloadedError when the request should not start."""
        request = self._request
        judgement = self._cluster.judge(placement, self._trace.waited_s, request.deadline - request.arrived)
        self._judgement = judgement
        self._metrics.admission.labels(judgement.verdict.value).inc()
        if judgement.error is not None:
            raise judgement.error

    def _left_s(self) -> float:
        left_s = self._request.deadline - self._clock.now()
        if left_s <= 0:
            raise RequestDeadlineError("the request's deadline passed before it could be placed")
        return left_s

    async def _place_again(self, error: DiptychError) -> None:
        """Prepare for another submit, or raise the error."""
        if self._trace.placement is None and isinstance(error, NoWorkerError) and await self._wait_for_worker():
            return
        fails = self._request.failure_policy == router_pb2.FAILURE_POLICY_FAIL
        placement = self._trace.placement
        self._record_outcome(error.reason)
        fails = fails or (self._judgement is not None and error is self._judgement.error)
        may = not fails and isinstance(error, _REPLACEABLE) and self._lifecycle.may_replace
        if placement is None or not may or not self._cluster.retry_budget.take():
            self._fail(error)
            raise error
        self._drop_attempt()
        self._lifecycle.on(Move.REPLACE)
        record = placement.decode.record
        self._excluded |= {(record.worker_id, record.incarnation)}
        self._trace.notes.append(f"decode {placement.decode.worker_id} {error.reason}: placed again")
        self._trace.placement = None
        log.warning("placing again", request_id=self._request.request_id, error=error.message)
        waited_until = self._clock.now() + _REPLACE_WAIT_S
        while not self._cluster.snapshot(exclude=self._excluded).decode:
            left_s = min(waited_until, self._request.deadline) - self._clock.now()
            if left_s <= 0:
                self._fail(error)
                raise error
            await self._cluster.wait_for_change(min(left_s, 0.1))

    async def _wait_for_worker(self) -> bool:
        """Whether a decode worker became usable during the grace period (see startup_grace.py)."""
        if self._cluster.snapshot(exclude=self._excluded).decode:
            return False  # there are decode workers, so the error has another reason
        while (left_s := min(self._cluster.settling.left_s(), self._request.deadline - self._clock.now())) > 0:
            await self._cluster.wait_for_change(min(left_s, 0.1))
            if self._cluster.snapshot(exclude=self._excluded).decode:
                return True
        return False

    def _fail(self, error: DiptychError) -> None:
        if not self._lifecycle.ended:
            self._lifecycle.on(Move.FAIL)
        self._decision.outcome = error.reason
        self._drop_attempt()

    # ---- relaying ------------------------------------------------------------------------------------------------

    async def _receive(self) -> decode_pb2.Event:
        assert self._attempt is not None
        left_s = self._request.deadline - self._clock.now()
        try:
            if self._attempt.has_event and left_s > 0:
                return await self._attempt.next()  # does not wait: no timer is needed
            async with asyncio.timeout(max(0.0, left_s)):
                return await self._attempt.next()
        except TimeoutError:
            raise RequestDeadlineError("the request's deadline passed") from None

    def _translate(self, event: decode_pb2.Event) -> GenerateEvent | None:
        """Raises: the failure reported by decode; IllegalMoveError."""
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self._lifecycle.on(Move.ACCEPT)
            if self._started:
                return None
            self._started = True
            return StartedEvent(self._request.request_id, self._request.model, len(self._request.prompt.token_ids))
        if kind == "tokens":
            delta, now = event.tokens, self._clock.now()
            self._trace.on_tokens(now)
            if self._lifecycle.num_tokens == len(self._request.resume_after) and self._attempt is not None:
                self._cluster.reservations.prompt_computed(self._attempt.id)
                self._trace.ttft_s = now - self._request.arrived
                self._trace.cached_tokens = event.cached_tokens
                self._metrics.predictions(self._trace)
                if self._judgement is not None:
                    self._metrics.judged(self._cluster.admission.on_first_token(self._judgement, self._trace.ttft_s))
            self._lifecycle.on_tokens(delta.offset, len(delta.token_ids), delta.choice)
            self._cluster.wait_queue.written(self._request.tenant, len(delta.token_ids))
            logprobs = tuple(logprobs_from_proto(entry) for entry in delta.logprobs)
            return TokenEvent(
                delta.offset, tuple(delta.token_ids), delta.text, delta.choice, logprobs, event.cached_tokens
            )
        if kind == "prompt_logprobs":
            entries = event.prompt_logprobs
            known = tuple(logprobs_from_proto(entry) for entry in entries.logprobs)
            return PromptLogprobsEvent(entries.first_token, known)
        if kind == "choice_finished":
            ended = event.choice_finished
            return ChoiceFinishedEvent(
                ended.choice,
                finish_reason_from_proto(ended.finish_reason),
                ended.stop_string,
                ended.stop_token_id if ended.HasField("stop_token_id") else None,
            )
        if event.end.HasField("failure"):
            error = from_failure(event.end.failure)
            self._record_outcome(error.reason, event.end.prefill_faults)
            raise error
        self._lifecycle.on(Move.END)
        finished = self._finished(event.end.finished)
        self._record_outcome("", event.end.prefill_faults)
        self._metrics.count_deviations(self._trace, [fault.reason for fault in event.end.prefill_faults])
        self._drop_attempt()
        return finished

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
        trace.facts, trace.cached_tokens = message.explanation, usage.cached_tokens
        self._decision.outcome = "finished"
        trace.total_s = self._clock.now() - self._request.arrived
        if self._judgement is not None and usage.completion_tokens > 1 and sampling.num_choices == 1:
            answer_s = trace.total_s - trace.ttft_s
            self._cluster.admission.on_pace(self._judgement, answer_s / (usage.completion_tokens - 1))
        self._metrics.split(trace, trace.total_s)
        self._cluster.on_computed(message.explanation.prefill, usage.prompt_tokens - usage.cached_tokens)
        return FinishedEvent(
            reason=finish_reason_from_proto(message.finish_reason),
            usage=UsageInfo(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            stop_string=message.stop_string,
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
            explanation=trace.explanation() if self._request.explain else None,
        )
