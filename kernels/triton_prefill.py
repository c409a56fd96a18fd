"""Paged prefill attention in Triton: chunks of several sequences, causal, over cached prefix and new tokens.

The rows of one tile are (token, head of the group) pairs, so each KV byte is read once for all query heads that share it:

    rows of a tile   t0 h0 | t0 h1 | ... | t1 h0 | t1 h1 | ...      (heads of one group)
    keys             [ all rows see these )[ the diagonal: masked )
                     low                    full                  high

Tiles are listed by the host (`prefill_tiles`), long ones first, so that the last programs to start are short.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.triton_decode import LOG2_E, check_paged, scale_strides
from diptych.kernels.triton_kv import add_codes, load_kv, soft_cap


@triton.jit
def _attend_tile(
    q,
    acc,
    total,
    peak,
    position,
    kv_ptr,
    scales_ptr,
    table,
    lowest,
    low,
    high,
    kv_head,
    scale,
    softcap,
    stride_block,
    stride_kv,
    stride_slot,
    stride_head,
    stride_scales_block,
    stride_scales_kv,
    stride_scales_slot,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CODES: tl.constexpr,
    MASKED: tl.constexpr,
):
    dim = tl.arange(0, DIM)
    for start in tl.range(low, high, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < high
        if WINDOW > 0:
            # Before the window a table may name blocks of other sequences, in which anything may stand.
            inside = inside & (at >= lowest)
        if MASKED:
            block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        slot = block * stride_block + (at % BLOCK_SIZE) * stride_slot + kv_head * stride_head
        seen = inside[:, None] & (dim[None, :] < HEAD_DIM)
        k = load_kv(kv_ptr + slot[:, None] + dim[None, :], seen, q.dtype, MASKED or HEAD_DIM != DIM)
        v = load_kv(kv_ptr + stride_kv + slot[:, None] + dim[None, :], seen, q.dtype, MASKED or HEAD_DIM != DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CODES:
            units = scales_ptr + block * stride_scales_block + (at % BLOCK_SIZE) * stride_scales_slot + kv_head
            scores = scores * tl.load(units, mask=inside, other=0.0)[None, :]
        if SOFTCAP:
            scores = soft_cap(scores, softcap) * 1.4426950408889634
        if MASKED:
            visible = at[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        if WINDOW > 0:
            # A row may see nothing of its tile's first keys: -inf minus -inf would be NaN.
            new_peak = tl.maximum(new_peak, -1.0e30)
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc *= shrink[:, None]
        if CODES:
            acc = add_codes(acc, weights, v, units + stride_scales_kv, inside, kv_ptr.dtype.element_ty)
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit
def _paged_prefill_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    tables_ptr,
    tiles_ptr,
    chunks_ptr,
    out_ptr,
    scale,
    softcap,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_kv,
    stride_slot,
    stride_head,
    stride_scales_block,
    stride_scales_kv,
    stride_scales_slot,
    stride_table,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CODES: tl.constexpr,
):
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    chunk = chunks_ptr + tl.load(tiles_ptr + tile * 2) * 4
    first = tl.load(tiles_ptr + tile * 2 + 1)
    q_first = tl.load(chunk)
    num_new = tl.load(chunk + 1)
    context = tl.load(chunk + 2)
    table = tables_ptr + tl.load(chunk + 3).to(tl.int64) * stride_table

    TOKENS: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    token = first + row // GROUP
    real = (row < TOKENS * GROUP) & (token < num_new)
    heads = kv_head * GROUP + row % GROUP
    seen = real[:, None] & (dim[None, :] < HEAD_DIM)
    at = (q_first + token).to(tl.int64)
    q = tl.load(
        q_ptr + at[:, None] * stride_q_token + heads[:, None] * stride_q_head + dim[None, :], mask=seen, other=0.0
    )
    # Rows past the chunk's end act as its last token: they see at least one key, so no row is empty.
    position = context + tl.minimum(token, num_new - 1)
    high = context + tl.minimum(first + TOKENS, num_new)
    low = 0
    lowest = 0
    full = (context + first + 1) // TILE * TILE
    if WINDOW > 0:
        lowest = tl.maximum(context + first - WINDOW + 1, 0)
        low = lowest // TILE * TILE
        full = low

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    if WINDOW == 0:
        acc, total, peak = _attend_tile(
            q, acc, total, peak, position, kv_ptr, scales_ptr, table, lowest, low, full, kv_head, scale, softcap,
            stride_block, stride_kv, stride_slot, stride_head, stride_scales_block, stride_scales_kv, stride_scales_slot,
            HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, CODES, False,
        )  # fmt: skip
    acc, total, peak = _attend_tile(
        q, acc, total, peak, position, kv_ptr, scales_ptr, table, lowest, full, high, kv_head, scale, softcap,
        stride_block, stride_kv, stride_slot, stride_head, stride_scales_block, stride_scales_kv, stride_scales_slot,
        HEAD_DIM, DIM, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, CODES, True,
    )  # fmt: skip
    # A tile of an empty chunk, which pads a list, has seen nothing.
    out = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * stride_out_token + heads[:, None] * stride_out_head + dim[None, :], out, mask=seen)


def prefill_rows(head_dim: int, element_size: int, group: int) -> int:
    """Rows of one tile: as many as registers hold the output of, and at least one token's group."""
    rows = 32 if element_size > 2 else 64 if head_dim > 128 else 128
    while rows < group:
        rows *= 2
    return rows


