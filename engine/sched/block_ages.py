"""How long blocks live in the prefix cache: counted where it happens, in buckets, so that a scrape reads a few numbers.

    stored ---> held by nobody ---> reused (a gap) ---> held by nobody ---> evicted (a lifetime, and how long it was idle)

Times are the caller's, who sets `now` before each step; a block that comes back at the end of a step counts from its beginning.
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
        self._told: BlockAgeStats | None = None

    def stored(self, block: int) -> None:
        """It entered the cache."""
        self._stored[block] = self.now

    def let_go(self, block: int) -> None:
        """Its last owner gave it back; the cache keeps it."""
        self._idle_since[block] = self.now

    def reused(self, block: int) -> None:
        """A hit on a block that nobody held."""
        self._reuse_gap.add(self.now - self._idle_since[block])
        self._told = None

    def evicted(self, block: int) -> None:
        """Its place was needed."""
        self._lifetime.add(self.now - self._stored[block])
        self._idle.add(self.now - self._idle_since[block])
        self._told = None

    def stats(self) -> BlockAgeStats:
        """Everything so far; the same object until something changes."""
        if self._told is None:
            parts = (self._lifetime, self._idle, self._reuse_gap)
            self._told = BlockAgeStats(*(Ages(tuple(part.buckets), part.sum_s) for part in parts))
        return self._told
