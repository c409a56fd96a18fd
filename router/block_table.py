"""Block keys and which workers hold them, in flat numpy tables: 33 bytes a slot for up to 64 workers, 41 with a host tier.

    key (lo, hi) --lo & mask, hi & mask--> two buckets of 8 slots; a key lies in one of the 16

A key goes into the emptier bucket; when both are full the table doubles (bucket b splits into b and b + n, so that doubling
needs no search). There is no probing beyond the two, so that removing leaves no tombstone. Bit c of a slot's mask says that
the worker of column c holds the block in that tier. Keys are digests: their bits are evenly spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.common.block_identity import KEY_BYTES

DEVICE, HOST = 0, 1
NUM_TIERS = 2
_WAYS = 8
_WORD = 64
_CHUNK = 128
"""Keys that are looked up at once; below 256, so that runs inside a chunk are counted in bytes."""
_EVEN = np.arange(0, 2 * _CHUNK, 2)
_TOUCH_EVERY = 4
"""One lookup in four marks what it found: enough to tell the hot from the cold, and a quarter of the writes."""
_MIN_LOAD = 1 / 16
"""Below this load an overflow is no reason to grow: the keys are not evenly spread, and one is dropped."""
_MAX_STAMP = 2**32 - 2**20

Keys = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def as_keys(keys: Sequence[bytes]) -> Keys:
    """[n, 2] of the two halves of each key."""
    return np.frombuffer(b"".join(keys), dtype=np.uint64).reshape(-1, 2)


@dataclass(slots=True)
class Runs:
    """By column: how many leading keys the worker holds in any tier, and how many of those in its host tier only (None:
    there is no host tier)."""

    blocks: Ints
    host_blocks: Ints | None


class BlockTable:
    """`counts`: [tier, column], blocks held."""

    def __init__(self, num_buckets: int = 64) -> None:
        self._num_buckets = num_buckets
        self._lo = np.zeros((num_buckets, _WAYS), np.uint64)
        self._hi = np.zeros((num_buckets, _WAYS), np.uint64)
        self._tag = np.zeros((num_buckets, _WAYS), np.uint32)  # the upper half of lo: a lookup reads nothing else
        self._used = np.zeros((num_buckets, _WAYS), np.bool_)
        self._stamp = np.zeros(num_buckets * _WAYS, np.uint32)
        self._words = 1
        # By tier, a mask of [slots] for each 64 workers; the host tier's only once it is used.
        self._masks: list[list[Keys]] = [self._no_masks(), []]
        self._now = 1
        self._num_lookups = 0
        self.counts = np.zeros((NUM_TIERS, _WORD), np.int64)
        self.num_dropped = 0

    def _no_masks(self) -> list[Keys]:
        return [np.zeros(self._num_buckets * _WAYS, np.uint64) for _ in range(self._words)]

    @property
    def num_keys(self) -> int:
        return int(np.count_nonzero(self._used))

    @property
    def nbytes(self) -> int:
        arrays: list[Any] = [self._lo, self._hi, self._tag, self._used, self._stamp]
        arrays += self._masks[DEVICE] + self._masks[HOST]
        return sum(array.nbytes for array in arrays)

    def reserve_columns(self, num_columns: int) -> None:
        """Make room for workers of columns below `num_columns`."""
        words = -(-num_columns // _WORD)
        if words > self._words:
            more = words - self._words
            self._words = words
            for masks in filter(None, self._masks):
                masks += [np.zeros(self._num_buckets * _WAYS, np.uint64) for _ in range(more)]
            self.counts = np.pad(self.counts, ((0, 0), (0, more * _WORD)))

    # ---- finding -------------------------------------------------------------------------------------------------

    def _find(self, keys: Keys) -> tuple[Ints, Bools]:
        """(slot of each key, whether the key is there); the slot of a missing key means nothing."""
        buckets = (keys & np.uint64(self._num_buckets - 1)).view(np.int64)
        shown = self._lo.take(buckets, axis=0).reshape(len(keys), 2 * _WAYS)
        place = (shown == keys[:, :1]).argmax(axis=1)
        slots = np.where(place < _WAYS, buckets[:, 0] * _WAYS, buckets[:, 1] * _WAYS - _WAYS) + place
        found = (self._lo.ravel().take(slots) == keys[:, 0]) & (self._hi.ravel().take(slots) == keys[:, 1])
        return slots, found & self._used.ravel().take(slots)

    def runs(self, keys: Keys) -> Runs:
        """How far each worker's blocks reach into `keys`; now and then marks what was found as lately used.

        In the two buckets, which the low bits name, 32 more bits are compared: once in some hundred million keys a wrong match
        adds a block to an estimate. Changes compare whole keys.
        """
        self._num_lookups += 1
        blocks = np.zeros(self._words * _WORD, np.int64)
        host_masks = self._masks[HOST] if self._masks[HOST] and self.counts[HOST].any() else None
        host_blocks = np.zeros_like(blocks) if host_masks is not None else None
        low_bits = np.uint64(self._num_buckets - 1)
        tags = keys.view(np.uint32)[:, 1:2]
        alive: list[Any] = [None] * self._words
        for start in range(0, len(keys), _CHUNK):
            part = keys[start : start + _CHUNK]
            wanted = tags[start : start + _CHUNK]
            buckets = (part & low_bits).view(np.int64)
            same = self._tag.take(buckets, axis=0).reshape(len(part), 2 * _WAYS) == wanted
            place = same.argmax(axis=1)
            slots = buckets.ravel().take((place >> 3) + _EVEN[: len(part)])
            slots <<= 3
            slots += place & 7
            found = self._tag.ravel().take(slots) == wanted[:, 0]
            depth = 0
            for word in range(self._words):
                device = self._masks[DEVICE][word].take(slots)
                masks = device if host_masks is None else device | host_masks[word].take(slots)
                masks *= found
                if alive[word] is not None:
                    masks[0] &= alive[word]
                held = np.bitwise_and.accumulate(masks)
                columns = slice(word * _WORD, (word + 1) * _WORD)
                blocks[columns] += _count(held)
                if host_blocks is not None:
                    host_blocks[columns] += _count(held & ~device)
                depth = max(depth, int(np.count_nonzero(held)))
                alive[word] = held[-1]
            if self._num_lookups % _TOUCH_EVERY == 0:
                self._touch(slots[:depth])
            if depth < len(part):
                break
        return Runs(blocks, host_blocks)

    def _touch(self, slots: Ints) -> None:
        """Lately used, the first ones most: a chain is forgotten from its end."""
        if self._now > _MAX_STAMP:
            self._stamp >>= 1
            self._now >>= 1
        self._now += len(slots)
        if len(slots):
            self._stamp[slots] = np.arange(self._now, self._now - len(slots), -1)

    def keys_of(self, column: int, tier: int = DEVICE) -> Keys:
        """[n, 2], in no order."""
        slots = self._slots_of(column, (tier,))
        return np.stack((self._lo.ravel()[slots], self._hi.ravel()[slots]), axis=1)

    def _slots_of(self, column: int, tiers: Sequence[int]) -> Ints:
        word, bit = column // _WORD, np.uint64(1 << column % _WORD)
        held = np.zeros(self._num_buckets * _WAYS, np.bool_)
        for tier in tiers:
            if self._masks[tier]:
                held |= (self._masks[tier][word] & bit) != 0
        return np.flatnonzero(held)

    # ---- changing ------------------------------------------------------------------------------------------------

    def add(self, keys: Keys, column: int, tier: int = DEVICE) -> None:
        """The worker holds these blocks; parents before their children. Repeats are harmless."""
        if not self._masks[tier]:
            self._masks[tier] = self._no_masks()
        while len(keys):
            slots, found = self._find(keys)
            self._hold(slots[found], column, tier)
            keys = keys[~found]
            if not len(keys):
                return
            slots, free = self._free_slots(keys)
            if not free.all():
                if np.count_nonzero(self._used) < self._num_buckets * _WAYS * _MIN_LOAD:
                    self.num_dropped += int(np.count_nonzero(~free))
                    keys, slots = keys[free], slots[free]
                else:
                    self._grow()
                    continue
            slots, first = np.unique(slots, return_index=True)
            self._lo.ravel()[slots], self._hi.ravel()[slots] = keys[first, 0], keys[first, 1]
            self._tag.ravel()[slots] = keys[first, 0] >> np.uint64(32)
            self._used.ravel()[slots] = True
            order = np.argsort(first)  # the order of the keys, for the stamps
            self._hold(slots[order], column, tier)
            rest = np.ones(len(keys), np.bool_)
            rest[first] = False
            keys = keys[rest]

    def _free_slots(self, keys: Keys) -> tuple[Ints, Bools]:
        """(a free slot in the emptier bucket of each key, whether there is one)."""
        buckets = (keys & np.uint64(self._num_buckets - 1)).view(np.int64)
        used = self._used.take(buckets, axis=0)  # [n, 2, ways]
        fill = used.sum(axis=2)
        which = (fill[:, 1] < fill[:, 0]).astype(np.int64)
        rows = np.arange(len(keys))
        slots = buckets[rows, which] * _WAYS + used[rows, which].argmin(axis=1)
        return slots, fill[rows, which] < _WAYS

    def _hold(self, slots: Ints, column: int, tier: int) -> None:
        word, bit = column // _WORD, np.uint64(1 << column % _WORD)
        mask = self._masks[tier][word]
        fresh = slots[(mask[slots] & bit) == 0]
        if len(fresh):
            self.counts[tier, column] += len(np.unique(fresh))
            mask[fresh] |= bit
        self._touch(slots)

    def remove(self, keys: Keys, column: int, tier: int = DEVICE) -> None:
        if self._masks[tier] and len(keys):
            slots, found = self._find(keys)
            self._release(np.unique(slots[found]), column, (tier,))

    def clear(self, column: int, tiers: Sequence[int] = (DEVICE, HOST)) -> None:
        self._release(self._slots_of(column, tiers), column, tiers)

    def trim(self, column: int, keep: int) -> None:
        """Forget the least lately used blocks of a worker until at most `keep` are left. Scans the table."""
        slots = self._slots_of(column, (DEVICE, HOST))
        excess = len(slots) - keep
        if excess > 0:
            oldest = np.argpartition(self._stamp[slots], excess - 1)[:excess]
            self._release(slots[oldest], column, (DEVICE, HOST))

    def _release(self, slots: Ints, column: int, tiers: Sequence[int]) -> None:
        """`slots`: without repeats."""
        word, bit = column // _WORD, np.uint64(1 << column % _WORD)
        for tier in tiers:
            if self._masks[tier]:
                mask = self._masks[tier][word]
                held = slots[(mask[slots] & bit) != 0]
                mask[held] &= ~bit
                self.counts[tier, column] -= len(held)
        used = np.zeros(len(slots), np.bool_)
        for mask in (*self._masks[DEVICE], *self._masks[HOST]):
            used |= mask[slots] != 0
        self._used.ravel()[slots] = used
        gone = slots[~used]  # a free slot must not hide a key that lives in the other bucket
        self._lo.ravel()[gone] = self._hi.ravel()[gone] = 0
        self._tag.ravel()[gone] = 0

    def _grow(self) -> None:
        old, slots = self._num_buckets, np.flatnonzero(self._used.ravel())
        lo, hi, stamp = self._lo.ravel()[slots], self._hi.ravel()[slots], self._stamp[slots]
        in_first = (lo & np.uint64(old - 1)).view(np.int64) == slots // _WAYS
        buckets = np.where(in_first, lo, hi) & np.uint64(2 * old - 1)
        to = buckets.view(np.int64) * _WAYS + slots % _WAYS
        self._num_buckets = 2 * old
        self._lo, self._hi = (np.zeros((2 * old, _WAYS), np.uint64) for _ in range(2))
        self._used, self._stamp = np.zeros((2 * old, _WAYS), np.bool_), np.zeros(2 * old * _WAYS, np.uint32)
        self._tag = np.zeros((2 * old, _WAYS), np.uint32)
        self._tag.ravel()[to] = lo >> np.uint64(32)
        self._lo.ravel()[to], self._hi.ravel()[to], self._stamp[to] = lo, hi, stamp
        self._used.ravel()[to] = True
        for tier, masks in enumerate(self._masks):
            if masks:
                self._masks[tier] = self._no_masks()
                for new, mask in zip(self._masks[tier], masks, strict=True):
                    new[to] = mask[slots]


def _count(held: Keys) -> npt.NDArray[np.uint8]:
    """[keys] of masks -> [64], how many keys' masks have the bit. Eight counters, of a byte each, are added at once."""
    bits = np.unpackbits(held.view(np.uint8), bitorder="little").view(np.uint64).reshape(-1, _WAYS)
    counted: Keys = np.add.reduce(bits, axis=0)
    return counted.view(np.uint8)


def to_bytes(keys: Keys) -> list[bytes]:
    raw = np.ascontiguousarray(keys).tobytes()
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]
