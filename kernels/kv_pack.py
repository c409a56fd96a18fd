"""Copy KV between the pool and flat bytes: what crosses the wire. Full blocks as they lie in the pool, then the tail block's
[num_layers, 2, tail, num_kv_heads, head_dim]. Works on bytes: dtypes do not matter, and payloads may be read-only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def pool_bytes(pool: Tensor) -> Tensor:
    """[num_blocks, num_layers * 2, block_size, bytes of one slot], uint8, a view of the pool."""
    num_blocks, num_layers, two, block_size = pool.shape[:4]
    return pool.view(num_blocks, num_layers * two, block_size, -1).view(torch.uint8)


def split_tokens(data: Tensor, block_ids: Sequence[int], num_tokens: int) -> tuple[list[int], int, int]:
    """Blocks that hold the tokens, how many of them are full, and tokens of the tail block. data: pool_bytes(pool).

    Raises: ValueError when the tokens need more blocks than are given, or a block is outside the pool.
    """
    block_size = data.shape[2]
    full, tail = divmod(num_tokens, block_size)
    if num_tokens < 1 or full + (tail > 0) > len(block_ids):
        raise ValueError(f"{num_tokens} tokens do not fit {len(block_ids)} blocks of {block_size}")
    ids = list(block_ids[: full + (tail > 0)])
    if min(ids) < 0 or max(ids) >= data.shape[0]:
        raise ValueError(f"block ids {ids} are not all in [0, {data.shape[0]})")
    return ids, full, tail


def flat_bytes(buffer: memoryview, size: int, *, writable: bool) -> np.ndarray:
    """The first `size` bytes. Raises: ValueError."""
    if buffer.nbytes < size:
        raise ValueError(f"the payload has {buffer.nbytes} bytes, {size} are needed")
    if writable and buffer.readonly:
        raise ValueError("the payload is read-only")
    return np.frombuffer(buffer, dtype=np.uint8, count=size)


def pack(data: Tensor, block_ids: Sequence[int], num_tokens: int, out: memoryview) -> int:
    """Copy `num_tokens` tokens from pool_bytes `data` into `out`. Returns: bytes written, num_tokens * bytes of a token.

    Raises: ValueError when the tokens need more blocks or bytes than are given.
    """
    ids, full, tail = split_tokens(data, block_ids, num_tokens)
    _, rows, block_size, slot = data.shape
    flat = flat_bytes(out, num_tokens * rows * slot, writable=True)
    border = full * rows * block_size * slot
    host = data if data.device.type == "cpu" else data[torch.tensor(ids, device=data.device)].cpu()
    index = ids if host is data else list(range(len(ids)))
    blocks = host.numpy()
    if full:
        body = flat[:border].reshape(full, rows, block_size, slot)
        if blocks.flags.c_contiguous:
            # mode="clip" lets numpy write straight into `out` (ids are checked above); the default buffers.
            np.take(blocks, index[:full], axis=0, out=body, mode="clip")
        else:  # some layers of a pool: take would copy all of it first
            for i, block in enumerate(index[:full]):
                body[i] = blocks[block]
    if tail:
        flat[border:].reshape(rows, tail, slot)[...] = blocks[index[full], :, :tail]
    return flat.nbytes


def unpack(data: Tensor, block_ids: Sequence[int], num_tokens: int, src: memoryview) -> None:
    """The inverse of pack; slots past num_tokens in the tail block are left alone.

    Raises: ValueError when the tokens need more blocks or bytes than are given.
    """
    ids, full, tail = split_tokens(data, block_ids, num_tokens)
    _, rows, block_size, slot = data.shape
    flat = flat_bytes(src, num_tokens * rows * slot, writable=False)
    border = full * rows * block_size * slot
    body = flat[:border].reshape(full, rows, block_size, slot)
    rest = flat[border:].reshape(rows, tail, slot)
    if data.device.type == "cpu":
        blocks = data.numpy()
        if full:
            blocks[ids[:full]] = body
        if tail:
            blocks[ids[full], :, :tail] = rest
        return
    if full:
        data[torch.tensor(ids[:full], device=data.device)] = torch.from_numpy(body.copy()).to(data.device)
    if tail:
        data[ids[full], :, :tail] = torch.from_numpy(rest.copy()).to(data.device)
