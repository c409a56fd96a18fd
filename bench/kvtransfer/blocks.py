"""The benchmark's KV pool: blocks of 64 KiB, packed and unpacked by the engine's kernels."""

from __future__ import annotations

import torch

from diptych.common.paths import cache_dir
from diptych.kernels import kv_pack
from diptych.kernels.native.kv_move import SOURCES, KvMoves
from diptych.kvtransfer.slabs.layout import payload_capacity

BLOCK_BYTES = 64 << 10
BLOCK_SIZE = 16
LAYOUT = 7
KEY = bytes(32)
"""Of the encryption, where it is measured with it."""


def blocks_per_slab(slab_bytes: int) -> int:
    return payload_capacity(slab_bytes) // BLOCK_BYTES


class BlockPool:
    """[num_blocks, 8 layers, 2, 16 slots, 2 heads, 64] bf16: 64 KiB a block. `filled`: block i has the content of seed
    i."""

    def __init__(self, num_blocks: int, *, filled: bool) -> None:
        torch.set_num_threads(1)
        shape = (num_blocks, 8, 2, BLOCK_SIZE, 2, 64)
        self.pool = torch.zeros(shape, dtype=torch.bfloat16)
        assert self.pool[0].nbytes == BLOCK_BYTES
        self._data = kv_pack.pool_bytes(self.pool)
        self._moves = KvMoves(SOURCES.build(cache_dir() / "native"))
        if filled:
            generator = torch.Generator().manual_seed(5)
            noise = torch.randint(0, 256, (num_blocks, BLOCK_BYTES), dtype=torch.uint8, generator=generator)
            self._data.copy_(noise.view(self._data.shape))

    def pack(self, ids: list[int], out: memoryview) -> tuple[int, int]:
        """Returns: bytes and checksum."""
        return self._moves.pack(self._data, ids, len(ids) * BLOCK_SIZE, out)

    def unpack(self, ids: list[int], payload: memoryview) -> None:
        self._moves.unpack(self._data, ids, len(ids) * BLOCK_SIZE, payload)

    def same(self, other: BlockPool, ids: list[int]) -> bool:
        return torch.equal(self._data[ids], other._data[ids])

    def clear(self) -> None:
        self._data.zero_()
