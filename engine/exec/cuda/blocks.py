"""KV between a GPU's pool and host memory: one kernel gathers (scatters) the blocks, one copy moves the slab."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diptych.engine.exec.cuda.upload import Upload
from diptych.kernels.kv_pack import split_tokens
from diptych.kernels.triton_pack import pack_blocks, unpack_blocks


class BlockMover:
    """data: kv_pack.pool_bytes(pool). Slabs on both sides grow to the largest range."""

    def __init__(self, data: Tensor) -> None:
        self._data, self._upload = data, Upload(data.device)
        self._pinned = data.device.type == "cuda"
        self._sent = torch.cuda.Event() if self._pinned else None
        self._slab = torch.empty(0, dtype=torch.uint8, device=data.device)
        self._host = torch.empty(0, dtype=torch.uint8)

    def _prepare(self, block_ids: Sequence[int], num_tokens: int, payload: memoryview) -> tuple[Tensor, int]:
        ids, _, _ = split_tokens(self._data, block_ids, num_tokens)
        size = num_tokens * self._data.shape[1] * self._data.shape[3]
        if payload.nbytes < size:
            raise ValueError(f"the payload has {payload.nbytes} bytes, {size} are needed")
        if self._sent is not None:
            self._sent.synchronize()  # the last unpack's copy out of the pinned memory
        if self._slab.numel() < size:
            self._slab = torch.empty(size, dtype=torch.uint8, device=self._data.device)
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._upload.send((ids,))[0], size

    def pack(self, block_ids: Sequence[int], num_tokens: int, out: memoryview) -> int:
        """As kv_pack.pack; the bytes are in `out` when it returns. Returns: bytes written."""
        if out.readonly:
            raise ValueError("the payload is read-only")
        ids, size = self._prepare(block_ids, num_tokens, out)
        pack_blocks(self._data, ids, num_tokens, self._slab)
        self._host[:size].copy_(self._slab[:size])
        np.frombuffer(out, dtype=np.uint8, count=size)[:] = self._host[:size].numpy()
        return size

    def unpack(self, block_ids: Sequence[int], num_tokens: int, src: memoryview) -> None:
        """As kv_pack.unpack; `src` is free when it returns, and later steps see the blocks."""
        ids, size = self._prepare(block_ids, num_tokens, src)
        self._host[:size].numpy()[:] = np.frombuffer(src, dtype=np.uint8, count=size)
        self._slab[:size].copy_(self._host[:size], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        unpack_blocks(self._data, ids, num_tokens, self._slab)
