"""Placement tickets: a client streams from the decode worker itself, and the router is off the token path.

    grant -> unheard (doubtful: counts for FRESH_S where workers are compared, never against others' turns)
               |-- taken --> held (pending on its workers) --first token--> prompt computed --end--> released
               |-- nothing for FRESH_S, the client's stream ended --> set aside (counts nowhere) -- taken --> held
    any -- nothing heard for UNHEARD_S, the worker's life ended, the deadline passed --> lapsed

What became of a ticket is told by the decode worker (never by the client) on the stream that this router has to it anyway.
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
from diptych.common.ticket import seal
from diptych.router.cluster.cluster import Cluster
from diptych.router.fairness.admission import AdmissionDecision, Verdict
from diptych.router.observe.access_log import Access
from diptych.router.observe.explain import RequestTrace
from diptych.router.observe.metrics import RouterMetrics
from diptych.router.placement.placer import Incarnation, PromptBlocks
from diptych.router.placement.recent import Decision
from diptych.router.placement.reservations import Reservation
from diptych.router.placement.types import Placement
from diptych.router.requests.messages import UsageInfo, ValidatedRequest
from diptych.router.requests.outcomes import record_outcome
from diptych.router.requests.submission import claims_of, placement_request
from diptych.rpc.convert import finish_reason_from_proto
from diptych.rpc.v1 import decode_pb2, router_pb2

UNHEARD_S = 60.0
"""Longer than any worker takes a ticket."""
FRESH_S = 0.5
"""A ticket that is used is heard of within a round trip to the client and one to the worker."""
MAX_UNHEARD = 2048
"""Tickets of one tenant."""
COMES_AGAIN = frozenset({"TICKET_REFUSED", "STALE_REFERENCE", "WORKER_LOST", "NO_WORKER", "OVERLOADED"})
"""Reasons for which the client asks the router for the answer, or the rest of it: that request is counted, not the ticket."""
ASKS_US_INSTEAD = COMES_AGAIN - {"OVERLOADED"}
"""The same, where there is no ticket: what was refused as too much would be refused again."""
_SWEEP_S = 0.25


Spend = Callable[[str, int], None]
"""(tenant, tokens)"""


@dataclass(slots=True)
class _Chosen:
    """Placed and held."""

    request: ValidatedRequest
    placement: Placement
    judgement: AdmissionDecision
    life: Incarnation
    door: decode_pb2.DirectEndpoint
    attempt: str
    story: RequestTrace


@dataclass(slots=True)
class _Grant:
    life: Incarnation
    decision: Decision
    spend: Spend
    tenant: str
    judgement: AdmissionDecision
    until: float
    """When it is released whatever happens: until its first token the ticket's end, then the deadline."""
    deadline: float
    heard: bool = False
    aside: Reservation | None = None
    """What is to count again if it is taken after all."""
    num_choices: int = 1
    model: str = ""
    end: tuple[str, UsageInfo] | None = None
    """Why the answer ended well, and its usage."""


