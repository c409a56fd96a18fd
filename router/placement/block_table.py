"""Block keys and which workers hold them, in flat numpy tables: 33 bytes a slot for up to 64 workers, and 8 more for each lower
tier that is used.

    key (lo, hi) --the low bits of lo, of hi--> two buckets of 8 slots; a key is in one of the 16

A key goes into the emptier bucket. When both are full, one of their keys moves to its other bucket. There is no further
probing, so removal leaves no tombstone. From a load of 0.65 on every added key splits a bucket (linear hashing: bucket
b splits into b and b + round, in order) until all are split, so that no call pays for a doubling. The arrays have their
largest size from the start; untouched memory costs nothing. Bit c of a slot's mask says that the worker of column c
holds the block in that tier. Keys are digests, so their bits are evenly spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.common.block_identity import KEY_BYTES
from diptych.common.tiers import TIERS
from diptych.router.placement.native.lookup import Found, NativeLookup

NUM_TIERS = len(TIERS)
_ALL_TIERS = tuple(range(NUM_TIERS))
_WAYS = 8
_WORD = 64
_CHUNK = 128
"""Keys looked up at once; below 256, so that run lengths inside a chunk fit into a byte."""
_ROWS = np.arange(_CHUNK)
_TOUCH_EVERY = 4
"""One lookup in four marks its blocks as used: enough to tell hot from cold, with a quarter of the writes."""
_MAX_LOAD = 0.65
"""Share of used slots from which buckets are split; with two choices a full pair of buckets is then rare."""
_MIN_LOAD = 1 / 16
"""Below this load an overflow means unevenly spread keys: one is dropped instead of growing."""
_MIN_SPLITS = 32
_MAX_STAMP = 2**32 - 2**20

Keys = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def as_keys(keys: Sequence[bytes]) -> Keys:
    """[n, 2]: the two halves of each key."""
    return np.frombuffer(b"".join(keys), dtype=np.uint64).reshape(-1, 2)


@dataclass(slots=True)
class Runs:
    """By column: how many leading keys the worker holds in any tier. `lower_blocks`: [lower tier, column]: how many of
    them lie in this tier and in no nearer one; None: none does. `any`: somebody holds the first one."""

    blocks: Ints
    lower_blocks: Ints | None
    any: bool


class BlockTable:
    """`counts`: [tier, column], blocks held. `max_keys`: soft limit; beyond twice as many, keys are dropped."""

    def __init__(self, max_keys: int = 1_000_000) -> None:
        self._round = 64  # a power of two: buckets when the current round of splits began
        self._num_buckets = self._round
        self._capacity = max(self._round, 1 << (max(1, max_keys) // _WAYS * 2).bit_length())
        self._lo = np.zeros((self._capacity, _WAYS), np.uint64)
        self._hi = np.zeros((self._capacity, _WAYS), np.uint64)
        # the upper half of lo, the only part that a lookup compares
        self._tag = np.zeros((self._capacity, _WAYS), np.uint32)
        self._used = np.zeros((self._capacity, _WAYS), np.bool_)
        self._stamp = np.zeros(self._capacity * _WAYS, np.uint32)
        self._words = 1
        # By tier, a mask of [slots] for each 64 workers; a lower tier's only once it is used.
        self._masks: list[list[Keys]] = [self._no_masks(), *([] for _ in _ALL_TIERS[1:])]
        self._now = 1
        self._num_lookups = 0
        self._num_used = 0
        self._no_hits = np.zeros(_WORD, np.int64)
        self.counts = np.zeros((NUM_TIERS, _WORD), np.int64)
        self.num_dropped = 0

    def _no_masks(self) -> list[Keys]:
        return [np.zeros(self._capacity * _WAYS, np.uint64) for _ in range(self._words)]

    def _all_masks(self) -> list[Keys]:
        return [mask for masks in self._masks for mask in masks]

    def _lower_in_use(self) -> tuple[int, ...]:
        return tuple(tier for tier in _ALL_TIERS[1:] if self._masks[tier] and self.counts[tier].any())

    @property
    def num_keys(self) -> int:
        return self._num_used

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets in use."""
        arrays: list[Any] = [self._lo, self._hi, self._tag, self._used, self._stamp]
        arrays += self._all_masks()
        return int(sum(array.nbytes for array in arrays)) * self._num_buckets // self._capacity

    def reserve_columns(self, num_columns: int) -> None:
        """Make room for workers of columns below `num_columns`."""
        words = -(-num_columns // _WORD)
        if words > self._words:
            more = words - self._words
            self._words = words
            for masks in filter(None, self._masks):
                masks += [np.zeros(self._capacity * _WAYS, np.uint64) for _ in range(more)]
            self._no_hits = np.zeros(words * _WORD, np.int64)
            self.counts = np.pad(self.counts, ((0, 0), (0, more * _WORD)))

    # ---- finding -------------------------------------------------------------------------------------------------

    def _buckets(self, keys: Keys) -> Ints:
        """[n, 2], the two buckets of each key."""
        if self._num_buckets == self._round:
            return (keys & np.uint64(self._round - 1)).view(np.int64)
        buckets = (keys & np.uint64(2 * self._round - 1)).view(np.int64)
        buckets -= self._round * (buckets >= self._num_buckets)  # not split yet
        return buckets

    def _find(self, keys: Keys) -> tuple[Ints, Bools]:
        """(slot of each key, whether the key is there); the slot of a missing key is undefined."""
        buckets = self._buckets(keys)
        shown = self._lo.take(buckets, axis=0).reshape(len(keys), 2 * _WAYS)
        place = (shown == keys[:, :1]).argmax(axis=1)
        slots = np.where(place < _WAYS, buckets[:, 0] * _WAYS, buckets[:, 1] * _WAYS - _WAYS) + place
        found = (self._lo.ravel().take(slots) == keys[:, 0]) & (self._hi.ravel().take(slots) == keys[:, 1])
        return slots, found & self._used.ravel().take(slots)

    def runs(self, keys: Keys) -> Runs:
        """Length of each worker's leading run in `keys`; one call in four marks the found blocks as recently used.

        Beside the low bits, which select the buckets, 32 more bits are compared: once in some hundred million keys a
        wrong match adds a block to an estimate. Changes compare whole keys.
        """
        self._num_lookups += 1
        touches = self._num_lookups % _TOUCH_EVERY == 0
        lower = self._lower_in_use()
        blocks: Ints | None = None
        touched: list[Ints] = []
        lower_blocks = np.zeros((NUM_TIERS - 1, len(self._no_hits)), np.int64) if lower else None
        tags = keys.view(np.uint32)[:, 1:2]
        alive: list[Any] = [None] * self._words
        for start in range(0, len(keys), _CHUNK):
            part = keys[start : start + _CHUNK]
            slots = self._leading_slots(part, tags[start : start + _CHUNK])
            if not len(slots):
                break
            depth = 0
            for word in range(self._words):
                nearest = self._masks[0][word].take(slots)
                further = [(tier, self._masks[tier][word].take(slots)) for tier in lower]
                masks = nearest
                for _, held_there in further:
                    masks = masks | held_there
                if alive[word] is not None:
                    masks[0] &= alive[word]
                held = np.bitwise_and.accumulate(masks)
                alive[word] = held[-1]
                reach = len(held) if held[-1] else int(np.count_nonzero(held))
                if not reach:
                    continue
                blocks = np.zeros_like(self._no_hits) if blocks is None else blocks
                columns = slice(word * _WORD, (word + 1) * _WORD)
                _put_prefixes(held[:reach], blocks[columns])
                for tier, held_there in further:
                    assert lower_blocks is not None
                    lower_blocks[tier - 1, columns] += _count(held & held_there & ~nearest)
                    nearest = nearest | held_there
                depth = max(depth, reach)
            touched.append(slots[:depth])
            if depth < len(part):
                break
        if touches and touched:
            self._touch(np.concatenate(touched))
        return Runs(self._no_hits if blocks is None else blocks, lower_blocks, blocks is not None)

    def hits_into(self, lookup: NativeLookup, keys: Keys, most_blocks: int, into: int, stride: int) -> Found:
        """`runs` in C, for the group that `lookup` was made for. `into`: address of [NUM_TIERS, stride]: at the group's
        places, tokens of hits, then by lower tier."""
        self._num_lookups += 1
        lower = self._lower_in_use()
        masks = [self._masks[tier] if tier in lower or tier == 0 else None for tier in _ALL_TIERS]
        lookup.follow(self._tag, self._stamp, masks, self._num_buckets, self._round)
        now = 0
        if self._num_lookups % _TOUCH_EVERY == 0:
            self._age(len(keys))
            now = self._now
        return lookup.find(keys, now, most_blocks, into, stride)

    def _leading_slots(self, keys: Keys, tags: Any) -> Ints:
        """Slots of the keys, up to the first missing one."""
        buckets = self._buckets(keys)
        same = self._tag.take(buckets, axis=0).reshape(len(keys), 2 * _WAYS) == tags
        (at,) = same.ravel().nonzero()
        rows = at >> 4
        if len(rows) > len(keys) or (rows != _ROWS[: len(rows)]).any():
            # One is missing, or one was found twice: its two buckets are the same.
            rows, first = np.unique(rows, return_index=True)
            in_turn = rows == _ROWS[: len(rows)]
            at = at[first[: len(rows) if in_turn.all() else int(in_turn.argmin())]]
        slots: Ints = buckets.ravel().take(at >> 3)
        slots <<= 3
        slots += at & 7
        return slots

    def _touch(self, slots: Ints) -> None:
        """Mark as recently used, the first ones most: a chain is evicted from its end."""
        self._age(len(slots))
        if len(slots):
            self._stamp[slots] = np.arange(self._now, self._now - len(slots), -1)

    def _age(self, count: int) -> None:
        if self._now > _MAX_STAMP:
            self._stamp >>= 1
            self._now >>= 1
        self._now += count

    def keys_of(self, column: int, tier: int = 0) -> Keys:
        """[n, 2], unordered."""
        slots = self._slots_of(column, (tier,))
        return np.stack((self._lo.ravel()[slots], self._hi.ravel()[slots]), axis=1)

    def _slots_of(self, column: int, tiers: Sequence[int]) -> Ints:
        word, bit = column // _WORD, np.uint64(1 << column % _WORD)
        size = self._num_buckets * _WAYS
        held = np.zeros(size, np.bool_)
        for tier in tiers:
            if self._masks[tier]:
                held |= (self._masks[tier][word][:size] & bit) != 0
        return np.flatnonzero(held)

    # ---- changing ------------------------------------------------------------------------------------------------

    def add(self, keys: Keys, column: int, tier: int = 0) -> None:
        """The worker holds these blocks; parents before their children. Repeats are harmless."""
        if not self._masks[tier]:
            self._masks[tier] = self._no_masks()
        while len(keys):
            slots, found = self._find(keys)
            self._hold(slots[found], column, tier)
            keys = keys[~found]
            if not len(keys):
                return
            self._make_room(len(keys))
            slots, free = self._free_slots(keys)
            if not free.all():
                stuck = keys[~free]
                if not self._kick(stuck):
                    if not self._is_full():
                        self._split(max(_MIN_SPLITS, self._round // 64))
                        continue
                    self.num_dropped += len(stuck)
                    keys, slots = keys[free], slots[free]
                else:
                    continue
            slots, first = np.unique(slots, return_index=True)
            self._lo.ravel()[slots], self._hi.ravel()[slots] = keys[first, 0], keys[first, 1]
            self._tag.ravel()[slots] = keys[first, 0] >> np.uint64(32)
            self._used.ravel()[slots] = True
            self._num_used += len(slots)
            order = np.argsort(first)  # the order of the keys, for the stamps
            self._hold(slots[order], column, tier)
            rest = np.ones(len(keys), np.bool_)
            rest[first] = False
            keys = keys[rest]

    def _free_slots(self, keys: Keys) -> tuple[Ints, Bools]:
        """(a free slot in the emptier bucket of each key, whether there is one)."""
        buckets = self._buckets(keys)
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

    def remove(self, keys: Keys, column: int, tier: int = 0) -> None:
        if self._masks[tier] and len(keys):
            slots, found = self._find(keys)
            self._release(np.unique(slots[found]), column, (tier,))

    def clear(self, column: int, tiers: Sequence[int] = _ALL_TIERS) -> None:
        self._release(self._slots_of(column, tiers), column, tiers)

    def trim(self, column: int, keep: int) -> None:
        """Drop the least recently used blocks of a worker until at most `keep` are left. Scans the table."""
        slots = self._slots_of(column, _ALL_TIERS)
        excess = len(slots) - keep
        if excess > 0:
            oldest = np.argpartition(self._stamp[slots], excess - 1)[:excess]
            self._release(slots[oldest], column, _ALL_TIERS)

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
        for mask in self._all_masks():
            used |= mask[slots] != 0
        self._used.ravel()[slots] = used
        self._num_used -= len(slots) - int(np.count_nonzero(used))
        gone = slots[~used]  # a free slot must not shadow a key in the other bucket
        self._lo.ravel()[gone] = self._hi.ravel()[gone] = 0
        self._tag.ravel()[gone] = 0

    # ---- growing -------------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        """Whether no more buckets can be added, or would not help."""
        return self._num_buckets >= self._capacity or self._num_used < self._num_buckets * _WAYS * _MIN_LOAD

    def _make_room(self, num_keys: int) -> None:
        """A round of splits begins at the highest load, and continues with every key."""
        left = num_keys
        while left > 0 and self._num_buckets < self._capacity:
            load = (self._num_used + num_keys - left) / (self._num_buckets * _WAYS)
            if self._num_buckets == self._round and load < _MAX_LOAD:
                left -= max(1, int((_MAX_LOAD - load) * self._num_buckets * _WAYS) + 1)
            else:
                left -= self._split(max(_MIN_SPLITS, left))

    def _kick(self, keys: Keys) -> bool:
        """Move a key out of the full buckets of each of these. False: nothing can move out of one of them."""
        for pair in self._buckets(keys).tolist():
            for slot in (bucket * _WAYS + way for bucket in pair for way in range(_WAYS)):
                resident = np.array([[self._lo.ravel()[slot], self._hi.ravel()[slot]]], np.uint64)
                first, second = self._buckets(resident)[0].tolist()
                other = second if first == slot // _WAYS else first
                if not self._used[other].all():
                    to = other * _WAYS + int(self._used[other].argmin())
                    self._move(np.array([slot]), np.array([to]))
                    break
            else:
                return False
        return True

    def _move(self, old: Ints, new: Ints) -> None:
        for flat in (self._lo.ravel(), self._hi.ravel(), self._tag.ravel(), self._used.ravel(), self._stamp):
            flat[new] = flat[old]
            flat[old] = 0
        for mask in self._all_masks():
            mask[new] = mask[old]
            mask[old] = 0

    def _split(self, count: int) -> int:
        """Split the next `count` buckets, at most to the end of the round. Returns the number of splits."""
        first = self._num_buckets - self._round
        count = min(count, self._round - first)
        slots = np.flatnonzero(self._used[first : first + count].ravel()) + first * _WAYS
        lo, hi = self._lo.ravel()[slots], self._hi.ravel()[slots]
        by_lo = (lo & np.uint64(self._round - 1)).view(np.int64) == slots // _WAYS
        going = (np.where(by_lo, lo, hi) & np.uint64(self._round)) != 0
        old = slots[going]
        self._move(old, old + self._round * _WAYS)
        self._num_buckets += count
        if self._num_buckets == 2 * self._round:
            self._round *= 2
        return count


def _put_prefixes(held: Keys, counts: Ints) -> None:
    """Add to counts[bit] how many keys' masks have the bit. `held`: [keys] of masks, each a subset of the one before.
    Few of them differ, so only the places where a bit ends are counted."""
    (changes,) = (held[1:] != held[:-1]).nonzero()
    ends = changes.tolist()
    kinds = held.take(changes).tolist()
    ends.append(len(held) - 1)
    kinds.append(int(held[-1]))
    kinds.append(0)
    for i, end in enumerate(ends):
        ending = kinds[i] & ~kinds[i + 1]
        while ending:
            bit = ending & -ending
            counts[bit.bit_length() - 1] += end + 1
            ending ^= bit


def _count(held: Keys) -> npt.NDArray[np.uint8]:
    """[keys] of masks -> [64], how many masks have each bit. Eight byte counters are added at once."""
    bits = np.unpackbits(held.view(np.uint8), bitorder="little").view(np.uint64).reshape(-1, _WAYS)
    counted: Keys = np.add.reduce(bits, axis=0)
    return counted.view(np.uint8)


def to_bytes(keys: Keys) -> list[bytes]:
    raw = np.ascontiguousarray(keys).tobytes()
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]
