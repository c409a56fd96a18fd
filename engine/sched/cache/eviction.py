"""Which block leaves a tier below the first one: by predicted value, what it saves, times the probability that it is used again,
by its bytes. Pure; a pool's tiers and the benchmark of orders use the same objects.

All blocks of a tier have the same bytes, and computing one costs about the same: the probability decides. A block is of no use
without those before it, so of one prompt the last block leaves first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Protocol

from diptych.engine.sched.cache.retention import UNCLAIMED, Claims


class TierOrder(Protocol):
    """The blocks of a tier, by key."""

    def __len__(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...

    def __iter__(self) -> Iterator[bytes]: ...

    def used(self, keys: Sequence[bytes], use: int) -> None:
        """A request begins with these blocks; those that are not here are passed over. Args: use: its number, rising."""
        ...

    def add(self, key: bytes, use: int, index: int) -> None:
        """It enters the tier, or enters it once more. Args: use: of the request that used it last. index: in its prompt."""
        ...

    def remove(self, key: bytes) -> bool:
        """Returns: whether it was here."""
        ...

    def pop(self, protected: Container[bytes] = ()) -> bytes | None:
        """The one that leaves first, but for protected ones; None: there is none."""
        ...

    def of_claimed(self) -> TierOrder:
        """An empty order for those blocks of the same tier that are claimed alike."""
        ...


class OldestArrivalFirst:
    """The block that entered the tier longest ago leaves first: least recently used, where a use is an eviction from the tier
    above."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def used(self, keys: Sequence[bytes], use: int) -> None:
        """Changes nothing."""

    def add(self, key: bytes, use: int, index: int) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None

    def remove(self, key: bytes) -> bool:
        return self._keys.pop(key, self) is not self

    def pop(self, protected: Container[bytes] = ()) -> bytes | None:
        key = next((key for key in self._keys if key not in protected), None)
        if key is not None:
            del self._keys[key]
        return key

    def of_claimed(self) -> TierOrder:
        return OldestArrivalFirst()


class _ByUse:
    """Blocks in groups: those whose last use is one request, in the order of their tokens."""

    def __init__(self) -> None:
        self._place: dict[bytes, tuple[int, int]] = {}
        """By key: use, and index."""
        self._groups: dict[int, list[tuple[int, bytes]]] = {}
        """By use, in the order in which they began: index and key, ascending."""

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, key: bytes) -> bool:
        return key in self._place

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._place)

    def of_claimed(self) -> TierOrder:
        return OldestUseLastBlockFirst()

    def _enter(self, key: bytes, use: int, index: int) -> None:
        self._place[key] = use, index
        group = self._groups.setdefault(use, [])
        if group and group[-1] > (index, key):
            insort(group, (index, key))
        else:
            group.append((index, key))

    def _leave(self, key: bytes) -> int:
        """Returns: its use."""
        use, index = self._place.pop(key)
        group = self._groups[use]
        del group[-1 if group[-1] == (index, key) else bisect_left(group, (index, key))]
        if not group:
            del self._groups[use]
        return use

    def _last_of(self, use: int, protected: Container[bytes]) -> bytes | None:
        return next((key for _, key in reversed(self._groups[use]) if key not in protected), None)


class OldestUseLastBlockFirst(_ByUse):
    """The blocks of the request that used them longest ago leave first, the last block of a prompt before the first one.

    use 7: a b c d      use 9: a b e      ->  d, c, e, b, a
    """

    def used(self, keys: Sequence[bytes], use: int) -> None:
        for index, key in enumerate(keys):
            if key in self._place:
                self.add(key, use, index)

    def add(self, key: bytes, use: int, index: int) -> None:
        if key in self._place:
            if self._place[key][0] >= use:
                return
            self._leave(key)
        self._enter(key, use, index)

    def remove(self, key: bytes) -> bool:
        if key not in self._place:
            return False
        self._leave(key)
        return True

    def pop(self, protected: Container[bytes] = ()) -> bytes | None:
        key = next((key for use in self._groups if (key := self._last_of(use, protected)) is not None), None)
        if key is not None:
            self._leave(key)
        return key


