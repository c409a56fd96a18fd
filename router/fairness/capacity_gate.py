"""Decides which requests may be placed now and which wait; used in production (wait_queue.py) and in the simulation.
Pure.

    room, none waits, and in time -> admitted at once
    else wait -> let_in, when prompts are computed or requests end, in the order of fair_queue.py
         -> passing -> placed
    cannot be in time, on arrival or while it waits -> refused (admission.py)

Room is computed per worker and tenant, and for a request's size: the tokens of the tenant's placed prompts that the
worker computes before the request, against what it computes in `window_s` (backlog.py). Workers compute tenants in
equal shares and short prompts before long ones; so a short request finds little before it, and other tenants take no
more than their shares. A longer window would only move the order into the workers' queues. When there is no room for
the next request, others with room pass it, within the bounds of fair_queue.py; so turns and weights
determine each tenant's part.

A request that will probably be late waits on standby even if there is room: in a worker's queue it would only make others
late. It is let in when it is expected to be in time after all, or to keep a worker from being idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from diptych.router.fairness.admission import SLACK_S, Admission, AdmissionDecision, FirstTokenLimit, Verdict
from diptych.router.fairness.fair_queue import Entry, FairQueue, PlacedTokens, Share
from diptych.router.fairness.prompt_speeds import PromptSpeeds

T = TypeVar("T")
_IDLE_S = 0.05
"""Seconds of its tenant's prompts that a worker has at most left when a request on standby is let in."""
_ANY_LENGTH = 2**31 - 1
"""Tokens of a request before which a worker computes all of its tenant's prompts."""


class RoomCheck(Protocol):
    def __call__(
        self, window_s: float, tenant: str, tokens: int, beside: float = 0.0, *, doubtful: bool = False
    ) -> bool:
        """Whether some worker has less than `window_s` of the tenant's prompts to compute before a request of `tokens`,
        plus `beside` tokens. Also true while the rates are unknown. `doubtful`: count tickets not yet redeemed."""
        ...


class WaitEstimate(Protocol):
    def __call__(self, tenant: str, tokens: int, beside: float = 0.0) -> float:
        """Seconds in which some worker computes the tenant's prompts that come before a request of `tokens`, the request,
        and `beside` tokens; 0.0 while the rates are unknown."""
        ...


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A tenant's waiting requests that are not on standby. tokens, largest: as far as known, to be computed in any case."""

    tokens: int = 0
    certain: int = 0
    largest: int = 0


