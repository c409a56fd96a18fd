"""Placement tickets: clients stream directly from decode workers, and the router is not on the token path.

    grant -> unredeemed (doubtful: counts for FRESH_S when workers are compared, never against others' turns)
               |-- redeemed --> held (pending on its workers) --first token--> prompt computed --end--> released
               |-- nothing for FRESH_S, or the client's stream ended --> set aside (not counted) -- redeemed --> held
               |-- nothing for UNREDEEMED_S --> lapsed
    redeemed -- no end LATE_S after decode must have ended it --> lapsed
    any -- the worker's stream broke --> set aside -- any status --> as before
    any -- the worker's incarnation ended, or its stream was not opened again for SILENT_S --> lapsed

The decode worker reports a ticket's status (the client never does) on the router's stream to it, and on the next one once
more, if that breaks: the clients' streams go on meanwhile. The time that a ticket
allows begins when decode redeems it: until then its deadline has no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from diptych.common.clock import Clock
from diptych.common.errors import (
    DiptychError,
    InvalidRequestError,
    NoWorkerError,
    RequestCancelledError,
    RequestDeadlineError,
)
from diptych.common.ids import new_attempt_id
from diptych.common.store.adapters import ChosenAdapter
from diptych.common.ticket import seal
from diptych.router.cluster.cluster import Cluster
from diptych.router.fairness.admission import AdmissionDecision, Verdict
from diptych.router.observe.access_log import Access
from diptych.router.observe.adapter_metrics import FINISHED
from diptych.router.observe.explain import RequestTrace
from diptych.router.observe.metrics import RouterMetrics
from diptych.router.placement.placer import Incarnation, PromptBlocks
from diptych.router.placement.recent import Decision
from diptych.router.placement.reservations import Reservation
from diptych.router.placement.types import Placement
from diptych.router.requests.messages import UsageInfo, ValidatedRequest
from diptych.router.requests.outcomes import record_outcome
from diptych.router.requests.submission import adapter_need, claims_of, placement_request, prompt_so_far
from diptych.rpc.convert import finish_reason_from_proto
from diptych.rpc.v1 import decode_pb2, router_pb2

UNREDEEMED_S = 65.0
"""Longer than any worker accepts a ticket, with the time that its status takes."""
LATE_S = 5.0
"""Of a ticket's last status."""
SILENT_S = 10.0
"""Of a worker whose stream broke."""
FRESH_S = 0.5
"""A used ticket is reported within a round trip to the client and one to the worker."""
MAX_UNREDEEMED = 2048
"""Of one tenant."""
FALLBACK_REASONS = frozenset(
    {"TICKET_REFUSED", "STALE_REFERENCE", "WORKER_LOST", "WORKER_DRAINED", "NO_WORKER", "OVERLOADED"}
)
"""Reasons after which the client sends the request, or the rest of it, to the router: that request is counted, not the
ticket."""
RETRIES_AT_ROUTER = FALLBACK_REASONS - {"OVERLOADED"}
"""The same without a ticket: a request rejected for overload would be rejected again."""
_SWEEP_S = 0.25


Spend = Callable[[str, int], None]
"""(tenant, tokens)"""


@dataclass(slots=True)
class _Chosen:
    """Placed and held."""

    request: ValidatedRequest
    placement: Placement
    judgement: AdmissionDecision
    incarnation: Incarnation
    endpoint: decode_pb2.DirectEndpoint
    attempt: str
    trace: RequestTrace


@dataclass(slots=True)
class _Grant:
    incarnation: Incarnation
    decision: Decision
    spend: Spend
    tenant: str
    judgement: AdmissionDecision
    until: float
    """When it lapses."""
    allowed_s: float
    """Seconds for which decode runs it, at most."""
    redeemed: bool = False
    has_token: bool = False
    """Its first token was reported."""
    aside: Reservation | None = None
    """The reservation to restore with the ticket's next status."""
    num_choices: int = 1
    model: str = ""
    adapter: ChosenAdapter | None = None
    end: tuple[str, UsageInfo] | None = None
    """Finish reason and usage of a successful answer."""


