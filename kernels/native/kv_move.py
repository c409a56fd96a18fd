"""kv_pack on the CPU in C: the range's xxh3-64 comes with the copy, and the interpreter lock is let go of once for all of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_uint64, c_void_p
from pathlib import Path

import numpy as np
from torch import Tensor

from diptych.kernels import kv_pack
from diptych.kernels.native.build import CSources, functions_of

SOURCES = CSources(
    "kv-move",
    Path(__file__).parent,
    ("xxhash/xxhash.h", "kv_move.c"),
    ("-O3", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"),
)


class KvMoves:
    """Raises: NativeError when the file cannot be loaded."""

    def __init__(self, path: Path) -> None:
        function = functions_of(path, ctypes.CDLL)
        where = (c_void_p, c_int64, c_void_p, *[c_int64] * 5)
        self._gather = function("gather", *where, c_void_p, returns=c_uint64)
        self._scatter = function("scatter", *where, c_void_p)

    def pack(self, data: Tensor, block_ids: Sequence[int], num_tokens: int, out: memoryview) -> tuple[int, int]:
        """As kv_pack.pack. data: of a CPU. Returns: bytes written, and their xxh3-64. Raises: ValueError."""
        size, where, _keep = _where(data, block_ids, num_tokens)
        flat = kv_pack.flat_bytes(out, size, writable=True)
        return size, self._gather(*where, flat.ctypes.data)

    def unpack(self, data: Tensor, block_ids: Sequence[int], num_tokens: int, src: memoryview) -> None:
        """As kv_pack.unpack. data: of a CPU. Raises: ValueError."""
        size, where, _keep = _where(data, block_ids, num_tokens)
        self._scatter(*where, kv_pack.flat_bytes(src, size, writable=False).ctypes.data)


def _where(data: Tensor, block_ids: Sequence[int], num_tokens: int) -> tuple[int, tuple[int, ...], np.ndarray]:
    """Bytes of the range, what the C functions are told, and what must live until they return."""
    ids, full, tail = kv_pack.split_tokens(data, block_ids, num_tokens)
    _, rows, block_size, slot = data.shape
    if data.stride()[1:] != (block_size * slot, slot, 1):
        raise ValueError(f"blocks of the pool must each be in one piece; strides are {data.stride()}")
    kept = np.array(ids, np.int64)
    row = block_size * slot
    told = (data.data_ptr(), data.stride(0), kept.ctypes.data, full, rows * row, rows, row, tail * slot)
    return num_tokens * rows * slot, told, kept
