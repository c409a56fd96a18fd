"""How long blocks stay in the prefix cache: counted in buckets as it happens, so that a scrape reads a few numbers.

    stored ---> unused ---> reused (a gap) ---> unused ---> evicted (a lifetime, and how long it was unused)

The caller sets `now` before each step; a block that is freed at the end of a step counts from the step's beginning.
"""

from __future__ import annotations

from bisect import bisect_left

from diptych.engine.stats import AGE_BUCKETS_S, Ages, BlockAgeStats


class _Counts:
    def __init__(self) -> None:
        self.buckets = [0] * (len(AGE_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(AGE_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


class BlockAges:
    """Of the blocks 0 .. num_blocks-1 of one pool."""

    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        self._stored = [0.0] * num_blocks
        self._idle_since = [0.0] * num_blocks
        self._lifetime, self._idle, self._reuse_gap = _Counts(), _Counts(), _Counts()
        self._snapshot: BlockAgeStats | None = None
        self.num_evicted = 0

    def stored(self, block: int) -> None:
        """It entered the cache."""
        self._stored[block] = self.now

    def released(self, block: int) -> None:
        """Its last owner freed it; the cache keeps it."""
        self._idle_since[block] = self.now

    def reused(self, block: int) -> None:
        """A hit on a block that no request used."""
        self._reuse_gap.add(self.now - self._idle_since[block])
        self._snapshot = None

    def idle_since(self, block: int) -> float:
        """When its last owner freed it."""
        return self._idle_since[block]

    def evicted(self, block: int) -> None:
        """It was evicted."""
        self.num_evicted += 1
        self._lifetime.add(self.now - self._stored[block])
        self._idle.add(self.now - self._idle_since[block])
        self._snapshot = None

    def stats(self) -> BlockAgeStats:
        """Everything so far; the same object until something changes."""
        if self._snapshot is None:
            parts = (self._lifetime, self._idle, self._reuse_gap)
            self._snapshot = BlockAgeStats(*(Ages(tuple(part.buckets), part.sum_s) for part in parts))
        return self._snapshot
