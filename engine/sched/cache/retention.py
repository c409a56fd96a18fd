"""Which cached item is evicted next, and the claims of requests that delay it (docs/decisions/retention.md). Pure: a pool has
blocks for items, the simulator keys.

    unclaimed --claim--> claimed --its time is over, its session is closed--> let go --next use--> unclaimed
        ^                   | +--evicted, because nothing else was left
        +--over the share---+

Evicted first is what was let go, then what is unclaimed, then what is claimed, by rising priority; among equals the one that
was used longest ago. A claim changes this order and nothing else: a claimed item that nobody uses is as good as a free one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, KeysView
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from diptych.common.request import CacheClaim
from diptych.engine.stats import ClaimStats

T = TypeVar("T", bound=Hashable)

LET_GO, UNCLAIMED = -1, 0
"""Levels of the order. A claim of priority p has level p + 1."""


class EvictionOrder(Generic[T]):
    """Items that nobody uses, by level and then by the time since which nobody does. O(1), but for the levels in use."""

    def __init__(self) -> None:
        self._levels: dict[int, dict[T, None]] = {UNCLAIMED: {}}
        self._ascending = [UNCLAIMED]
        self._level_of: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def __contains__(self, item: T) -> bool:
        return item in self._level_of

    def __iter__(self) -> Iterator[T]:
        """From the one that is evicted first on."""
        for level in self._ascending:
            yield from self._levels[level]

    def items(self) -> KeysView[T]:
        """In no order."""
        return self._level_of.keys()

    def add(self, item: T, level: int) -> None:
        if level not in self._levels:
            self._levels[level] = {}
            self._ascending = sorted(self._levels)
        self._level_of[item] = level
        self._levels[level][item] = None

    def remove(self, item: T) -> None:
        del self._levels[self._level_of.pop(item)][item]

    def clear(self) -> None:
        self._level_of.clear()
        for items in self._levels.values():
            items.clear()


@dataclass(slots=True, eq=False)
class _Claim(Generic[T]):
    """`session`: empty: none, or several."""

    item: T
    tenant: str
    session: bytes
    priority: int
    rank: int
    until: float
    ended: bool = False


@dataclass(slots=True)
class _Tenant(Generic[T]):
    count: int = 0
    by_priority: dict[int, dict[T, None]] = field(default_factory=dict)
    """Oldest claim first."""


class Claims(Generic[T]):
    """The claims on the items of one pool, inside its share. An item has one claim: what several requests claim keeps the latest
    time and the highest priority of them, and the end of one session does not end it.

    When all claims together exceed `most`, a tenant with more than an equal part of it gives up its least: the lowest priority,
    then the oldest. So one tenant alone may have all of `most`, and n tenants have at least most / n each.

    Args:
        most: items that may be claimed at one time.
        moved: called with each item whose level has changed, and the new one.
    """

    def __init__(self, most: float, moved: Callable[[T, int], None] = lambda item, level: None) -> None:
        self._most = most
        self._moved = moved
        self._claims: dict[T, _Claim[T]] = {}
        self._tenants: dict[str, _Tenant[T]] = {}
        self._sessions: dict[bytes, dict[T, None]] = {}
        """By session, what it alone has claimed."""
        self._due: list[tuple[float, int, _Claim[T]]] = []
        """A heap with one entry for each claim, by a time that is not after its end; and those of claims that have ended."""
        self._counter = 0
        self._ranks: dict[int, int] = {}
        self._made = self._expired = self._evicted = self._over_share = self._closed = 0
        self._snapshot: ClaimStats | None = None

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, item: T) -> bool:
        return item in self._claims

    def level(self, item: T) -> int:
        """Of an item that nobody uses from now on."""
        claim = self._claims.get(item)
        return UNCLAIMED if claim is None else claim.priority + 1

    def make(self, items: Iterable[T], tenant: str, wanted: CacheClaim, now: float) -> None:
        """Claim items from now on. What comes last is given up last: pass the end of a sequence first."""
        until = now + wanted.ttl_s
        for item in items:
            self._add(_Claim(item, tenant, wanted.session, wanted.priority, wanted.rank, until))

    def hand_over(self, item: T, to: Claims[T]) -> None:
        """The item moves to another tier, and its claim with it, within the share of that tier."""
        if (claim := self._claims.get(item)) is not None:
            handed = replace(claim)
            self._end(claim)
            to._add(handed)

    def used(self, items: Iterable[T], session: bytes) -> None:
        """A request of this session, or of none, uses them: what is also of use to others does not end with its session."""
        if self._sessions:
            for item in items:
                claim = self._claims.get(item)
                if claim is not None and claim.session != session:
                    self._leave_session(claim)

    def expire(self, now: float) -> None:
        """End the claims whose time is over."""
        while self._due and self._due[0][0] <= now:
            _, _, claim = heappop(self._due)
            if claim.ended:
                continue
            if claim.until > now:
                self._schedule(claim)
            else:
                self._expired += 1
                self._let_go(claim)

    def close(self, session: bytes) -> list[T]:
        """End the session's claims. Returns: the items that no one else has claimed or used meanwhile."""
        items = list(self._sessions.get(session, ()))
        for item in items:
            self._closed += 1
            self._let_go(self._claims[item])
        return items

    def gone(self, item: T, *, evicted: bool) -> None:
        """The item left the cache."""
        if (claim := self._claims.get(item)) is not None:
            self._evicted += evicted
            self._end(claim)

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._claims.clear()
        self._tenants.clear()
        self._sessions.clear()
        self._due.clear()
        self._ranks = dict.fromkeys(self._ranks, 0)
        self._snapshot = None

    def stats(self, kept: int = 0) -> ClaimStats:
        """Everything so far; the same object until something changes. Args: kept: see ClaimStats."""
        if self._snapshot is None or self._snapshot.kept != kept:
            ranks = tuple(sorted(self._ranks.items()))
            ended = (self._expired, self._evicted, self._over_share, self._closed)
            self._snapshot = ClaimStats(ranks, self._made, *ended, kept)
        return self._snapshot

    def violations(self, cached: Callable[[T], bool]) -> list[str]:
        """Full walk. Args: cached: whether an item is in the cache."""
        out = [f"claims: {item!r} is claimed and not cached" for item in self._claims if not cached(item)]
        if len(self._claims) > self._most:
            out.append(f"claims: {len(self._claims)} of at most {self._most}")
        listed = [one for t in self._tenants.values() for items in t.by_priority.values() for one in items]
        if sorted(map(repr, listed)) != sorted(map(repr, self._claims)):
            out.append("claims: the tenants' lists are wrong")
        if any(t.count != sum(map(len, t.by_priority.values())) or not t.count for t in self._tenants.values()):
            out.append("claims: a tenant's count is wrong")
        if sum(self._ranks.values()) != len(self._claims):
            out.append("claims: the counts by rank are wrong")
        of_sessions = {item: name for name, items in self._sessions.items() for item in items}
        if of_sessions != {item: claim.session for item, claim in self._claims.items() if claim.session}:
            out.append("claims: the sessions' lists are wrong")
        if not {id(claim) for claim in self._claims.values()} <= {id(claim) for _, _, claim in self._due}:
            out.append("claims: one would never expire")
        return out

    # ---- parts ----

    def _add(self, new: _Claim[T]) -> None:
        claim = self._claims.get(new.item)
        if claim is None:
            claim = new
            self._enter(claim)
        else:
            if claim.session != new.session:
                self._leave_session(claim)
            self._unlist(claim)
            claim.priority, claim.until = max(claim.priority, new.priority), max(claim.until, new.until)
            self._list(claim)
        self._moved(claim.item, claim.priority + 1)
        if len(self._claims) > self._most:
            self._give_one_up(new.tenant)
        self._snapshot = None

    def _enter(self, claim: _Claim[T]) -> None:
        self._claims[claim.item] = claim
        self._made += 1
        self._ranks[claim.rank] = self._ranks.get(claim.rank, 0) + 1
        if claim.session:
            self._sessions.setdefault(claim.session, {})[claim.item] = None
        self._list(claim)
        if len(self._due) > 2 * len(self._claims) + 64:
            self._due = [entry for entry in self._due if not entry[2].ended]
            heapify(self._due)
        self._schedule(claim)

    def _schedule(self, claim: _Claim[T]) -> None:
        self._counter += 1
        heappush(self._due, (claim.until, self._counter, claim))

    def _list(self, claim: _Claim[T]) -> None:
        tenant = self._tenants.setdefault(claim.tenant, _Tenant())
        tenant.count += 1
        tenant.by_priority.setdefault(claim.priority, {})[claim.item] = None

    def _unlist(self, claim: _Claim[T]) -> None:
        tenant = self._tenants[claim.tenant]
        items = tenant.by_priority[claim.priority]
        del items[claim.item]
        if not items:
            del tenant.by_priority[claim.priority]
        tenant.count -= 1
        if not tenant.count:
            del self._tenants[claim.tenant]

    def _leave_session(self, claim: _Claim[T]) -> None:
        if claim.session:
            items = self._sessions[claim.session]
            del items[claim.item]
            if not items:
                del self._sessions[claim.session]
            claim.session = b""

    def _give_one_up(self, name: str) -> None:
        if self._tenants[name].count * len(self._tenants) <= self._most:
            name = max(self._tenants, key=lambda other: self._tenants[other].count)
        least = self._tenants[name].by_priority
        self._over_share += 1
        self._let_go(self._claims[next(iter(least[min(least)]))], UNCLAIMED)

    def _let_go(self, claim: _Claim[T], level: int = LET_GO) -> None:
        self._end(claim)
        self._moved(claim.item, level)

    def _end(self, claim: _Claim[T]) -> None:
        claim.ended = True
        del self._claims[claim.item]
        self._unlist(claim)
        self._leave_session(claim)
        left = self._ranks[claim.rank] - 1
        self._ranks[claim.rank] = left  # a class that had claims once keeps its series
        self._snapshot = None
