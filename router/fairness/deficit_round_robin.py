"""Whose request goes next, when they wait: weighted deficit round robin over tenants, counted in tokens. Pure.

    rank (set by the operator, lower first) -> tenants in a ring, each visit adds quantum x weight -> priority, then age

A prompt's tokens are paid for when its turn comes, an answer's when they come, while anybody waits: a tenant may so get into
debt, which later visits repay before anything more of it is let in. While two tenants of one rank both have requests waiting,
what they were served, in tokens over weight, differs by less than

    quantum + (M + A) / weight of the one + (M + A) / weight of the other

over any stretch of time and however many requests each of them sends; M: prompt tokens of its largest request that waited, A:
what its answers wrote between two of its turns (at most what those that run still may write). A tenant whose queue runs empty
keeps no credit; it keeps its debt until nobody waits.

Whose turn it is may be too large for now, and shorter ones may pass it (capacity_gate.py):
they pay at once, and get into debt by at most
quantum x weight and what the passed one gets, in proportion to the weights. So the difference may grow by another quantum and M
over weight, and no further: by then the passed one has its turn first.
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
"""Tokens. Smaller is fairer over short times; a request that is larger just takes several rounds."""


class Share(NamedTuple):
    """A tenant's part, as the operator set it. weight: above 0; rank: all of a lower rank go first."""

    weight: float = 1.0
    rank: int = 0


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One waiting request. `tokens`: what it will cost; `passed`: what shorter ones of its own tenant cost that went before it
    in its turn."""

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
        """The next that is still wanted."""
        while self.heap and self.heap[0][-1].gone:
            heapq.heappop(self.heap)
        return self.heap[0][-1] if self.heap else None

    def shortest(self) -> Entry[T] | None:
        """Of the first priority that is still wanted."""
        while self.by_size and self.by_size[0][-1].gone:
            heapq.heappop(self.by_size)
        return self.by_size[0][-1] if self.by_size else None


class DeficitRoundRobin(Generic[T]):
    """Args:
    quantum: tokens that a tenant of weight 1 is given at each visit.
    """

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._rings: dict[int, deque[_Flow[T]]] = {}
        self._flows: dict[tuple[int, str], _Flow[T]] = {}
        self._owed: dict[tuple[int, str], float] = {}
        """Debts of those that have nothing waiting."""
        self._counter = 0
        self._count = 0
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._count

    def too_many(self, tenant: str, most: int) -> bool:
        """Whether the tenant has its share of `most` requests waiting: an equal one for each tenant that waits, with this one."""
        others = len(self._by_tenant) - (tenant in self._by_tenant)
        return self._by_tenant[tenant] * (others + 1) >= most

    def add(self, tenant: str, tokens: int, item: T, *, share: Share, priority: int = 0) -> Entry[T]:
        """`priority`: lower goes first among the tenant's own."""
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
        """Tokens of an answer came. Counts while anybody waits: what is idle costs nobody a turn."""
        if not self._count:
            return
        key = (share.rank, tenant)
        if (flow := self._flows.get(key)) is not None:
            flow.deficit -= tokens
        else:
            self._owed[key] = self._owed.get(key, 0.0) + tokens

    def remove(self, entry: Entry[T]) -> None:
        """It waits no longer; costs its tenant nothing. Idempotent, also after it was taken."""
        if not entry.gone:
            entry.gone = True
            self._count -= 1
            self._by_tenant[entry.tenant] -= 1
            if not self._by_tenant[entry.tenant]:
                del self._by_tenant[entry.tenant]
            if not self._count:  # they begin anew: debts and rings are of a time in which somebody waited
                self._owed.clear()
                self._flows.clear()
                self._rings.clear()

    def next(self) -> Entry[T] | None:
        """Whose turn it is; it still waits. None: nobody waits."""
        for rank in sorted(self._rings):
            ring = self._rings[rank]
            while ring:
                if (entry := self._round(rank, ring)) is not None:
                    return entry
                self._skip_rounds(ring)
            self._rings.pop(rank, None)
        return None

    def take(self, entry: Entry[T] | None = None, *, before: Entry[T] | None = None) -> Entry[T] | None:
        """This one (else the next one) waits no longer, and pays. `before`: whose turn it is, if that is another one. None:
        nobody waits."""
        entry = entry or self.next()
        if entry is not None:
            self._flows[entry.rank, entry.tenant].deficit -= entry.tokens
            self.remove(entry)
            if before is not None and before is not entry and before.tenant == entry.tenant:
                before.passed += entry.tokens
        return entry

    def may_pass(self, turn: Entry[T]) -> Iterator[Entry[T]]:
        """Who may go before the one whose turn it is: of each other tenant that is not too far in debt the next and the
        shortest, of its own a shorter one, until they cost as much as it does, and a quantum."""
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
        """Visit each once, the one whose visit was not over first. None: nobody's deficit was enough."""
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
        """Give everyone at once the rounds in which nobody could be served."""
        missing = [
            math.ceil((head.tokens - flow.deficit) / (self._quantum * flow.weight))
            for flow in ring
            if (head := flow.head()) is not None
        ]
        rounds = min(missing, default=1) - 1
        for flow in ring:
            flow.deficit += max(0, rounds) * self._quantum * flow.weight
