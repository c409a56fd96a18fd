"""Gather pool blocks into one contiguous slab, and scatter a slab into blocks, in Triton: one launch for any number of blocks.

The slab is what crosses the wire: full blocks as they lie in the pool, then the tail block's
[num_layers, 2, tail, num_kv_heads, head_dim]. Words are copied, not numbers: the dtype does not matter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=["full", "tail"])
def _copy_blocks_kernel(
    pool_ptr,
    slab_ptr,
    ids_ptr,
    full,
    tail,
    num_rows,
    stride_block,
    row_words,
    slot_words,
    BLOCK: tl.constexpr,
    PACK: tl.constexpr,
):
    index, row = tl.program_id(0), tl.program_id(1)
    block = tl.load(ids_ptr + index).to(tl.int64)
    inside = pool_ptr + block * stride_block + row * row_words
    # The tail block comes last; its rows are shorter, and lie closer together in the slab.
    words = tl.where(index < full, row_words, tail * slot_words)
    slab = slab_ptr + index.to(tl.int64) * num_rows * row_words + row.to(tl.int64) * words
    for start in tl.range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < words
        if PACK:
            tl.store(slab + at, tl.load(inside + at, mask=mask), mask=mask)
        else:
            tl.store(inside + at, tl.load(slab + at, mask=mask), mask=mask)


def _launch(data: Tensor, block_ids: Tensor, num_tokens: int, slab: Tensor, *, pack: bool) -> int:
    if data.dtype != torch.uint8 or data.dim() != 4 or not data.is_contiguous():
        raise ValueError(
            "the pool must be contiguous bytes [num_blocks, rows, block_size, slot]: see kv_pack.pool_bytes"
        )
    _, rows, block_size, slot = data.shape
    full, tail = divmod(num_tokens, block_size)
    count = full + (tail > 0)
    size = num_tokens * rows * slot
    if num_tokens < 1 or block_ids.shape != (count,) or block_ids.dtype != torch.int32:
        raise ValueError(f"{num_tokens} tokens need {count} int32 block ids, not {tuple(block_ids.shape)}")
    if slab.dtype != torch.uint8 or slab.dim() != 1 or slab.numel() < size or slab.device != data.device:
        raise ValueError(f"the slab has {slab.numel()} bytes on {slab.device}, {size} on {data.device} are needed")
    word = next(w for w in _WORDS if slot % w == 0 and data.data_ptr() % w == 0 and slab.data_ptr() % w == 0)
    words = block_size * slot // word
    _copy_blocks_kernel[(count, rows)](
        data.view(-1).view(_WORDS[word]),
        slab[: size // word * word].view(_WORDS[word]),
        block_ids,
        full,
        tail,
        rows,
        rows * words,
        words,
        slot // word,
        BLOCK=min(2048, triton.next_power_of_2(words)),
        PACK=pack,
        num_warps=4,
    )
    return size


def pack_blocks(data: Tensor, block_ids: Tensor, num_tokens: int, slab: Tensor) -> int:
    """Copy `num_tokens` tokens out of the pool.

    Args:
        data: kv_pack.pool_bytes(pool), contiguous.
        block_ids: [blocks that hold num_tokens], int32, on the pool's device; not checked against the pool (that would sync).
        slab: [>= num_tokens * bytes of a token], uint8, same device.
    Returns: bytes written. Bytes of the slab behind them are left alone.
    Raises: ValueError on a shape, dtype or device mismatch.
    """
    return _launch(data, block_ids, num_tokens, slab, pack=True)


def unpack_blocks(data: Tensor, block_ids: Tensor, num_tokens: int, slab: Tensor) -> int:
    """The inverse of pack_blocks; slots past num_tokens in the tail block are left alone. Returns: bytes read."""
    return _launch(data, block_ids, num_tokens, slab, pack=False)
