"""Prompts placed on each worker and not yet computed, and how much of a tenant's own backlog a request finds there.
Pure.

Workers compute prompts in the order in which they would end under processor sharing, in equal shares by tenant and then
by request (common/equal_shares.py). So a request waits for prompts with no more left than it has, not for longer ones,
and for at most an equal share of other tenants' prompts. Progress is estimated by the worker's measured rate until the
first tokens arrive. A part of each prompt counts until then, so that a stuck worker does not get more and more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
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
        certain, doubtful: sizes by tenant and attempt, of placed ones and of tickets not yet redeemed.
        others: tokens that the other routers placed there, as last reported.
    """

    shares: EqualShares = field(default_factory=EqualShares)
    rate: float = 0.0
    at: float = 0.0
    certain: dict[str, dict[str, int]] = field(default_factory=dict)
    doubtful: dict[str, dict[str, int]] = field(default_factory=dict)
    others: int = 0


class Backlog:
    """The backlog of all workers. `now`: seconds on a monotonic clock. With the default, nothing counts as computed
    before its first token."""

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        self._now = now
        self._workers: dict[str, _Worker] = {}
        self._tenants: Counter[str] = Counter()
        """Number of placements by tenant."""

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
        if attempt in worker.doubtful.get(tenant, ()) or attempt in worker.certain.get(tenant, ()):
            self.remove(attempt, worker_id, tenant)
        self._tenants[tenant] += 1
        if doubtful:
            worker.doubtful.setdefault(tenant, {})[attempt] = tokens
            return
        worker.certain.setdefault(tenant, {})[attempt] = tokens
        worker.shares.add(attempt, tenant, tokens)

    def remove(self, attempt: str, worker_id: str, tenant: str = "", *, computed: bool = False) -> None:
        """It is computed, or cancelled. An unknown attempt is ignored."""
        worker = self._worker(worker_id)
        if _drop(worker.doubtful, tenant, attempt) or _drop(worker.certain, tenant, attempt):
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]
        if computed and worker.rate:
            worker.shares.forget(attempt)
        else:
            worker.shares.remove(attempt)
        if not worker.certain and not worker.others:
            worker.shares.clear()  # as the worker does when it has nothing to compute

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
        own = [max(left(attempt), tokens * _UNSURE) for attempt, tokens in worker.certain.get(tenant, {}).items()]
        if doubtful:
            own += worker.doubtful.get(tenant, {}).values()
        return sum(tokens for tokens in own if tokens <= size)

    def left(self, tenant: str, above: int = 0) -> float:
        """Tokens of the tenant's prompts that are not computed, on all workers, beyond the first `above` of each: a new
        request of this size is computed before them."""
        return sum(
            max(0.0, self._worker(worker_id).shares.left(attempt) - above)
            for worker_id, worker in self._workers.items()
            for attempt in worker.certain.get(tenant, ())
        )

    @property
    def tenants(self) -> Collection[str]:
        """Those with prompts that are placed and not computed."""
        return self._tenants.keys()

    def has_others(self, tenant: str) -> bool:
        """Whether prompts of another tenant are placed and not computed."""
        return len(self._tenants) > (tenant in self._tenants)

    def later(self, worker_id: str, tenant: str, size: int) -> float:
        """Of the tokens placed on the worker, how many are computed after a new request of `size`: those of its
        tenant's prompts beyond `size`, and of each other tenant's beyond its own tenant's until then. Below 0 if its
        tenant's share is used up by prompts that were computed early. Prompts count in whole: a worker may stand
        still."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return 0
        totals: Counter[str] = Counter()
        own = 0
        for placed in (worker.certain, worker.doubtful):
            for whose, sizes in placed.items():
                totals[whose] += sum(sizes.values())
            own += sum(min(size, other) for other in placed.get(tenant, {}).values())
        pending = totals.total()
        del totals[tenant]
        before = own + sum(min(total, own + size) for total in totals.values())
        return pending - max(before, self._worker(worker_id).shares.before(tenant, size))


def _drop(sizes: dict[str, dict[str, int]], tenant: str, attempt: str) -> bool:
    """Whether it was there."""
    own = sizes.get(tenant)
    if own is None or own.pop(attempt, None) is None:
        return False
    if not own:
        del sizes[tenant]
    return True