class CapacityGate(Generic[T]):
    """The gate of one pool.

    Args:
        room: see RoomCheck.
        admit: called with the next entry; returns whether it was still waiting. Its owner calls `arrived` once it is
            placed.
        window_s: seconds of work that the pool gets ahead; 0: none waits.
        share: weight and rank of a tenant.
        placed: tokens placed and not computed; without those that were admitted and are not placed yet.
        tenants: those with such tokens.
        wait_s, speeds: how long prompts take: as expected, and at least.
        admission: see there; None: no request is on standby or refused.
        now: seconds on the clock of the requests' limits.
    """

    def __init__(
        self,
        room: RoomCheck,
        admit: Callable[[Entry[T]], bool],
        *,
        window_s: float,
        share: Callable[[str], Share] = lambda _: Share(),
        placed: PlacedTokens = lambda tenant, above=0: 0.0,
        tenants: Callable[[], Collection[str]] = lambda: (),
        wait_s: WaitEstimate = lambda tenant, tokens, beside=0.0: 0.0,
        admission: Admission | None = None,
        speeds: PromptSpeeds | None = None,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._room = room
        self._admit = admit
        self._tenants = tenants
        self._wait_s = wait_s
        self.admission = admission or Admission("off")
        self.speeds = speeds or PromptSpeeds()
        self._now = now
        self.window_s = window_s
        self.share = share
        self._placed = placed
        self._turns: FairQueue[T] = FairQueue(self._not_computed)
        self._passing: set[Entry[T]] = set()
        """Admitted entries that are not placed yet."""

    def __len__(self) -> int:
        """Number of waiting entries."""
        return len(self._turns)

    @property
    def passing(self) -> int:
        """Tokens that were admitted and are not placed yet."""
        return sum(entry.tokens for entry in self._passing)

    def _not_computed(self, tenant: str, above: int = 0) -> float:
        """See PlacedTokens."""
        passing = sum(max(0, entry.tokens - above) for entry in self._passing if entry.tenant == tenant)
        return passing + self._placed(tenant, above)

    def _passing_before(self, tenant: str, tokens: int) -> int:
        passing = (entry.tokens for entry in self._passing if entry.tenant == tenant)
        return sum(passed for passed in passing if passed <= tokens)

    def _has_room(self, tenant: str, tokens: int, *, doubtful: bool = False) -> bool:
        before = self._passing_before(tenant, tokens)
        return not self.window_s or self._room(self.window_s, tenant, tokens, before, doubtful=doubtful)

    def may_pass(
        self, tenant: str, tokens: int, limit: FirstTokenLimit | None = None, *, doubtful: bool = False
    ) -> bool:
        """Whether a request need not wait now. `doubtful`: count tickets not yet redeemed."""
        return (
            not self._turns
            and self._has_room(tenant, tokens, doubtful=doubtful)
            and (limit is None or not self.window_s or self._is_useful(tenant, tokens, limit))
        )

    def _is_useful(self, tenant: str, tokens: int, limit: FirstTokenLimit) -> bool:
        """Whether the request would be in time, or a worker would be idle. One that computes a longer prompt of the tenant
        is not idle, though it would compute this one first: then the longer one would be late as well."""
        in_time = self.admission.in_time(self.predicted_s(tenant, tokens), limit, self._now())
        return in_time or self._room(_IDLE_S, tenant, _ANY_LENGTH, self._passing_before(tenant, _ANY_LENGTH))

    def predicted_s(self, tenant: str, tokens: int, ahead: int = 0) -> float:
        """The expected time from now to the first token of a request, uncalibrated, after `ahead` tokens that wait: by its
        tenant's share of the workers. 0.0: nothing was measured."""
        if not self.speeds.expected:
            return 0.0
        own = self.share(tenant).weight
        weights = self._turns.shares(tenant, own)
        parts = sum(weights.values()) / own + sum(other not in weights for other in self._tenants())
        wait_s = self._wait_s(tenant, tokens, self._passing_before(tenant, tokens))
        return parts * (wait_s + ahead / self.speeds.expected)

    def too_many(self, tenant: str, most: int) -> bool:
        """See FairQueue."""
        return self._turns.too_many(tenant, most)

    def judge(self, tenant: str, tokens: int, limit: FirstTokenLimit, arrived: float) -> AdmissionDecision:
        """Decide about a request that arrives and need not wait."""
        return self._judge(tenant, tokens, limit, arrived, None)

    def _judge(
        self, tenant: str, tokens: int, limit: FirstTokenLimit, arrived: float, ahead: _Ahead | None
    ) -> AdmissionDecision:
        """`ahead`: of a request on standby; it goes after them. None: it is not on standby."""
        speeds, waited_s = self.speeds, self._now() - arrived
        least_s = speeds.least_s(limit.certain)
        if ahead is not None:
            least_s += speeds.least_queue_s(ahead.certain, ahead.largest, self.window_s)
        predicted_s = self.predicted_s(tenant, tokens, ahead.tokens if ahead is not None else 0)
        bound_s = waited_s + max(0.0, least_s - SLACK_S)
        limit_s = limit.at - arrived
        decision = self.admission.judge(
            bound_s,
            waited_s + predicted_s,
            limit_s,
            retry_s=predicted_s,
            excused=limit.excused,
            is_over=waited_s >= limit_s,
        )
        limit.excused |= decision.verdict is Verdict.WOULD_REFUSE
        return decision

    def wait(
        self,
        tenant: str,
        tokens: int,
        item: T,
        *,
        priority: int,
        limit: FirstTokenLimit | None = None,
        arrived: float = 0.0,
    ) -> tuple[Entry[T] | None, AdmissionDecision | None]:
        """The entry, which waits from now on, and the decision about it; no entry: it was refused. `limit`: without one
        nothing is decided."""
        standby, decision = False, None
        if limit is not None:
            ahead = self._ahead(tenant)
            predicted_s = self.predicted_s(tenant, tokens, ahead.tokens)
            standby = not self.admission.in_time(predicted_s, limit, self._now())
            decision = self._judge(tenant, tokens, limit, arrived, ahead if standby else None)
            if decision.error is not None:
                return None, decision
            decision.ttft_s = self._now() - arrived + predicted_s
        entry = self._turns.add(
            tenant,
            tokens,
            item,
            share=self.share(tenant),
            priority=priority,
            limit=limit,
            standby=standby,
            start_by=limit.aim - self.speeds.expected_s(tokens) if limit is not None else 0.0,
            arrived=arrived,
        )
        return entry, decision

    def _ahead(self, tenant: str) -> _Ahead:
        firm = self._turns.firm(tenant)
        certain = (e.limit.certain for e in firm if e.limit is not None and self.speeds.is_known(e.tokens))
        return _Ahead(sum(e.tokens for e in firm), sum(certain), max((e.tokens for e in firm), default=0))

    def refusals(self) -> list[tuple[Entry[T], AdmissionDecision]]:
        """The waiting requests that cannot be in time any more because of those that go before them. Their owner removes
        them with `leave`."""
        late = list[tuple[Entry[T], AdmissionDecision]]()
        for tenant in self._turns.tenants():
            standby = [(entry, entry.limit) for entry in self._turns.on_standby(tenant) if entry.limit is not None]
            if not standby:
                continue
            firm, certain = self._ahead(tenant), np.zeros(len(standby))
            largest = max(firm.largest, *(entry.tokens for entry, _ in standby))
            # One that goes before another counts unless its own time is over sooner.
            for place in sorted(range(len(standby)), key=lambda i: -standby[i][1].at):
                entry, limit = standby[place]
                before = int(certain[:place].sum())
                ahead = _Ahead(firm.tokens + before, firm.certain + before, largest)
                queue_s = self.speeds.least_queue_s(ahead.certain, largest, self.window_s)
                least_s = queue_s + self.speeds.least_s(limit.certain) - SLACK_S
                if queue_s > 0.0 and self._now() + least_s > limit.at:
                    decision = self._judge(tenant, entry.tokens, limit, entry.arrived, ahead)
                    if decision.error is not None:
                        late.append((entry, decision))
                        continue
                if self.speeds.is_known(entry.tokens):
                    certain[place] = limit.certain
        return late

    def judge_again(self, entry: Entry[T]) -> AdmissionDecision:
        """Decide about a waiting request whose time may be over: see `too_late_at`."""
        assert entry.limit is not None
        return self._judge(entry.tenant, entry.tokens, entry.limit, entry.arrived, None)

    def too_late_at(self, limit: FirstTokenLimit) -> float:
        """When a waiting request can no longer be in time, whatever the others do: then `judge_again`. Infinite after
        that."""
        if self._now() >= limit.at:
            return math.inf
        if limit.excused:
            return limit.at
        return limit.at - max(0.0, self.speeds.least_s(limit.certain) - SLACK_S)

    def leave(self, entry: Entry[T]) -> None:
        """Stop waiting. Idempotent."""
        self._turns.remove(entry)

    def arrived(self, entry: Entry[T]) -> None:
        """An admitted entry was reserved, or cancelled."""
        self._passing.discard(entry)

    def written(self, tenant: str, tokens: int) -> None:
        """Tokens of an answer of this tenant were generated."""
        if self._turns:
            self._turns.charge(tenant, tokens, share=self.share(tenant))

    def let_in(self) -> None:
        """Admit waiting requests; call it when there may be more room, or a new entry."""
        while (turn := self._turns.next()) is not None:
            entry = turn if self._may_go(turn) else self._passer(turn)
            if entry is None:
                break
            self._turns.take(entry, before=turn)
            if self._admit(entry):
                self._passing.add(entry)

    def _passer(self, turn: Entry[T]) -> Entry[T] | None:
        """An entry that may pass `turn`, for which there is no room, and for which there is room."""
        return next((entry for entry in self._turns.may_pass(turn) if self._may_go(entry)), None)

    def _may_go(self, entry: Entry[T]) -> bool:
        return self._has_room(entry.tenant, entry.tokens) and (
            not entry.standby or entry.limit is None or self._is_useful(entry.tenant, entry.tokens, entry.limit)
        )