class Lookaside:
    """Args:
    key: of the cluster's tickets.
    """

    def __init__(self, cluster: Cluster, key: bytes, metrics: RouterMetrics, clock: Clock) -> None:
        self._cluster = cluster
        self._key = key
        self._metrics = metrics
        self._clock = clock
        self._granted = metrics.tickets.labels("granted")
        self._outcomes = {name: metrics.tickets.labels(name) for name in ("finished", "failed", "lapsed")}
        self._judged = {verdict: metrics.admission.labels(verdict.value) for verdict in Verdict}
        self._placements = {local: metrics.placements.labels("local" if local else "remote") for local in (False, True)}
        self._grants: dict[str, _Grant] = {}
        self._fresh: dict[str, float] = {}
        """Attempts that are unheard and not set aside yet: until when; oldest first."""
        self._unheard: dict[str, int] = {}
        """By tenant."""
        cluster.on_ticket_news = self.on_news

    def __len__(self) -> int:
        """Tickets whose end is not known yet."""
        return len(self._grants)

    def grant(self, requests: Sequence[ValidatedRequest], spend: Spend) -> list[router_pb2.Placed | DiptychError]:
        """For each, a ticket for the worker that it belongs on, where it is held pending; or why there is none: NoWorkerError,
        also when the chosen worker lets no clients in, others wait for their turn or too many tickets of the tenant are not used;
        OverloadedError when the request is not worth starting; RequestDeadlineError.

        Placed one after the other, each with what the ones before it hold; but step by step for all of them, so that each step's
        code and data are at hand: it halves the time.

        Args:
            spend: called with the answers' tokens, once they are known.
        """
        now = self._clock.now()
        prompts = [PromptBlocks(request.prompt) for request in requests]
        for prompt in prompts:
            self._cluster.name_blocks(prompt)
        chosen = [self._choose(*one, now) for one in zip(requests, prompts, strict=True)]
        good = [one for one in chosen if isinstance(one, _Chosen)]
        for one in good:
            self._remember(one, now, spend)
        claims = [
            claims_of(one.request, one.placement, one.attempt, one.request.deadline - now, one.door.ticket_epoch)
            for one in good
        ]
        tickets = [seal(self._key, claim) for claim in claims]
        placed = iter([_placed(one, ticket) for one, ticket in zip(good, tickets, strict=True)])
        return [next(placed) if isinstance(one, _Chosen) else one for one in chosen]

    def _choose(self, request: ValidatedRequest, prompt: PromptBlocks, now: float) -> _Chosen | DiptychError:
        cluster = self._cluster
        if request.deadline <= now:
            return RequestDeadlineError("the request's deadline passed before it could be placed")
        unheard = self._unheard.get(request.tenant, 0)
        if unheard >= MAX_UNHEARD:
            return NoWorkerError(f"no ticket: {unheard} of yours are not used yet", retry_after_s=1.0)
        if not cluster.turnstile.may_pass(request.tenant, len(request.prompt.token_ids), doubtful=True):
            return NoWorkerError("no ticket: requests wait for their turn at the router")
        try:
            placement = cluster.place(placement_request(request), prompt)
        except NoWorkerError as error:
            return error
        judgement = cluster.judge(placement, now - request.arrived, request.deadline - request.arrived)
        record = placement.decode.record
        life = (record.worker_id, record.incarnation)
        door = cluster.direct_endpoint(life)
        if door is None and judgement.error is None:  # it is judged where it is asked for then
            return NoWorkerError(f"{record.worker_id} takes requests from routers only")
        self._judged[judgement.verdict].inc()
        if judgement.error is not None or door is None:
            return judgement.error or NoWorkerError(f"{record.worker_id} takes requests from routers only")
        attempt = new_attempt_id()
        cluster.hold(placement, attempt, request.tenant, len(request.prompt.token_ids), doubtful=True)
        self._unheard[request.tenant] = unheard + 1
        return _Chosen(request, placement, judgement, life, door, attempt, RequestTrace(request.request_id, placement))

    def _remember(self, one: _Chosen, now: float, spend: Spend) -> None:
        request, placement, story = one.request, one.placement, one.story
        story.mode, story.waited_s = self._cluster.index_mode(placement), now - request.arrived
        decision = Decision(
            request_id=request.request_id,
            label=request.label,
            prompt_tokens=len(request.prompt.token_ids),
            arrived=request.arrived,
            owner=request.owner,
            story=story,
        )
        self._cluster.decisions.add(decision)
        self._grants[one.attempt] = _Grant(
            life=one.life,
            decision=decision,
            spend=spend,
            tenant=request.tenant,
            judgement=one.judgement,
            until=min(request.deadline, now + UNHEARD_S),
            deadline=request.deadline,
            num_choices=request.sampling.num_choices,
            model=request.model,
        )
        self._fresh[one.attempt] = now + FRESH_S
        self._granted.inc()
        self._placements[placement.local_prefill].inc()

    # ---- what is heard -------------------------------------------------------------------------------------------

    def on_news(self, news: decode_pb2.TicketStatus) -> None:
        """What a decode worker tells of an attempt; of another router's it means nothing here."""
        grant = self._grants.get(news.attempt)
        if grant is None:
            return
        if not grant.heard:
            self._hear(news.attempt, grant)
        if news.first_token:
            self._on_first_token(news.attempt, grant, news.cached_tokens)
        if news.ended:
            self._on_end(grant, news)
            self._release(news.attempt, "failed" if news.reason else "finished", news.reason or "finished")

    def _hear(self, attempt: str, grant: _Grant) -> None:
        """It was taken: a request like any other from here on."""
        self._no_longer_unheard(attempt, grant)
        grant.heard = True
        reservations = self._cluster.reservations
        if grant.aside is not None:
            reservations.reserve(attempt, grant.aside)
            grant.aside = None
        else:
            reservations.settle(attempt)

    def _no_longer_unheard(self, attempt: str, grant: _Grant) -> None:
        self._fresh.pop(attempt, None)
        self._unheard[grant.tenant] -= 1
        if not self._unheard[grant.tenant]:
            del self._unheard[grant.tenant]

    def _on_first_token(self, attempt: str, grant: _Grant, cached_tokens: int) -> None:
        now, story = self._clock.now(), grant.decision.story
        grant.until = grant.deadline
        story.ttft_s, story.cached_tokens = now - grant.decision.arrived, cached_tokens
        self._metrics.first_token(story.ttft_s, grant.tenant, now)
        self._metrics.computed(grant.decision.prompt_tokens, cached_tokens, grant.tenant, now)
        self._metrics.predictions(story)
        self._metrics.judged(self._cluster.admission.on_first_token(grant.judgement, story.ttft_s))
        self._cluster.reservations.prompt_computed(attempt)

    def _on_end(self, grant: _Grant, news: decode_pb2.TicketStatus) -> None:
        cluster, metrics, story = self._cluster, self._metrics, grant.decision.story
        if news.completion_tokens:
            grant.spend(grant.tenant, news.completion_tokens)
            cluster.turnstile.written(grant.tenant, news.completion_tokens)
            metrics.written(news.completion_tokens, grant.tenant)
        now = self._clock.now()
        between_s = self._paced(grant, news.completion_tokens, now)
        if not news.HasField("finished"):
            if story.placement is not None:
                record_outcome(cluster, story.placement, reason=news.reason, faults=news.prefill_faults)
            self._unfinished(grant, news.completion_tokens)
            if news.reason == RequestCancelledError.reason:
                metrics.refused("CLIENT_LEFT", grant.tenant)
            elif news.reason and news.reason not in COMES_AGAIN:
                metrics.refused(news.reason, grant.tenant)
                metrics.live.failed(now)
            return
        finished, told = news.finished, news.finished.usage
        usage = UsageInfo(told.prompt_tokens, told.completion_tokens, told.cached_tokens)
        story.facts, story.cached_tokens = finished.explanation, usage.cached_tokens
        if story.placement is not None:
            prefill = finished.explanation.prefill
            record_outcome(cluster, story.placement, reason="", prefill=prefill, faults=news.prefill_faults)
        total_s = now - grant.decision.arrived
        reason = _finish_reason(finished.finish_reason)
        grant.end = (reason, usage)
        metrics.went(story, [fault.reason for fault in news.prefill_faults])
        metrics.requests.inc()
        metrics.answered(reason, grant.tenant, usage, total_s, finished.explanation.kv_bytes, now)
        metrics.split(story, total_s)
        if between_s is not None and grant.num_choices == 1:
            cluster.admission.on_pace(grant.judgement, between_s)
        cluster.on_computed(finished.explanation.prefill, usage.prompt_tokens - usage.cached_tokens)

    def _unfinished(self, grant: _Grant, num_tokens: int) -> None:
        """It was not answered. `num_tokens`: that the client was sent."""
        if grant.decision.story.ttft_s > 0:
            self._metrics.unfinished(grant.decision.prompt_tokens, num_tokens)

    def _paced(self, grant: _Grant, num_tokens: int, now: float) -> float | None:
        """The tokens' mean distance, as which they count: the router did not see them one by one. None: there is none."""
        first = min(grant.num_choices, num_tokens)
        more = num_tokens - first
        self._metrics.live.tokens(first, now)
        ttft_s = grant.decision.story.ttft_s
        if not more or ttft_s <= 0:
            return None
        between_s = (now - grant.decision.arrived - ttft_s) * grant.num_choices / more
        self._metrics.pace(between_s, more, now)
        return between_s

    # ---- what is not heard ---------------------------------------------------------------------------------------

    def left(self, attempts: Iterable[str]) -> None:
        """The client's stream over which these were granted has ended: what was not taken yet probably never is."""
        for attempt in attempts:
            if attempt in self._fresh:
                self._set_aside(attempt)

    def _set_aside(self, attempt: str) -> None:
        del self._fresh[attempt]
        self._grants[attempt].aside = self._cluster.reservations.release(attempt)

    def sweep(self) -> None:
        """Release what nobody will tell the end of."""
        now = self._clock.now()
        while self._fresh:
            attempt, until = next(iter(self._fresh.items()))
            if until > now:
                break
            self._set_aside(attempt)
        gone = {life for life in self._lives() if self._cluster.direct_endpoint(life) is None}
        for attempt, grant in list(self._grants.items()):
            if now > grant.until or grant.life in gone:
                self._unfinished(grant, 0)
                self._release(attempt, "lapsed", "LAPSED")

    def _lives(self) -> set[Incarnation]:
        return {grant.life for grant in self._grants.values()}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    def _release(self, attempt: str, outcome: str, told: str) -> None:
        grant = self._grants.pop(attempt)
        if not grant.heard:
            self._no_longer_unheard(attempt, grant)
        grant.decision.outcome = told
        self._log(grant, told)
        self._outcomes[outcome].inc()
        self._cluster.reservations.release(attempt)

    def _log(self, grant: _Grant, told: str) -> None:
        decision, end = grant.decision, grant.end
        access = Access(
            "lookaside", "ticket", began=decision.arrived, request_id=decision.request_id, label=decision.label
        )
        access.tenant, access.model, access.prompt_tokens = grant.tenant, grant.model, decision.prompt_tokens
        access.started = grant.heard
        access.placed(decision.story)
        if end is not None:
            access.finished(end[0], end[1].completion_tokens, end[1].cached_tokens)
        elif told == "finished":  # an end without an answer: its client went away
            access.cancelled = True
        else:
            access.fail(told)
        access.write(self._clock.now())


def _placed(one: _Chosen, ticket: bytes) -> router_pb2.Placed:
    request = one.request
    return router_pb2.Placed(
        request_id=request.request_id,
        model=request.model,
        prompt_tokens=len(request.prompt.token_ids),
        attempt=one.attempt,
        address=one.door.address,
        tls=one.door.tls,
        ticket=ticket,
        seed=request.sampling.seed,
        explanation=one.story.tell() if request.explain else None,
    )


def _finish_reason(number: int) -> str:
    """As metrics name it."""
    try:
        return finish_reason_from_proto(number).value
    except InvalidRequestError:  # of a newer worker
        return "unknown"