class Lookaside:
    """Grants tickets and follows their status. `key`: of the cluster's tickets."""

    def __init__(self, cluster: Cluster, key: bytes, metrics: RouterMetrics, clock: Clock) -> None:
        self._cluster = cluster
        self._key = key
        self._metrics = metrics
        self._clock = clock
        self._granted, self._withheld = metrics.tickets.labels("granted"), metrics.tickets.labels("withheld")
        self._outcomes = {name: metrics.tickets.labels(name) for name in ("finished", "failed", "lapsed")}
        self._admission_counters = {verdict: metrics.admission.labels(verdict.value) for verdict in Verdict}
        self._placements = {local: metrics.placements.labels("local" if local else "remote") for local in (False, True)}
        self._grants: dict[str, _Grant] = {}
        self._fresh: dict[str, float] = {}
        """Unredeemed attempts that are not set aside: expiry, oldest first."""
        self._unredeemed: dict[str, int] = {}
        """By tenant."""
        self._silent: dict[Incarnation, float] = {}
        """Workers of granted tickets whose stream is down: since when."""
        cluster.on_ticket_status = self.on_ticket_status

    def __len__(self) -> int:
        """Tickets whose end is not known yet."""
        return len(self._grants)

    def grant(self, requests: Sequence[ValidatedRequest], spend: Spend) -> list[router_pb2.Placed | DiptychError]:
        """For each request a ticket for its worker, where it is held pending, or the reason for none.

        NoWorkerError, also when the worker does not serve clients, others wait for their turn, or the tenant has too
        many unused tickets; OverloadedError when the request should not start; RequestDeadlineError. Requests are
        placed one after the other, each with the reservations of those before, but each step is done for all: with warm
        caches this halves the time.

        Args:
            spend: called with the answers' tokens, once they are known.
        """
        now = self._clock.now()
        prompts = [PromptBlocks(prompt_so_far(request)) for request in requests]
        for prompt in prompts:
            self._cluster.name_blocks(prompt)
        chosen = [self._choose(*one, now) for one in zip(requests, prompts, strict=True)]
        good = [one for one in chosen if isinstance(one, _Chosen)]
        self._withheld.inc(sum(isinstance(one, NoWorkerError) for one in chosen))
        for one in good:
            self._remember(one, now, spend)
        claims = [
            claims_of(one.request, one.placement, one.attempt, one.request.deadline - now, one.endpoint.ticket_epoch)
            for one in good
        ]
        tickets = [seal(self._key, claim) for claim in claims]
        placed = iter([_placed(one, ticket) for one, ticket in zip(good, tickets, strict=True)])
        return [next(placed) if isinstance(one, _Chosen) else one for one in chosen]

    def _choose(self, request: ValidatedRequest, prompt: PromptBlocks, now: float) -> _Chosen | DiptychError:
        cluster = self._cluster
        if request.deadline <= now:
            return RequestDeadlineError("the request's deadline passed before it could be placed")
        unredeemed = self._unredeemed.get(request.tenant, 0)
        if unredeemed >= MAX_UNREDEEMED:
            return NoWorkerError(f"no ticket: {unredeemed} of yours are unused", retry_after_s=1.0)
        num_tokens, most = len(request.prompt.token_ids), request.sampling.max_tokens
        limit = cluster.admission.limit(request.arrived, request.deadline, most)
        if not cluster.wait_queue.may_pass(request.tenant, num_tokens, limit, doubtful=True):
            return NoWorkerError("no ticket: requests wait for their turn at the router")
        if (need := adapter_need(request)) is not None and not cluster.adapter_turns.may_pass(need):
            return NoWorkerError("no ticket: the request's adapter waits for a slot")
        try:
            placement = cluster.place(placement_request(request), prompt)
        except NoWorkerError as error:
            return error
        judgement = AdmissionDecision(Verdict.ADMITTED, 0.0, 0.0, 0.0, request.deadline - request.arrived)
        if limit is not None:
            limit.certain = cluster.certain_if_late(prompt, limit.at)
            judgement = cluster.wait_queue.judge(request.tenant, num_tokens, limit, request.arrived)
            judgement = cluster.judge_pace(judgement, placement)
        record = placement.decode.record
        incarnation = (record.worker_id, record.incarnation)
        endpoint = cluster.direct_endpoint(incarnation)
        if endpoint is None and judgement.error is None:  # the router will decide about it
            return NoWorkerError(f"{record.worker_id} takes requests from routers only")
        self._admission_counters[judgement.verdict].inc()
        if judgement.error is not None or endpoint is None:
            return judgement.error or NoWorkerError(f"{record.worker_id} takes requests from routers only")
        attempt = new_attempt_id()
        adapter = request.prompt.adapter
        cluster.hold(placement, attempt, request.tenant, num_tokens, adapter=adapter, doubtful=True)
        cluster.placer.begin(request.request_id, prompt, most)
        self._unredeemed[request.tenant] = unredeemed + 1
        return _Chosen(
            request, placement, judgement, incarnation, endpoint, attempt,
            RequestTrace(request.request_id, placement, retention=request.retention, adapter=request.adapter),
        )  # fmt: skip

    def _remember(self, one: _Chosen, now: float, spend: Spend) -> None:
        request, placement, trace = one.request, one.placement, one.trace
        trace.mode, trace.waited_s = self._cluster.index_mode(placement), now - request.arrived
        decision = Decision(
            request_id=request.request_id,
            label=request.label,
            prompt_tokens=len(request.prompt.token_ids),
            arrived=request.arrived,
            owner=request.owner,
            trace=trace,
        )
        self._cluster.decisions.add(decision)
        self._grants[one.attempt] = _Grant(
            incarnation=one.incarnation,
            decision=decision,
            spend=spend,
            tenant=request.tenant,
            judgement=one.judgement,
            until=now + UNREDEEMED_S,
            allowed_s=request.deadline - now,
            num_choices=request.sampling.num_choices,
            model=request.shown_model,
            adapter=request.adapter,
        )
        self._fresh[one.attempt] = now + FRESH_S
        self._granted.inc()
        self._placements[placement.local_prefill].inc()

    # ---- redeemed tickets ----------------------------------------------------------------------------------------

    def on_ticket_status(self, status: decode_pb2.TicketStatus) -> None:
        """The status of an attempt from a decode worker; attempts of other routers are ignored."""
        grant = self._grants.get(status.attempt)
        if grant is None:
            return
        if not grant.redeemed:
            self._on_redeemed(status.attempt, grant)
        elif grant.aside is not None:
            self._hold_again(status.attempt, grant, grant.aside)
        if status.first_token and not grant.has_token:
            self._on_first_token(status.attempt, grant, status.cached_tokens)
        if status.ended:
            self._on_end(grant, status)
            self._release(status.attempt, "failed" if status.reason else "finished", status.reason or "finished")

    def _on_redeemed(self, attempt: str, grant: _Grant) -> None:
        """It was redeemed: from now on it is an ordinary request."""
        self._count_redeemed(attempt, grant)
        grant.redeemed = True
        grant.until = self._clock.now() + grant.allowed_s + LATE_S
        if grant.aside is not None:
            self._hold_again(attempt, grant, grant.aside)
        else:
            self._cluster.reservations.settle(attempt)

    def _hold_again(self, attempt: str, grant: _Grant, aside: Reservation) -> None:
        self._cluster.reservations.reserve(attempt, aside)
        grant.aside = None
        if grant.has_token:
            self._cluster.reservations.prompt_computed(attempt)

    def _count_redeemed(self, attempt: str, grant: _Grant) -> None:
        self._fresh.pop(attempt, None)
        self._unredeemed[grant.tenant] -= 1
        if not self._unredeemed[grant.tenant]:
            del self._unredeemed[grant.tenant]

    def _on_first_token(self, attempt: str, grant: _Grant, cached_tokens: int) -> None:
        now, trace = self._clock.now(), grant.decision.trace
        grant.has_token = True
        trace.ttft_s, trace.cached_tokens = now - grant.decision.arrived, cached_tokens
        self._metrics.first_token(trace.ttft_s, grant.tenant, now)
        self._metrics.computed(grant.decision.prompt_tokens, cached_tokens, grant.tenant, now)
        self._metrics.predictions(trace)
        self._metrics.judged(self._cluster.admission.on_first_token(grant.judgement, trace.ttft_s))
        num_tokens = grant.decision.prompt_tokens - cached_tokens
        self._cluster.on_first_token(trace.placement, num_tokens, trace.ttft_s - trace.waited_s)
        self._cluster.reservations.prompt_computed(attempt)

    def _on_end(self, grant: _Grant, status: decode_pb2.TicketStatus) -> None:
        cluster, metrics, trace = self._cluster, self._metrics, grant.decision.trace
        if status.completion_tokens:
            grant.spend(grant.tenant, status.completion_tokens)
            cluster.wait_queue.written(grant.tenant, status.completion_tokens)
            metrics.written(status.completion_tokens, grant.tenant)
        now = self._clock.now()
        self._paced(grant, status.completion_tokens, now)
        if not status.HasField("finished"):
            if trace.placement is not None:
                record_outcome(cluster, trace.placement, reason=status.reason, faults=status.prefill_faults)
            self._unfinished(grant, status.completion_tokens)
            if status.reason == RequestCancelledError.reason:
                metrics.refused("CLIENT_LEFT", grant.tenant)
                metrics.adapters.ended(grant.adapter, "CLIENT_LEFT")
            elif status.reason and status.reason not in FALLBACK_REASONS:
                metrics.refused(status.reason, grant.tenant)
                metrics.adapters.ended(grant.adapter, status.reason)
                metrics.live.failed(now)
            return
        finished, counts = status.finished, status.finished.usage
        usage = UsageInfo(counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens)
        trace.on_facts(finished.explanation)
        trace.cached_tokens = usage.cached_tokens
        if trace.placement is not None:
            prefill = finished.explanation.prefill
            record_outcome(cluster, trace.placement, reason="", prefill=prefill, faults=status.prefill_faults)
        total_s = trace.total_s = now - grant.decision.arrived
        reason = _finish_reason(finished.finish_reason)
        grant.end = (reason, usage)
        metrics.count_deviations(trace, [fault.reason for fault in status.prefill_faults])
        metrics.requests.inc()
        metrics.answered(reason, grant.tenant, usage, total_s, finished.explanation.kv_bytes, now)
        metrics.adapters.ended(grant.adapter, FINISHED, usage.prompt_tokens, usage.completion_tokens)
        metrics.split(trace, total_s)
        if grant.num_choices == 1 and trace.ttft_s > 0:
            cluster.admission.on_answer(grant.judgement, usage.completion_tokens, total_s - trace.ttft_s)
        cluster.on_computed(finished.explanation.prefill, usage.prompt_tokens - usage.cached_tokens)

    def _unfinished(self, grant: _Grant, num_tokens: int) -> None:
        """It was not answered. `num_tokens`: sent to the client."""
        if grant.decision.trace.ttft_s > 0:
            self._metrics.unfinished(grant.decision.prompt_tokens, num_tokens)

    def _paced(self, grant: _Grant, num_tokens: int, now: float) -> None:
        """Count the tokens by their mean interval: the router did not see them one by one."""
        first = min(grant.num_choices, num_tokens)
        more = num_tokens - first
        self._metrics.live.tokens(first, now)
        ttft_s = grant.decision.trace.ttft_s
        if more and ttft_s > 0:
            self._metrics.pace((now - grant.decision.arrived - ttft_s) * grant.num_choices / more, more, now)

    # ---- unredeemed tickets --------------------------------------------------------------------------------------

    def left(self, attempts: Iterable[str]) -> None:
        """The client's stream with these tickets has ended: unredeemed ones probably will not be used."""
        for attempt in attempts:
            if attempt in self._fresh:
                self._set_aside(attempt, self._grants[attempt])

    def _set_aside(self, attempt: str, grant: _Grant) -> None:
        self._fresh.pop(attempt, None)
        if grant.aside is None:
            grant.aside = self._cluster.reservations.release(attempt)

    def sweep(self) -> None:
        """Release tickets without a further status."""
        now = self._clock.now()
        while self._fresh:
            attempt, until = next(iter(self._fresh.items()))
            if until > now:
                break
            self._set_aside(attempt, self._grants[attempt])
        gone = self._gone(now)
        for attempt, grant in list(self._grants.items()):
            if now > grant.until or grant.incarnation in gone:
                self._unfinished(grant, 0)
                self._release(attempt, "lapsed", "LAPSED")
            elif grant.incarnation in self._silent:
                self._set_aside(attempt, grant)

    def _gone(self, now: float) -> set[Incarnation]:
        """The workers of granted tickets that will report nothing more."""
        cluster = self._cluster
        down = {i for i in {grant.incarnation for grant in self._grants.values()} if cluster.direct_endpoint(i) is None}
        self._silent = {incarnation: self._silent.get(incarnation, now) for incarnation in down}
        return {i for i, since in self._silent.items() if now - since > SILENT_S or not cluster.is_member(i)}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    def _release(self, attempt: str, outcome: str, reason: str) -> None:
        grant = self._grants.pop(attempt)
        if not grant.redeemed:
            self._count_redeemed(attempt, grant)
        grant.decision.outcome = reason
        self._log(grant, reason)
        self._outcomes[outcome].inc()
        self._cluster.reservations.release(attempt)
        self._cluster.placer.end(grant.decision.request_id, self._clock.now())
        grant.decision.trace.settle()

    def _log(self, grant: _Grant, reason: str) -> None:
        decision, end = grant.decision, grant.end
        access = Access(
            "lookaside", "ticket", began=decision.arrived, request_id=decision.request_id, label=decision.label
        )
        access.tenant, access.model, access.prompt_tokens = grant.tenant, grant.model, decision.prompt_tokens
        access.started = grant.redeemed
        access.placed(decision.trace)
        if end is not None:
            access.finished(end[0], end[1].completion_tokens, end[1].cached_tokens)
        elif reason == "finished":  # an end without an answer: its client disconnected
            access.cancelled = True
        else:
            access.fail(reason)
        access.write(self._clock.now())


def _placed(one: _Chosen, ticket: bytes) -> router_pb2.Placed:
    request = one.request
    return router_pb2.Placed(
        request_id=request.request_id,
        model=request.model,
        prompt_tokens=len(request.prompt.token_ids),
        attempt=one.attempt,
        address=one.endpoint.address,
        tls=one.endpoint.tls,
        ticket=ticket,
        seed=request.sampling.seed,
        explanation=one.trace.explanation() if request.explain else None,
        adapter="" if request.adapter is None else request.adapter.name,
        adapter_version=0 if request.adapter is None else request.adapter.version.number,
    )


def _finish_reason(number: int) -> str:
    """Name in metrics."""
    try:
        return finish_reason_from_proto(number).value
    except InvalidRequestError:  # of a newer worker
        return "unknown"