def prefill_tiles(counts: Sequence[int], starts: Sequence[int], group: int, rows: int) -> list[int]:
    """The work list of paged_prefill, flat pairs (chunk, first token of the tile within it), most keys first.

    Args:
        counts, starts: new tokens and computed tokens before them, of each chunk.
        group: query heads per KV head. rows: as given to paged_prefill.
    """
    tokens = rows // group
    tiles = [(starts[i] + first, i, first) for i, count in enumerate(counts) for first in range(0, count, tokens)]
    tiles.sort(reverse=True)
    return [value for _, chunk, first in tiles for value in (chunk, first)]


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    chunks: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    rows: int,
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Causal attention of chunks of new tokens over their sequences' paged KV; the chunks' own K and V are in the pool already.

    Args:
        q: [num_tokens, num_q_heads, head_dim], contiguous in the last dim.
        kv, scales: [num_blocks, 2, block_size, num_kv_heads, head_dim], one layer's view of the pool: see paged_decode.
        block_tables: [num_tables, max_blocks], int32; entries past a sequence's end, and before every window, are not read.
        chunks: [num_chunks, 4], int32: first row in q, number of new tokens, tokens computed before, row of block_tables.
        tiles: [num_tiles, 2], int32: prefill_tiles(...) for the same `rows`.
        softcap: scores become softcap * tanh(score / softcap); None: they stay.
        window: keys that a query sees, itself included; None: all.
        rows: a power of two, at least the heads of a group and at least 16: see prefill_rows.
        tile, num_warps, num_stages: None: what fits the GPU's registers and shared memory.
        out: written in the chunks' rows only; None: a new tensor, undefined in rows that no chunk names.
    Returns: [num_tokens, num_q_heads, head_dim], q's dtype; accumulated in fp32.
    Raises: ValueError on a shape, dtype or device mismatch (checked on the host, without a sync).
    """
    group = check_paged(q, kv, block_tables, scales)
    if rows < group:
        raise ValueError(f"a tile of {rows} rows does not hold a group of {group} heads")
    if chunks.dim() != 2 or chunks.shape[1] != 4 or tiles.dim() != 2 or tiles.shape[1] != 2:
        raise ValueError(f"chunks {tuple(chunks.shape)} and tiles {tuple(tiles.shape)} must be rows of 4 and of 2")
    wide = q.shape[2] > 128 or q.element_size() > 2
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _paged_prefill_kernel[(kv.shape[3], tiles.shape[0])](
        q,
        kv,
        kv if scales is None else scales,
        block_tables,
        tiles,
        chunks,
        out,
        scale * LOG2_E if softcap is None else scale,
        softcap or 0.0,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        *scale_strides(scales),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        GROUP=group,
        ROWS=rows,
        HEAD_DIM=q.shape[2],
        DIM=max(16, triton.next_power_of_2(q.shape[2])),
        BLOCK_SIZE=kv.shape[2],
        TILE=tile or (32 if wide else 64),
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        CODES=scales is not None,
        num_warps=num_warps or 4,
        num_stages=num_stages or (2 if wide else 3),
    )
    return out
