"""A block table's lookup in C, for one group of workers; see BlockTable.hits_into."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.router.placement.native.library import MAX_WORDS, CGroup, CTable, Library, address

Ints = npt.NDArray[np.int64]
_WORD = 64


class Found(IntEnum):
    NOTHING = 0
    HITS = 1
    HITS_IN_LOWER_TIERS = 2


class NativeLookup:
    """Holds addresses of the table's arrays: call `follow` before `find` whenever the arrays may have changed.

    Args:
        at, columns: the group's workers, as positions in the result and columns of the table.
        block_size: tokens of a block, of this group.
    """

    def __init__(self, library: Library, at: Sequence[int], columns: Sequence[int], block_size: int) -> None:
        self._hits = library.hits
        self._places = (np.array(at, np.int64), np.array(columns, np.int64))
        self._group = CGroup(*map(address, self._places), len(at), block_size)
        self._table = CTable()
        self._to_table, self._to_group = ctypes.byref(self._table), ctypes.byref(self._group)
        self._seen: tuple[Any, ...] = ()
        self._kept: tuple[Any, ...] = ()
        self._found = Found.HITS
        self._slots = self._counts = np.empty(0, np.int64)
        self._slots_at = self._blocks_at = 0
        self._lower_at: int | None = None

    def follow(
        self, tags: Any, stamps: Any, masks: Sequence[Sequence[Any] | None], num_buckets: int, size: int
    ) -> None:
        """Args:
        masks: by tier, one for each word; None: nothing lies in that tier.
        size: buckets when the present round of splits began.
        """
        self._table.num_buckets, self._table.round = num_buckets, size
        nearest = masks[0]
        assert nearest is not None
        seen = (id(stamps), len(nearest), *(tier is not None for tier in masks))
        if seen == self._seen:
            return
        assert len(nearest) <= MAX_WORDS
        self._seen = seen
        by_tier = [(ctypes.c_void_p * len(tier))(*map(address, tier)) if tier is not None else None for tier in masks]
        tiers = (ctypes.c_void_p * len(masks))(*(None if tier is None else ctypes.addressof(tier) for tier in by_tier))
        self._kept = (tags, stamps, tuple(tuple(tier or ()) for tier in masks), by_tier, tiers)
        table = self._table
        table.tags, table.stamps, table.words = address(tags), address(stamps), len(nearest)
        table.masks, table.tiers = ctypes.addressof(tiers), len(masks)
        self._counts = np.zeros((len(masks), len(nearest) * _WORD), np.int64)
        self._blocks_at = address(self._counts)
        has_lower = any(tier is not None for tier in masks[1:])
        self._lower_at = self._blocks_at + self._counts.strides[0] if has_lower else None
        self._found = Found.HITS_IN_LOWER_TIERS if has_lower else Found.HITS

    def find(self, keys: Any, now: int, most_blocks: int, into: int, stride: int) -> Found:
        """Nothing is written where nobody holds the first key.

        Args:
            now: 0, or the stamp of the first key.
            into, stride: see BlockTable.hits_into; rows of lower tiers are written when any is in use.
        """
        num_keys = len(keys)
        if num_keys > len(self._slots):
            self._slots = np.empty(2 * num_keys, np.int64)
            self._slots_at = address(self._slots)
        depth = self._hits(
            self._to_table, self._to_group, address(keys), num_keys, now, most_blocks,
            self._slots_at, self._blocks_at, self._lower_at, into, stride,
        )  # fmt: skip
        return self._found if depth else Found.NOTHING
