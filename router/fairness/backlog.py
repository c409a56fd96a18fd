"""Prompts placed on each worker and not yet computed, and how much of a tenant's own backlog a request finds there.
Pure.

Workers compute prompts in the order in which they would end under processor sharing, in equal shares by tenant and then
by request (common/equal_shares.py). So a request waits for prompts with no more left than it has, not for longer ones,
and for at most an equal share of other tenants' prompts. Progress is estimated by the worker's measured rate until the
first tokens arrive. A part of each prompt counts until then, so that a stuck worker does not get more and more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diptych.common.equal_shares import EqualShares

_UNSURE = 1 / 16
"""Share of a prompt that counts until its first token arrives."""
_OTHERS = "\0others"
"""Attempt and tenant of all placements of the other routers on a worker, as one."""


@dataclass(slots=True)
class _Worker:
    """One worker.

    Args:
        rate: prompt tokens a second; at: time up to which `shares` was advanced.
        certain, doubtful: (tenant, size) by attempt of placed ones, and of tickets not yet redeemed.
        others: tokens that the other routers placed there, as last reported.
    """

    shares: EqualShares = field(default_factory=EqualShares)
    rate: float = 0.0
    at: float = 0.0
    certain: dict[str, tuple[str, int]] = field(default_factory=dict)
    doubtful: dict[str, tuple[str, int]] = field(default_factory=dict)
    others: int = 0


class Backlog:
    """The backlog of all workers. `now`: seconds on a monotonic clock. With the default, nothing counts as computed
    before its first token."""

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        self._now = now
        self._workers: dict[str, _Worker] = {}

    def _worker(self, worker_id: str) -> _Worker:
        now = self._now()
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker(at=now)
        worker.shares.computed((now - worker.at) * worker.rate)
        worker.at = now
        return worker

    def add(self, attempt: str, worker_id: str, tokens: int, tenant: str = "", *, doubtful: bool = False) -> None:
        """A doubtful attempt may be added again as certain."""
        worker = self._worker(worker_id)
        if doubtful:
            worker.doubtful[attempt] = (tenant, tokens)
            return
        worker.doubtful.pop(attempt, None)
        worker.certain[attempt] = (tenant, tokens)
        worker.shares.add(attempt, tenant, tokens)

    def remove(self, attempt: str, worker_id: str) -> None:
        """It is computed, or cancelled. An unknown attempt is ignored."""
        worker = self._worker(worker_id)
        worker.doubtful.pop(attempt, None)
        worker.certain.pop(attempt, None)
        worker.shares.remove(attempt)

    def set_others(self, pending: Mapping[str, tuple[int, int]]) -> None:
        """Replace the other routers' (tokens, requests) by worker."""
        for worker_id in {*pending, *(name for name, worker in self._workers.items() if worker.others)}:
            worker = self._worker(worker_id)
            tokens = pending.get(worker_id, (0, 0))[0]
            left = worker.shares.left(_OTHERS) + tokens - worker.others
            worker.others = tokens
            worker.shares.remove(_OTHERS)
            if left >= 1:
                worker.shares.add(_OTHERS, _OTHERS, int(left))

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """Prompt tokens a second by worker. Drops empty workers that are not named."""
        for worker_id, rate in rates.items():
            self._worker(worker_id).rate = rate
        self._workers = {n: w for n, w in self._workers.items() if n in rates or w.certain or w.doubtful or w.others}

    def before(self, worker_id: str, tenant: str, size: int, *, doubtful: bool = False) -> float:
        """Tokens of the tenant's prompts that the worker computes before a new request of `size`: of those with no more
        left than it. `doubtful`: count those, too."""
        worker = self._worker(worker_id)
        left = worker.shares.left
        own = [
            max(left(attempt), tokens * _UNSURE)
            for attempt, (whose, tokens) in worker.certain.items()
            if whose == tenant
        ]
        if doubtful:
            own += [tokens for whose, tokens in worker.doubtful.values() if whose == tenant]
        return sum(tokens for tokens in own if tokens <= size)
