"""Order of waiting requests: start-time fair queueing over tenants, counted in tokens. Pure.

    rank (set by the operator, lower first) -> the tenant that received least over its weight -> priority, then age

Requests on *standby* (admission.py: their first token will probably be late) go after all others of their rank, and
within a tenant the one with the most time left goes first: the likeliest to be in time. None of its tenant passes it. A
tenant of which only such requests wait has no turn while others have one, and gets no credit for that time either.

A tenant receives a prompt when it leaves the queue, an answer when it is generated, while a request of its rank waits;
and from the start what it has placed and not computed. A tenant that begins to wait, with nothing placed, starts with
what the next one received and the workers computed: with no credit for the time before, and not behind prompts that are
only placed. So while two tenants of one rank both have requests waiting, what they receive, over weight, differs by
less than

    (M + A) / weight of the one + (M + A) / weight of the other

over any period and for any number of requests. M: prompt tokens of the largest request that waited; A: what its answers
generated between two of its turns (at most what running ones may still generate). A tenant whose queue runs empty keeps
what it received until no request of its rank waits.

When the next request is too large for now, others may pass it (capacity_gate.py), until they have received `slack`
tokens and its prompt over its weight more than the passed one: the difference may grow by that, and no further. Against
a short request, a longer prompt of its tenant that is placed counts as far as workers compute it before the short one
(common/equal_shares.py): what is computed already, and as many tokens as the short one has.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from diptych.router.fairness.admission import FirstTokenLimit

T = TypeVar("T")
SLACK = 512
"""Tokens that passing requests may receive beyond what the passed one gets."""
_MOST_GONE = 64


class Share(NamedTuple):
    """A tenant's share, set by the operator. weight: above 0; rank: lower ranks go first."""

    weight: float = 1.0
    rank: int = 0


class PlacedTokens(Protocol):
    def __call__(self, tenant: str, above: int = 0) -> float:
        """Tokens of the tenant's prompts that left the queue and are not computed, beyond the first `above` of each."""
        ...


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One waiting request.

    Args:
        tokens: its cost.
        limit: see admission.py; None: none.
        standby: its first token will probably be late; it would be in time if it began by `start_by`.
        arrived: on the clock of the limit.
        passed: cost of shorter requests of its tenant that passed it at its turn.
    """

    tenant: str
    tokens: int
    item: T
    rank: int
    limit: FirstTokenLimit | None = None
    standby: bool = False
    start_by: float = 0.0
    arrived: float = 0.0
    gone: bool = False
    passed: int = 0


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """A tenant's waiting requests in one rank. `received`: tokens over weight."""

    tenant: str
    weight: float
    received: float
    count: int = 0
    firm: set[Entry[T]] = field(default_factory=set)
    """Those not on standby."""
    heap: list[tuple[bool, int, float, int, Entry[T]]] = field(default_factory=list)
    by_size: list[tuple[bool, int, float, int, Entry[T]]] = field(default_factory=list)

    def compact(self) -> None:
        """Drop entries that left while others were before them, once they are more than the rest."""
        if len(self.heap) > 2 * self.count + _MOST_GONE:
            self.heap = [one for one in self.heap if not one[-1].gone]
            self.by_size = [one for one in self.by_size if not one[-1].gone]
            heapq.heapify(self.heap)
            heapq.heapify(self.by_size)

    def head(self) -> Entry[T]:
        """The next entry; one waits."""
        while self.heap[0][-1].gone:
            heapq.heappop(self.heap)
        return self.heap[0][-1]

    def shortest(self) -> Entry[T]:
        """The shortest entry of the first priority."""
        while self.by_size[0][-1].gone:
            heapq.heappop(self.by_size)
        return self.by_size[0][-1]


@dataclass(slots=True, eq=False)
class _Rank(Generic[T]):
    """The tenants of one rank, while a request of it waits.

    Args:
        flows: of the tenants with waiting requests.
        absent: what the others received.
        floor: what a newcomer has received at least.
    """

    flows: dict[str, _Flow[T]] = field(default_factory=dict)
    absent: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0

    def next(self) -> _Flow[T]:
        """The flow that received least, of those with a turn."""
        return min(self.flows.values(), key=lambda flow: (not flow.firm, flow.received))


