"""The tier below the prefix cache: slots in host memory, each for one block. Ownership only; the runner has the bytes.

free --store--> cached (has a key) --evict--> free
free/cached --take--> held by a swapped request --give--> free

free + cached + held == total

What requests claim leaves last (retention.py). Most of it is above when it is claimed, and brings its claim along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from diptych.common.request import CacheClaim
from diptych.common.tiers import HOST
from diptych.engine.messages import TierEvicted, TierStored
from diptych.engine.sched.cache.eviction import ClaimedLast, OldestArrivalFirst, TierOrder
from diptych.engine.sched.cache.retention import Claims
from diptych.engine.sched.cache.tier_events import TierEvents


class HostTier:
    """Args: num_slots: 0: everything is refused. order: of evictions of what nobody claims; None: the block leaves first that
    came first. claim_share: part of the slots whose blocks requests may claim."""

    name = HOST

    def __init__(self, num_slots: int, order: TierOrder | None = None, claim_share: float = 0.0) -> None:
        self.num_slots = num_slots
        unclaimed = OldestArrivalFirst() if order is None else order  # an empty one is false
        self._order = ClaimedLast(unclaimed, int(claim_share * num_slots))
        self._claims = self._order.claims
        self._above: Claims[bytes] = Claims(math.inf)
        """On blocks of the tier above, which may come here: the share counts what is here."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._cached: dict[bytes, int] = {}
        self._protected: frozenset[bytes] = frozenset()
        self._num_held = 0
        self._events = TierEvents(self.name)
        self.num_evicted = 0
        """To make room, since the start."""

    @property
    def sequence(self) -> int:
        """Of the last event."""
        return self._events.sequence

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self.num_slots if self.num_slots else 0.0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def keys(self) -> tuple[bytes, ...]:
        return tuple(self._cached)

    # ---- the cache ----

    def store(self, key: bytes, use: int = 0, index: int = 0) -> int | None:
        """The slot to copy an evicted block into; None: the block is stored already, or no slot is available.

        Args: use, index: see TierOrder.add."""
        if key in self._cached:
            self._above.hand_over(key, self._claims)
            self._order.add(key, use, index)
            return None
        if not self._free and not self._evict_one():
            self._above.gone(key, evicted=True)
            return None
        slot = self._free.pop()
        self._cached[key] = slot
        self._above.hand_over(key, self._claims)
        self._order.add(key, use, index)
        self._events.stored((key,))
        return slot

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of the longest stored run of `keys` from its start."""
        found = []
        for key in keys:
            slot = self._cached.get(key)
            if slot is None:
                break
            found.append(slot)
        return found

    def used(self, keys: Sequence[bytes], use: int, session: bytes | None = None) -> None:
        """See DiskTier.used."""
        if self._cached:
            self._order.used(keys, use)
        if session is not None:
            self._claims.used(keys, session)
            self._above.used(keys, session)

    def protect(self, keys: Iterable[bytes]) -> None:
        """These are about to be read: they are not evicted until the next call."""
        self._protected = frozenset(keys)

    def discard(self, key: bytes) -> None:
        """Its content may be wrong, here and above."""
        self._claims.gone(key, evicted=False)
        self._above.gone(key, evicted=False)
        slot = self._cached.pop(key, None)
        if slot is not None:
            self._order.remove(key)
            self._free.append(slot)
            self._events.evicted((key,))

    def clear(self) -> None:
        """Empty the cache and begin a new epoch with the pool's; events that were not taken are dropped. Swapped
        requests keep their slots."""
        self._free.extend(self._cached.values())
        for key in self._cached:
            self._order.remove(key)
        self._cached.clear()
        self._claims.clear()
        self._above.clear()
        self._events.restart()

    # ---- claims ----

    @property
    def has_claims(self) -> bool:
        """On blocks here, or that may come here."""
        return len(self._claims) + len(self._above) > 0

    def claim(self, keys: Iterable[bytes], tenant: str, wanted: CacheClaim, now: float) -> None:
        """Those of the tier above are claimed here once they come. Pass the last block of a sequence first."""
        if self.num_slots:
            self._above.make(keys, tenant, wanted, now)

    def expire(self, now: float) -> None:
        """End the claims whose time is over."""
        self._claims.expire(now)
        self._above.expire(now)

    def close_session(self, session: bytes) -> list[bytes]:
        """See DiskTier.close_session."""
        self._above.close(session)
        mine = self._claims.close(session)
        for key in mine:
            self.discard(key)
        return mine

    # ---- swapped requests ----

    def take(self, count: int) -> list[int] | None:
        """Slots for one request's blocks; None, and nothing is taken, when there are not that many."""
        spare = len(self._free) + sum(key not in self._protected for key in self._cached)
        if count > spare:
            return None
        while len(self._free) < count:
            self._evict_one()
        slots = [self._free.pop() for _ in range(count)]
        self._num_held += count
        return slots

    def give(self, slots: Iterable[int]) -> None:
        before = len(self._free)
        self._free.extend(slots)
        self._num_held -= len(self._free) - before

    # ---- events and the law ----

    def take_events(self) -> list[TierStored | TierEvicted]:
        return self._events.take()

    def check(self, held: Iterable[int], is_above: Callable[[bytes], bool] = lambda key: True) -> list[str]:
        """Args: held: slots of swapped requests, by the requests' account. is_above: whether the tier above has a block."""
        slots = [*self._free, *self._cached.values(), *held]
        out = []
        if len(slots) != self.num_slots or len(set(slots)) != self.num_slots:
            out.append(f"host tier: {len(slots)} places for {self.num_slots} slots, {len(set(slots))} distinct")
        if len(self._free) + len(self._cached) + self._num_held != self.num_slots:
            out.append("host tier: free + cached + held != total")
        if set(self._cached) != set(self._order):
            out.append(f"host tier: {len(self._cached)} blocks, {len(self._order)} in the order of eviction")
        broken = [*self._claims.violations(self._cached.__contains__), *self._above.violations(is_above)]
        return out + [f"host tier: {one}" for one in broken]

    def _evict_one(self) -> bool:
        key = self._order.pop(self._protected)
        if key is None:
            return False
        self._free.append(self._cached.pop(key))
        self._events.evicted((key,))
        self.num_evicted += 1
        return True
