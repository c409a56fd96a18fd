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
    HITS_WITH_HOST_TIER = 2


class NativeLookup:
    """Holds addresses of the table's arrays: `follow` before `find`, whenever they may be others.

    Args:
        at, columns: the group's workers, as places in the answer and columns of the table.
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
        self._host_at: int | None = None

    def follow(
        self, tags: Any, stamps: Any, device: list[Any], host: list[Any] | None, num_buckets: int, size: int
    ) -> None:
        """`size`: buckets when the present round of splits began."""
        self._table.num_buckets, self._table.round = num_buckets, size
        seen = (id(stamps), len(device), host is not None)
        if seen == self._seen:
            return
        assert len(device) <= MAX_WORDS
        self._seen = seen
        addresses = [(ctypes.c_void_p * len(masks))(*map(address, masks)) for masks in (device, host or [])]
        self._kept = (tags, stamps, tuple(device), tuple(host or ()), addresses)
        table = self._table
        table.tags, table.stamps, table.words = address(tags), address(stamps), len(device)
        table.device = ctypes.addressof(addresses[0])
        table.host = ctypes.addressof(addresses[1]) if host is not None else None
        self._counts = np.zeros((2, len(device) * _WORD), np.int64)
        self._blocks_at, host_at = address(self._counts[0]), address(self._counts[1])
        self._host_at = host_at if host is not None else None
        self._found = Found.HITS if host is None else Found.HITS_WITH_HOST_TIER

    def find(self, keys: Any, now: int, most_blocks: int, hits_at: int, host_at: int) -> Found:
        """`now`: 0, or the stamp of the first key. `host_at` is written to when there is a host tier; nothing is where nobody
        holds the first key."""
        num_keys = len(keys)
        if num_keys > len(self._slots):
            self._slots = np.empty(2 * num_keys, np.int64)
            self._slots_at = address(self._slots)
        depth = self._hits(
            self._to_table, self._to_group, address(keys), num_keys, now, most_blocks,
            self._slots_at, self._blocks_at, self._host_at, hits_at, host_at,
        )  # fmt: skip
        return self._found if depth else Found.NOTHING