class FairQueue(Generic[T]):
    """The scheduler of all waiting requests. `slack`: see SLACK."""

    def __init__(self, placed: PlacedTokens = lambda tenant, above=0: 0.0, *, slack: int = SLACK) -> None:
        self._placed = placed
        self._slack = slack
        self._ranks: dict[int, _Rank[T]] = {}
        self._counter = 0
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._by_tenant.total()

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def too_many(self, tenant: str, most: int) -> bool:
        """Whether the tenant has its share of `most` waiting requests: an equal one for each waiting tenant, including
        it."""
        others = len(self._by_tenant) - (tenant in self._by_tenant)
        return self._by_tenant[tenant] * (others + 1) >= most

    def add(
        self,
        tenant: str,
        tokens: int,
        item: T,
        *,
        share: Share,
        priority: int = 0,
        limit: FirstTokenLimit | None = None,
        standby: bool = False,
        start_by: float = 0.0,
        arrived: float = 0.0,
    ) -> Entry[T]:
        """`priority`: lower goes first within the tenant."""
        rank = self._ranks.setdefault(share.rank, _Rank())
        flow = rank.flows.get(tenant)
        if flow is None or (not standby and not flow.firm):  # it has a turn from now on
            start = self._floor(rank) + self._placed(tenant) / share.weight
            before = rank.absent.pop(tenant, 0.0) if flow is None else flow.received
            if flow is None:
                flow = rank.flows[tenant] = _Flow(tenant, share.weight, 0.0)
            flow.received = max(start, before)
        flow.weight = share.weight
        flow.count += 1
        entry = Entry(tenant, max(1, tokens), item, share.rank, limit, standby, start_by, arrived)
        if not standby:
            flow.firm.add(entry)
        self._counter += 1
        late, size = (-start_by, -start_by) if standby else (0.0, entry.tokens)
        heapq.heappush(flow.heap, (standby, priority, late, self._counter, entry))
        heapq.heappush(flow.by_size, (standby, priority, size, self._counter, entry))
        self._by_tenant[tenant] += 1
        return entry

    def _floor(self, rank: _Rank[T]) -> float:
        """What the next tenant received and the workers computed; it never falls."""
        if rank.flows:
            flow = rank.next()
            rank.floor = max(rank.floor, flow.received - self._placed(flow.tenant) / flow.weight)
        return rank.floor

    def charge(self, tenant: str, tokens: int, *, share: Share) -> None:
        """Tokens of an answer were received. It has an effect only while requests of the rank wait: idle capacity costs
        no turn."""
        rank = self._ranks.get(share.rank)
        if rank is None:
            return
        if (flow := rank.flows.get(tenant)) is not None:
            flow.received += tokens / flow.weight
        else:
            received = max(self._floor(rank), rank.absent.get(tenant, 0.0))
            rank.absent[tenant] = received + tokens / share.weight

    def remove(self, entry: Entry[T]) -> None:
        """Stop waiting, without cost to the tenant. Idempotent, also after it was taken."""
        if entry.gone:
            return
        entry.gone = True
        self._by_tenant[entry.tenant] -= 1
        if not self._by_tenant[entry.tenant]:
            del self._by_tenant[entry.tenant]
        rank = self._ranks[entry.rank]
        flow = rank.flows[entry.tenant]
        flow.count -= 1
        flow.firm.discard(entry)
        if not flow.count:
            rank.absent[entry.tenant] = rank.flows.pop(entry.tenant).received
            if not rank.flows:  # start anew: what was received only matters while requests wait
                del self._ranks[entry.rank]
        else:
            flow.compact()

    def tenants(self) -> list[str]:
        """Those with waiting requests."""
        return list(self._by_tenant)

    def firm(self, tenant: str) -> list[Entry[T]]:
        """The tenant's entries that are not on standby, in no order."""
        return [entry for rank in self._ranks.values() if (flow := rank.flows.get(tenant)) for entry in flow.firm]

    def on_standby(self, tenant: str) -> list[Entry[T]]:
        """The tenant's others, in the order in which they would go."""
        flows = (rank.flows[tenant] for _, rank in sorted(self._ranks.items()) if tenant in rank.flows)
        return [one[-1] for flow in flows for one in sorted(flow.heap) if one[-1].standby and not one[-1].gone]

    def shares(self, tenant: str, weight: float) -> dict[str, float]:
        """Weights of the tenants with waiting requests, and of this one."""
        flows = (flow for rank in self._ranks.values() for flow in rank.flows.values())
        return {flow.tenant: flow.weight for flow in flows} | {tenant: weight}

    def next(self) -> Entry[T] | None:
        """The next entry; it keeps waiting. None: none waits."""
        return self._ranks[min(self._ranks)].next().head() if self._ranks else None

    def take(self, entry: Entry[T] | None = None, *, before: Entry[T] | None = None) -> Entry[T] | None:
        """Remove this entry (else the next one) and charge it. `before`: the entry whose turn it is, if another. None:
        none waits."""
        entry = entry or self.next()
        if entry is not None:
            flow = self._ranks[entry.rank].flows[entry.tenant]
            flow.received += entry.tokens / flow.weight
            self.remove(entry)
            if before is not None and before is not entry and before.tenant == entry.tenant:
                before.passed += entry.tokens
        return entry

    def may_pass(self, turn: Entry[T]) -> Iterator[Entry[T]]:
        """Entries that may pass `turn`: of its tenant shorter ones, up to its own cost and the slack; of each other
        tenant that did not receive too much the next and the shortest."""
        rank = self._ranks[turn.rank]
        flow = rank.flows[turn.tenant]
        shortest = flow.shortest()
        if shortest.tokens < turn.tokens and turn.passed <= turn.tokens + self._slack:
            yield shortest
        most = flow.received + self._slack + turn.tokens / flow.weight
        for other in sorted(rank.flows.values(), key=lambda other: other.received):
            if other is not flow:
                yield from (e for e in (other.head(), other.shortest()) if self._received_before(other, e, most))

    def _received_before(self, flow: _Flow[T], entry: Entry[T], most: float) -> bool:
        """Whether the tenant received at most `most`, without what is placed and computed after the entry."""
        return (
            flow.received <= most or flow.received - self._placed(flow.tenant, above=entry.tokens) / flow.weight <= most
        )
