"""Circuit breakers: workers that fail more than their peers are not used for a while. Pure: outcomes and `now` in, a
reason or "" out.

    CLOSED --outlier--> OPEN --open_s * 2^k passed--> HALF_OPEN --probe succeeds--> CLOSED
                         ^                              |   ^________
                         |__________probe fails_________|   |        | probe is inconclusive, or has no result for probe_s
                                                            |__probe_|

An outlier has failed `consecutive` times in a row; or its failure rate exceeds `min_rate`, and `factor` times the rate
of the rest of its pool. Only faults of the worker count, not an invalid request, a cancel or an overload. At most half
of a pool is excluded at a time, and a pool of one never is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from diptych.common.errors import DiptychError, InternalError, TransferError, WorkerLostError

_FAULTS = frozenset(kind.reason for kind in (InternalError, TransferError, WorkerLostError))


def is_fault(error: DiptychError | str) -> bool:
    """Whether an error, or its reason, is a fault of the worker that reported it."""
    return (error if isinstance(error, str) else error.reason) in _FAULTS


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """Rules of the breakers.

    Args:
        consecutive: faults in a row.
        window, min_outcomes: number of remembered outcomes, and how many are needed for a rate.
        open_s, max_open_s: how long a worker is excluded the first time, and at most.
        probe_s: seconds after which a probe without result is replaced by the next.
    """

    consecutive: int = 5
    window: int = 50
    min_outcomes: int = 10
    min_rate: float = 0.3
    factor: float = 3.0
    open_s: float = 5.0
    max_open_s: float = 60.0
    probe_s: float = 10.0


@dataclass(slots=True)
class _Breaker:
    state: BreakerState = BreakerState.CLOSED
    outcomes: deque[bool] = field(default_factory=deque)
    in_a_row: int = 0
    open_until: float = 0.0
    times_opened: int = 0
    probe_until: float | None = None

    @property
    def rate(self) -> float:
        return sum(self.outcomes) / len(self.outcomes) if self.outcomes else 0.0


class Breakers:
    """Breakers by worker id. An unknown id is closed."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self._rules = rules or BreakerRules()
        self._breakers: dict[str, _Breaker] = {}
        self._pools: dict[str, Sequence[str]] = {}

    def set_pool(self, role: str, worker_ids: Sequence[str]) -> None:
        """All members of a pool, usable or not."""
        self._pools[role] = tuple(worker_ids)

    def forget(self, worker_id: str) -> None:
        """A new incarnation starts closed."""
        self._breakers.pop(worker_id, None)

    # ---- what happened -------------------------------------------------------------------------------------------

    def on_placed(self, worker_id: str, now: float) -> bool:
        """A request was placed there. Returns whether it is a probe (the worker is then excluded until it ends)."""
        if worker_id not in self._breakers:
            return False
        if self.state(worker_id, now) is not BreakerState.HALF_OPEN:
            return False
        self._breakers[worker_id].probe_until = now + self._rules.probe_s
        return True

    def on_outcome(self, worker_id: str, *, fault: bool, now: float) -> bool:
        """Returns whether the worker's state changed."""
        breaker = self._breakers.setdefault(worker_id, _Breaker())
        before = self.state(worker_id, now)
        breaker.outcomes.append(fault)
        if len(breaker.outcomes) > self._rules.window:
            breaker.outcomes.popleft()
        breaker.in_a_row = breaker.in_a_row + 1 if fault else 0
        if before is BreakerState.HALF_OPEN:
            if fault:
                self._open(breaker, now)
            else:
                self._breakers[worker_id] = _Breaker()
            return True
        if before is BreakerState.CLOSED and fault and self._is_outlier(worker_id, breaker):
            self._open(breaker, now)
            return True
        return False

    def on_inconclusive(self, worker_id: str, now: float) -> bool:
        """A request ended inconclusively: the next one may probe. Returns whether that changed."""
        breaker = self._breakers.get(worker_id)
        if breaker is None or breaker.probe_until is None or self.state(worker_id, now) is not BreakerState.HALF_OPEN:
            return False
        breaker.probe_until = None
        return True

    # ---- what follows --------------------------------------------------------------------------------------------

    def state(self, worker_id: str, now: float) -> BreakerState:
        breaker = self._breakers.get(worker_id)
        if breaker is None:
            return BreakerState.CLOSED
        if breaker.state is BreakerState.OPEN and now >= breaker.open_until:
            breaker.state, breaker.probe_until = BreakerState.HALF_OPEN, None
        return breaker.state

    def why_not(self, worker_id: str, now: float) -> str:
        """Why the worker is excluded, or ""."""
        state = self.state(worker_id, now)
        if state is BreakerState.CLOSED:
            return ""
        breaker = self._breakers[worker_id]
        if state is BreakerState.OPEN:
            return f"failed more than its peers: excluded for {breaker.open_until - now:.1f} s"
        if breaker.probe_until is not None and now < breaker.probe_until:
            return "failed more than its peers: a probe is running"
        return ""

    def num_out(self, now: float) -> int:
        return sum(self.state(name, now) is not BreakerState.CLOSED for name in list(self._breakers))

    def _open(self, breaker: _Breaker, now: float) -> None:
        rules = self._rules
        breaker.state = BreakerState.OPEN
        breaker.open_until = now + min(rules.open_s * 2.0**breaker.times_opened, rules.max_open_s)
        breaker.times_opened = min(breaker.times_opened + 1, 16)
        breaker.outcomes.clear()
        breaker.in_a_row = 0
        breaker.probe_until = None

    def _is_outlier(self, worker_id: str, breaker: _Breaker) -> bool:
        pool = next((pool for pool in self._pools.values() if worker_id in pool), (worker_id,))
        others = [self._breakers.get(name, _Breaker()) for name in pool if name != worker_id]
        out = sum(other.state is not BreakerState.CLOSED for other in others)
        if out + 1 > len(pool) // 2:
            return False
        rules = self._rules
        if breaker.in_a_row >= rules.consecutive:
            return True
        if len(breaker.outcomes) < rules.min_outcomes or breaker.rate < rules.min_rate:
            return False
        faults = sum(sum(other.outcomes) for other in others)
        total = sum(len(other.outcomes) for other in others)
        return breaker.rate > rules.factor * (faults / total if total else 0.0)
