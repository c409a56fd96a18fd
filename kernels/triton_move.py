"""KV between pool blocks and a flat range of memory, which may be a peer GPU's: one launch, summed on the way (kv_sum.py).

The flat side is an address and not a tensor: a range that another process shares through CUDA IPC has no tensor here. A fixed
number of programs walks it piece by piece; over NVLink 64 of them reach the link's rate, and leave the rest of the GPU to the
step that runs beside them.

    | block 0 | block 1 | ... | tail: [rows, tail tokens of each] |      the flat range, as kv_pack.pack writes it
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.kv_sum import FACTOR, STEP, WORD_BYTES

PULL_PROGRAMS = 64
PACK_PROGRAMS = 264
PIECE_WORDS = 2048
NUM_WARPS = 8
_HALF = WORD_BYTES // 2
_STEP = tl.constexpr(STEP)
_FACTOR = tl.constexpr(FACTOR)


@triton.jit(do_not_specialize=["address", "full", "tail_words", "pieces"])
def _move_kernel(
    pool_ptr,
    address,
    ids_ptr,
    sum_ptr,
    full,
    tail_words,
    block_words,
    row_words,
    rows,
    pieces,
    PIECE: tl.constexpr,
    PACK: tl.constexpr,
    HALVES: tl.constexpr,
):
    """HALVES: a slot ends within a word, so the words of the tail's flat range may begin in one row and end in the next: the pool
    is read and written by half words."""
    flat = address.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, PIECE)
    total = tl.zeros([PIECE], dtype=tl.int64)
    per_block = tl.cdiv(block_words, PIECE)
    for piece in tl.range(tl.program_id(0), pieces, tl.num_programs(0)):
        index = piece // per_block
        at = (piece % per_block) * PIECE + lane
        block = tl.load(ids_ptr + index).to(tl.int64)
        inside = pool_ptr + block * block_words + at
        mask = at < block_words
        if index >= full:
            # The tail block comes last; its rows are shorter, and lie closer together in the flat range.
            inside = pool_ptr + block * block_words + (at // tail_words) * row_words + at % tail_words
            mask = at < tail_words * rows
        position = index.to(tl.int64) * block_words + at
        if HALVES:
            low = block * block_words * 2 + at * 2
            high = low + 1
            if index >= full:
                size = tail_words  # of a row's tail, in half words, and so is row_words
                low = block * block_words * 2 + (at * 2 // size) * row_words + at * 2 % size
                high = block * block_words * 2 + ((at * 2 + 1) // size) * row_words + (at * 2 + 1) % size
                mask = at * 2 < size * rows
            halves = pool_ptr.to(tl.pointer_type(tl.int32))
            if PACK:
                words = tl.load(halves + low, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
                words |= tl.load(halves + high, mask=mask, other=0).to(tl.int64) << 32
                tl.store(flat + position, words, mask=mask)
            else:
                words = tl.load(flat + position, mask=mask, other=0)
                tl.store(halves + low, words.to(tl.int32), mask=mask)
                tl.store(halves + high, (words >> 32).to(tl.int32), mask=mask)
        elif PACK:
            words = tl.load(inside, mask=mask, other=0)
            tl.store(flat + position, words, mask=mask)
        else:
            words = tl.load(flat + position, mask=mask, other=0)
            tl.store(inside, words, mask=mask)
        mixed = (words + position * _STEP) * _FACTOR
        total += tl.where(mask, mixed ^ (mixed >> 32), 0)
    tl.atomic_add(sum_ptr, tl.sum(total, 0))


def move_blocks(
    data: Tensor, block_ids: Tensor, num_tokens: int, address: int, total: Tensor, *, pack: bool, programs: int
) -> int:
    """Copy `num_tokens` tokens from the pool to `address` (pack) or from there into the pool. No sync.

    Args:
        data: kv_pack.pool_bytes(pool), contiguous.
        block_ids: [blocks that hold num_tokens], int32, on the pool's device; not checked against the pool (that would sync).
        address: of num_tokens * bytes of a token, aligned to 8, that the pool's device can reach.
        total: [1] int64 on the pool's device; kv_sum of the flat range is added to it.
        programs: how many walk the range.
    Returns: bytes moved; slots past num_tokens in the tail block, and what lies behind the range, are left alone.
    Raises: ValueError on a shape, dtype or alignment that does not fit.
    """
    if data.dtype != torch.uint8 or data.dim() != 4 or not data.is_contiguous():
        raise ValueError(
            "the pool must be contiguous bytes [num_blocks, rows, block_size, slot]: see kv_pack.pool_bytes"
        )
    _, rows, block_size, slot = data.shape
    full, tail = divmod(num_tokens, block_size)
    count = full + (tail > 0)
    if num_tokens < 1 or block_ids.shape != (count,) or block_ids.dtype != torch.int32:
        raise ValueError(f"{num_tokens} tokens need {count} int32 block ids, not {tuple(block_ids.shape)}")
    if slot % _HALF or rows * slot % WORD_BYTES or data.data_ptr() % WORD_BYTES or address % WORD_BYTES or address <= 0:
        raise ValueError(f"slots of {slot} bytes at {address:#x}: {WORD_BYTES}-byte words are moved")
    if total.shape != (1,) or total.dtype != torch.int64 or total.device != data.device:
        raise ValueError("the sum is one int64 on the pool's device")
    halves = slot % WORD_BYTES != 0
    unit = _HALF if halves else WORD_BYTES
    block_words = rows * block_size * slot // WORD_BYTES
    piece = min(PIECE_WORDS, triton.next_power_of_2(block_words))
    pieces = full * triton.cdiv(block_words, piece) + triton.cdiv(rows * tail * slot // WORD_BYTES, piece)
    _move_kernel[(min(programs, pieces),)](
        data.view(-1).view(torch.int64),
        address,
        block_ids,
        total,
        full,
        max(1, tail * slot // unit),
        block_words,
        block_size * slot // unit,
        rows,
        pieces,
        PIECE=piece,
        PACK=pack,
        HALVES=halves,
        num_warps=NUM_WARPS,
    )
    return num_tokens * rows * slot
