"""Placement tickets: a client streams from the decode worker itself, and the router is off the token path.

    grant -> held (pending on its workers) --first token--> prompt computed --end--> released
                 |-- nothing heard for UNHEARD_S, the worker's life ended, the deadline passed --> released

What became of a ticket is told by the decode worker (never by the client) on the stream that this router has to it anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from diptych.common.clock import Clock
from diptych.common.errors import NoWorkerError, RequestDeadlineError
from diptych.common.ids import new_attempt_id
from diptych.common.ticket import seal
from diptych.router.admission import Judgement, Verdict
from diptych.router.cluster import Cluster, Life, Prompt
from diptych.router.decisions import Decision
from diptych.router.explain import Story
from diptych.router.messages import PreparedRequest
from diptych.router.metrics import RouterMetrics
from diptych.router.submission import submit_of, wish_of
from diptych.rpc.v1 import decode_pb2, router_pb2

UNHEARD_S = 60.0
"""Longer than any worker takes a ticket."""
_SWEEP_S = 0.25


@dataclass(slots=True)
class _Grant:
    life: Life
    story: Story
    decision: Decision
    spend: Callable[[int], None]
    tenant: str
    judgement: Judgement
    arrived: float
    until: float
    """When it is released whatever happens: until its first token the ticket's end, then the deadline."""
    deadline: float


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
        self._judged = {verdict.value: metrics.admission.labels(verdict.value) for verdict in Verdict}
        self._grants: dict[str, _Grant] = {}
        cluster.on_ticket_news = self.on_news

    def __len__(self) -> int:
        """Tickets whose end is not known yet."""
        return len(self._grants)

    def grant(self, request: PreparedRequest, spend: Callable[[int], None]) -> router_pb2.Placed:
        """A ticket for the worker that this request belongs on, which is held pending there.

        Args:
            spend: called with the answer's tokens, once they are known.
        Raises: NoWorkerError, also when the chosen worker lets no clients in or others wait for their turn; OverloadedError
            when the request is not worth starting; RequestDeadlineError.
        """
        cluster, now = self._cluster, self._clock.now()
        if request.deadline <= now:
            raise RequestDeadlineError("the request's deadline passed before it could be placed")
        if not cluster.turnstile.may_pass():
            raise NoWorkerError("no ticket: requests wait for their turn at the router")
        placement = cluster.place(wish_of(request), Prompt(request.prompt_token_ids, request.cache_salt))
        judgement = cluster.judge(placement, now - request.arrived, request.deadline - request.arrived)
        self._judged[judgement.verdict.value].inc()
        if judgement.error is not None:
            raise judgement.error
        record = placement.decode.record
        door = cluster.client_door((record.worker_id, record.incarnation))
        if door is None:
            raise NoWorkerError(f"{record.worker_id} takes requests from routers only")
        attempt = new_attempt_id()
        submit = submit_of(request, placement, attempt, request.deadline - now, request.traceparent)
        claims = decode_pb2.TicketClaims(submit=submit, epoch=door.ticket_epoch)
        cluster.hold(placement, attempt, len(request.prompt_token_ids))
        story = Story(request.request_id, placement, cluster.index_mode(placement), now - request.arrived)
        decision = Decision(
            request_id=request.request_id,
            label=request.label,
            prompt_tokens=len(request.prompt_token_ids),
            arrived=request.arrived,
            owner=request.owner,
            story=story,
        )
        cluster.decisions.add(decision)
        self._grants[attempt] = _Grant(
            life=(record.worker_id, record.incarnation),
            story=story,
            decision=decision,
            spend=spend,
            tenant=request.tenant,
            judgement=judgement,
            arrived=request.arrived,
            until=min(request.deadline, now + UNHEARD_S),
            deadline=request.deadline,
        )
        self._granted.inc()
        return router_pb2.Placed(
            request_id=request.request_id,
            model=request.model,
            prompt_tokens=len(request.prompt_token_ids),
            attempt=attempt,
            address=door.address,
            tls=door.tls,
            ticket=seal(self._key, claims.SerializeToString()),
            seed=request.sampling.seed,
            explanation=story.tell() if request.explain else None,
        )

    def on_news(self, news: decode_pb2.TicketNews) -> None:
        """What a decode worker tells of an attempt; of another router's it means nothing here."""
        grant = self._grants.get(news.attempt)
        if grant is None:
            return
        if news.first_token:
            grant.until = grant.deadline
            grant.story.ttft_s = self._clock.now() - grant.arrived
            self._metrics.ttft.observe(grant.story.ttft_s)
            self._metrics.judged(self._cluster.admission.on_first_token(grant.judgement, grant.story.ttft_s))
            self._cluster.reservations.prompt_computed(news.attempt)
        if news.ended:
            if news.completion_tokens:
                grant.spend(news.completion_tokens)
                self._cluster.turnstile.written(grant.tenant, news.completion_tokens)
                self._metrics.generation_tokens.inc(news.completion_tokens)
            self._cluster.on_outcome(grant.life[0], news.reason)
            self._release(news.attempt, "failed" if news.reason else "finished", news.reason or "finished")

    def sweep(self) -> None:
        """Release what nobody will tell the end of."""
        now = self._clock.now()
        for attempt, grant in list(self._grants.items()):
            if now > grant.until or self._cluster.client_door(grant.life) is None:
                self._release(attempt, "lapsed", "LAPSED")

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    def _release(self, attempt: str, outcome: str, told: str) -> None:
        grant = self._grants.pop(attempt)
        grant.decision.outcome = told
        self._outcomes[outcome].inc()
        self._cluster.reservations.release(attempt)
