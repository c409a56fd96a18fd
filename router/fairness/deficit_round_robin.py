"""Order of waiting requests: weighted deficit round robin over tenants, counted in tokens. Pure.

    rank (set by the operator, lower first) -> tenants in a ring, each visit adds quantum x weight -> priority, then age

A prompt's tokens are charged at its turn, an answer's when they are generated, while any request waits. A tenant may
thus get into debt, which later visits repay before anything more of it is admitted. While two tenants of one rank both
have requests waiting, their service, in tokens over weight, differs by less than

    quantum + (M + A) / weight of the one + (M + A) / weight of the other

over any period and for any number of requests. M: prompt tokens of the largest request that waited; A: what its answers
generated between two of its turns (at most what running ones may still generate). A tenant whose queue runs empty keeps
no credit; it keeps its debt until no request waits.

When the next request is too large for now, shorter ones may pass it (capacity_gate.py). They are charged at once, and
get into debt by at most quantum x weight and what the passed one gets, in proportion to the weights. So the difference
may grow by another quantum and M over weight, and no further: then the passed one has its turn first.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
QUANTUM = 512
"""Tokens. A smaller quantum is fairer over short times; a larger request takes several rounds."""


class Share(NamedTuple):
    """A tenant's share, set by the operator. weight: above 0; rank: lower ranks go first."""

    weight: float = 1.0
    rank: int = 0


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One waiting request. `tokens`: its cost; `passed`: cost of shorter requests of its tenant that passed it at its
    turn."""

    tenant: str
    tokens: int
    item: T
    rank: int
    gone: bool = False
    passed: int = 0


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """A tenant's waiting requests in one rank. `visited`: this visit's quantum was added."""

    tenant: str
    weight: float
    deficit: float = 0.0
    visited: bool = False
    heap: list[tuple[int, int, Entry[T]]] = field(default_factory=list)
    by_size: list[tuple[int, int, int, Entry[T]]] = field(default_factory=list)

    def head(self) -> Entry[T] | None:
        """The next entry that still waits."""
        while self.heap and self.heap[0][-1].gone:
            heapq.heappop(self.heap)
        return self.heap[0][-1] if self.heap else None

    def shortest(self) -> Entry[T] | None:
        """The shortest waiting entry of the first priority."""
        while self.by_size and self.by_size[0][-1].gone:
            heapq.heappop(self.by_size)
        return self.by_size[0][-1] if self.by_size else None


class DeficitRoundRobin(Generic[T]):
    """The scheduler of all waiting requests. `quantum`: tokens that a tenant of weight 1 gets at each visit."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._rings: dict[int, deque[_Flow[T]]] = {}
        self._flows: dict[tuple[int, str], _Flow[T]] = {}
        self._owed: dict[tuple[int, str], float] = {}
        """Debts of tenants without waiting requests."""
        self._counter = 0
        self._count = 0
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._count

    def too_many(self, tenant: str, most: int) -> bool:
        """Whether the tenant has its share of `most` waiting requests: an equal one for each waiting tenant, including
        it."""
        others = len(self._by_tenant) - (tenant in self._by_tenant)
        return self._by_tenant[tenant] * (others + 1) >= most

    def add(self, tenant: str, tokens: int, item: T, *, share: Share, priority: int = 0) -> Entry[T]:
        """`priority`: lower goes first within the tenant."""
        key = (share.rank, tenant)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(tenant, share.weight, -self._owed.pop(key, 0.0))
            self._rings.setdefault(share.rank, deque()).append(flow)
        flow.weight = share.weight
        entry = Entry(tenant, max(1, tokens), item, share.rank)
        self._counter += 1
        heapq.heappush(flow.heap, (priority, self._counter, entry))
        heapq.heappush(flow.by_size, (priority, entry.tokens, self._counter, entry))
        self._count += 1
        self._by_tenant[tenant] += 1
        return entry

    def charge(self, tenant: str, tokens: int, *, share: Share) -> None:
        """Charge tokens of an answer. It has an effect only while requests wait: idle capacity costs no turn."""
        if not self._count:
            return
        key = (share.rank, tenant)
        if (flow := self._flows.get(key)) is not None:
            flow.deficit -= tokens
        else:
            self._owed[key] = self._owed.get(key, 0.0) + tokens

    def remove(self, entry: Entry[T]) -> None:
        """Stop waiting, without cost to the tenant. Idempotent, also after it was taken."""
        if not entry.gone:
            entry.gone = True
            self._count -= 1
            self._by_tenant[entry.tenant] -= 1
            if not self._by_tenant[entry.tenant]:
                del self._by_tenant[entry.tenant]
            if not self._count:  # start anew: debts and rings only matter while requests wait
                self._owed.clear()
                self._flows.clear()
                self._rings.clear()

    def next(self) -> Entry[T] | None:
        """The next entry; it keeps waiting. None: none waits."""
        for rank in sorted(self._rings):
            ring = self._rings[rank]
            while ring:
                if (entry := self._round(rank, ring)) is not None:
                    return entry
                self._skip_rounds(ring)
            self._rings.pop(rank, None)
        return None

    def take(self, entry: Entry[T] | None = None, *, before: Entry[T] | None = None) -> Entry[T] | None:
        """Remove this entry (else the next one) and charge it. `before`: the entry whose turn it is, if another. None:
        none waits."""
        entry = entry or self.next()
        if entry is not None:
            self._flows[entry.rank, entry.tenant].deficit -= entry.tokens
            self.remove(entry)
            if before is not None and before is not entry and before.tenant == entry.tenant:
                before.passed += entry.tokens
        return entry

    def may_pass(self, turn: Entry[T]) -> Iterator[Entry[T]]:
        """Entries that may pass `turn`: of each other tenant without too much debt the next and the shortest; of its
        tenant shorter ones, up to its own cost and a quantum."""
        flow = self._flows[turn.rank, turn.tenant]
        shortest = flow.shortest()
        if shortest is not None and shortest.tokens < turn.tokens and turn.passed <= turn.tokens + self._quantum:
            yield shortest
        credit = self._quantum + turn.tokens / flow.weight
        for other in self._rings[turn.rank]:
            if other is not flow and other.deficit >= -credit * other.weight:
                for entry in (other.head(), other.shortest()):
                    if entry is not None:
                        yield entry

    def _round(self, rank: int, ring: deque[_Flow[T]]) -> Entry[T] | None:
        """Visit each tenant once, first the one whose visit was not over. None: no deficit was enough."""
        for _ in range(len(ring)):
            flow = ring[0]
            head = flow.head()
            if head is None:
                ring.popleft()
                del self._flows[rank, flow.tenant]
                if flow.deficit < 0:
                    self._owed[rank, flow.tenant] = -flow.deficit
                continue
            if not flow.visited:
                flow.deficit += self._quantum * flow.weight
                flow.visited = True
            if head.tokens <= flow.deficit:
                return head
            flow.visited = False
            ring.rotate(-1)
        return None

    def _skip_rounds(self, ring: deque[_Flow[T]]) -> None:
        """Add at once the rounds in which no tenant could be served."""
        missing = [
            math.ceil((head.tokens - flow.deficit) / (self._quantum * flow.weight))
            for flow in ring
            if (head := flow.head()) is not None
        ]
        rounds = min(missing, default=1) - 1
        for flow in ring:
            flow.deficit += max(0, rounds) * self._quantum * flow.weight