class Uses:
    """How often, and when, requests have used a block, and where it is in its prompt: of the blocks of a worker's tiers, and of
    some that have left them.

    Args: most: blocks that are remembered; those that were used longest ago are forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[bytes, tuple[int, int, int]] = {}

    def used(self, keys: Sequence[bytes], use: int, first: int = 0) -> None:
        """Args: first: index of keys[0]."""
        of = self._of
        for index, key in enumerate(keys, first):
            count = of.pop(key, (0, 0, 0))[0]
            of[key] = count + 1, use, index
        while len(of) > self._most:
            del of[next(iter(of))]

    def of(self, key: bytes) -> tuple[int, int, int]:
        """How often; the number of the last request; its index. (1, 0, 0): it is not known."""
        return self._of.get(key, (1, 0, 0))


class ClaimedLast:
    """The claims on the blocks of a tier below the first one, and the order in which these leave: by the level of their claims
    (retention.py), and among those of one level by an order of their own.

    Args: unclaimed: the order of what is not claimed. most: blocks that may be claimed at one time.
    """

    def __init__(self, unclaimed: TierOrder, most: int) -> None:
        self.claims: Claims[bytes] = Claims(most, self._move)
        self._orders: dict[int, TierOrder] = {UNCLAIMED: unclaimed}
        self._ascending = [UNCLAIMED]
        self._levels: dict[bytes, int] = {}
        """Of the blocks here that are not at UNCLAIMED."""
        self._place: dict[bytes, tuple[int, int]] = {}
        """By key: use, and index."""

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, key: bytes) -> bool:
        return key in self._place

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._place)

    def used(self, keys: Sequence[bytes], use: int) -> None:
        for index, key in enumerate(keys):
            if key in self._place:
                self._place[key] = use, index
        for order in self._orders.values():
            if len(order):
                order.used(keys, use)

    def add(self, key: bytes, use: int, index: int) -> None:
        if key not in self._place and (level := self.claims.level(key)) != UNCLAIMED:
            self._levels[key] = level
        self._place[key] = max(self._place.get(key, (use, index)), (use, index))
        self._at(self._levels.get(key, UNCLAIMED)).add(key, use, index)

    def remove(self, key: bytes) -> bool:
        if self._place.pop(key, None) is None:
            return False
        return self._at(self._levels.pop(key, UNCLAIMED)).remove(key)

    def pop(self, protected: Container[bytes] = ()) -> bytes | None:
        for level in self._ascending:
            if (key := self._orders[level].pop(protected)) is not None:
                del self._place[key]
                self._levels.pop(key, None)
                self.claims.gone(key, evicted=True)
                return key
        return None

    def _move(self, key: bytes, level: int) -> None:
        """A claim has begun or ended; nothing happens where the block is not here."""
        place = self._place.get(key)
        if place is not None and self._levels.get(key, UNCLAIMED) != level:
            self._at(self._levels.pop(key, UNCLAIMED)).remove(key)
            if level != UNCLAIMED:
                self._levels[key] = level
            self._at(level).add(key, *place)

    def _at(self, level: int) -> TierOrder:
        if level not in self._orders:
            self._orders[level] = self._orders[UNCLAIMED].of_claimed()
            self._ascending = sorted(self._orders)
        return self._orders[level]


_AGES = 20
"""Buckets of ages, in requests: 1, 2 to 3, 4 to 7, and so on."""
_CLASSES = 5
"""A block's class is how often its prompt's beginning was used: once, 2 or 3 times, 4 to 7, 8 to 15, more often."""
_PRIOR = 32.0
"""Blocks that were seen, before any was, to be reused at the rate that makes an order by age alone."""
_FRESH = 64
"""So many changes are noted before rates are computed again."""
_HALVED = 1 << 16
"""After so many, what was seen before counts half."""


class ReuseRates:
    """How probable it is that a block is used at the next request, by its class and age. From blocks that were used again, and
    from those that left before they were: how long each was there unused."""

    def __init__(self) -> None:
        self._reused = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._left = [[0.0] * _AGES for _ in range(_CLASSES)]
        """Blocks whose time unused has ended at this age."""
        self._time = [[0.0] * _AGES for _ in range(_CLASSES)]
        """That they were in this bucket."""
        self._num_noted = 0
        self._rates: list[list[float]] = []

    def note(self, of_class: int, age: int, *, reused: bool) -> None:
        bucket = _bucket(age)
        self._left[of_class][bucket] += 1
        self._time[of_class][bucket] += age - (1 << bucket) + 1
        self._reused[of_class][bucket] += reused
        self._num_noted += 1
        if self._num_noted % _FRESH == 0:
            self._rates = []
        if self._num_noted == _HALVED:
            self._num_noted = 0
            for table in (self._reused, self._left, self._time):
                for row in table:
                    row[:] = [value / 2 for value in row]

    def rate(self, of_class: int, age: int) -> float:
        if not self._rates:
            self._rates = [self._row(row) for row in range(_CLASSES)]
        return self._rates[of_class][_bucket(age)]

    def _row(self, of_class: int) -> list[float]:
        later = [*accumulate(reversed(self._left[of_class])), 0.0]
        rates = []
        for bucket in range(_AGES):
            width = 1 << bucket
            passed = later[_AGES - 1 - bucket] - self._left[of_class][bucket]
            time = self._time[of_class][bucket] + width * passed
            rates.append((self._reused[of_class][bucket] + _PRIOR) / (time + _PRIOR * 2 * width))
        return rates


class PredictedValue(_ByUse):
    """The block whose reuse is least probable leaves first, by the rates that were seen for blocks of its class and age.

    The blocks whose last use is one request leave together, the last one first. Their class is that of the first of them that is
    here: of a conversation in its fifth turn it was used five times, of a prompt that came once, once.
    """

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self._uses = uses
        self._rates = ReuseRates()
        self._class_of: dict[int, int] = {}
        """By use."""
        self._oldest: list[list[int]] = [[] for _ in range(_CLASSES)]
        """By class: a heap of uses, among them some that are of this class no more."""
        self._now = 0

    def used(self, keys: Sequence[bytes], use: int) -> None:
        self._now = max(self._now, use)
        changed = {use: None}
        for index, key in enumerate(keys):
            if key in self._place and (before := self._place[key][0]) < use:
                self._rates.note(self._class_of[before], use - before, reused=True)
                changed[self._leave(key)] = None
                self._enter(key, use, index)
        for one in changed:
            self._classify(one)

    def add(self, key: bytes, use: int, index: int) -> None:
        if key not in self._place:
            self._enter(key, use, index)
            self._classify(use)

    def remove(self, key: bytes) -> bool:
        if key not in self._place:
            return False
        self._classify(self._leave(key))
        return True

    def pop(self, protected: Container[bytes] = ()) -> bytes | None:
        passed: list[int] = []
        key = None
        while key is None and (use := self._least()) is not None:
            key = self._last_of(use, protected)
            if key is None:
                passed.append(use)
                del self._class_of[use]
            else:
                self._rates.note(self._class_of[use], max(1, self._now - use), reused=False)
                self.remove(key)
        for use in passed:
            self._classify(use)
        return key

    def _least(self) -> int | None:
        """The use whose blocks are worth least."""
        best: tuple[float, int] | None = None
        for of_class, heap in enumerate(self._oldest):
            while heap and self._class_of.get(heap[0]) != of_class:
                heappop(heap)
            if heap:
                found = self._rates.rate(of_class, max(1, self._now - heap[0])), heap[0]
                best = found if best is None else min(best, found)
        return None if best is None else best[1]

    def _classify(self, use: int) -> None:
        """By its first block."""
        group = self._groups.get(use)
        if group is None:
            self._class_of.pop(use, None)
            return
        count = self._uses.of(group[0][1])[0]
        of_class = min(count.bit_length(), _CLASSES) - 1
        if self._class_of.get(use) != of_class:
            self._class_of[use] = of_class
            heappush(self._oldest[of_class], use)


def _bucket(age: int) -> int:
    return min(age.bit_length(), _AGES) - 1


def tier_orders(name: str, num_blocks: int) -> tuple[Uses | None, TierOrder, TierOrder]:
    """What the orders need of the requests (None: nothing), and those of host memory and of files.

    Args:
        name: of TIER_EVICTIONS. lru: what entered host memory longest ago, and of files the last blocks of the request that is
            longest ago; value: the block whose reuse is least probable, by what was seen.
        num_blocks: of all tiers; 0: there are none below the first.
    """
    if name == "lru" or not num_blocks:
        return None, OldestArrivalFirst(), OldestUseLastBlockFirst()
    uses = Uses(2 * num_blocks)
    return uses, PredictedValue(uses), PredictedValue(uses)
