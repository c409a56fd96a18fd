"""How fast this GPU reads an address, here or over a link, with the kernel that reads payloads."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import torch

from diptych.common.errors import TransferError
from diptych.kernels.kv_pack import pool_bytes
from diptych.kernels.triton_move import PULL_PROGRAMS, move_blocks

_BLOCK_BYTES = 1 << 20
_MOST_BLOCKS = 64
_ROUNDS = 3


def read_rate(address: int, size_bytes: int) -> float:
    """Returns: bytes/s of the best of a few reads of at most 64 MiB, after one that counts for nothing.

    Raises: TransferError when the memory cannot be read.
    """
    blocks = min(_MOST_BLOCKS, size_bytes // _BLOCK_BYTES)
    if not blocks:
        raise TransferError(f"a ring of {size_bytes} bytes is too small: {_BLOCK_BYTES} are needed")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            data = pool_bytes(torch.empty((blocks, 1, 2, 16, _BLOCK_BYTES // 256, 4), dtype=torch.int16, device=device))
            ids = torch.arange(blocks, dtype=torch.int32, device=device)
            total = torch.zeros(1, dtype=torch.int64, device=device)
            best = float("inf")
            for _ in range(_ROUNDS + 1):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                move_blocks(data, ids, blocks * 16, address, total, pack=False, programs=PULL_PROGRAMS)
                end.record()
                end.synchronize()
                best = min(best, start.elapsed_time(end) / 1e3)
    except RuntimeError as error:
        raise TransferError(f"GPU memory at {address:#x} cannot be read: {error}") from error
    return blocks * _BLOCK_BYTES / best
