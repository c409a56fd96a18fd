"""Paged attention whose results do not depend on the rest of the step: for `--batch-invariant`.

What a query gets depends on its position and its keys alone. Keys are taken in tiles, and tiles in splits, both at absolute
positions of the sequence; the splits are folded in ascending order:

    keys      0 ......................................... position
    tiles     [    )[    )[    )[    )[    )[    )[    )[  |        the last one masked behind the query
    splits    [ SPLIT_TOKENS      )[                   )[  |        of each: peak, total, sum of weighted values
    fold      (((split 0) + split 1) + split 2)

One kernel has the inner loop for chunks of prompts and for decoding rows, in tiles of equally many rows, so that both use the
same instructions: rows of a tile are (token, head of the group) pairs, and a decoding row is a tile with one token. A row takes
part in tiles and splits behind its own position where its tile has later rows: its weights there are 0, and change no bit.

    prefill, many decoding rows   one program a tile: it folds the splits itself
    few decoding rows             several programs a row: each writes its splits' parts, and a second kernel folds them
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin, use_pdl
from diptych.kernels.triton_decode import LOG2_E, check_paged, scale_strides
from diptych.kernels.triton_kv import add_codes, load_kv, soft_cap
from diptych.kernels.triton_prefill import prefill_tiles

__all__ = ["SPLIT_TOKENS", "invariant_decode", "invariant_prefill", "invariant_rows", "prefill_tiles"]

SPLIT_TOKENS = 512
"""Keys of one split. Workers of a pair must agree: it is part of their attention version."""
_NOTHING = tl.constexpr(-1.0e30)
"""Peak of a row that has seen no key: finite, so that differences are never NaN, and below every score."""
_LOADED = 4
"""Splits whose parts are loaded together, in the second kernel."""


@triton.jit
def _fold(peak, total, acc, next_peak, next_total, next_acc):
    """The splits so far, and the next one. A split without keys changes no bit."""
    top = tl.maximum(peak, next_peak)
    here = tl.exp2(peak - top)
    there = tl.exp2(next_peak - top)
    return top, total * here + next_total * there, acc * here[:, None] + next_acc * there[:, None]


@triton.jit
def _store_part(
    parts_ptr, stats_ptr, at, peak, total, acc, is_head, num_splits, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    """at: [ROWS], place of each head's split."""
    dim = tl.arange(0, DIM)
    tl.store(stats_ptr + at * 2, peak, mask=is_head)
    tl.store(stats_ptr + at * 2 + 1, total, mask=is_head)
    mask = is_head[:, None] & (dim[None, :] < HEAD_DIM)
    tl.store(parts_ptr + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)


@triton.jit
def _attend_keys(
    q,
    peak,
    total,
    acc,
    all_peak,
    all_total,
    all_acc,
    position,
    kv_ptr,
    scales_ptr,
    table,
    parts_ptr,
    stats_ptr,
    part_at,
    is_head,
    num_splits,
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
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CODES: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Keys [low, high); low is a multiple of TILE."""
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
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc *= shrink[:, None]
        if CODES:
            acc = add_codes(acc, weights, v, units + stride_scales_kv, inside, kv_ptr.dtype.element_ty)
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
        if (start + TILE) % SPLIT == 0:
            if PARTS:
                _store_part(
                    parts_ptr, stats_ptr, part_at + start // SPLIT, peak, total, acc, is_head, num_splits, HEAD_DIM, DIM
                )
            else:
                all_peak, all_total, all_acc = _fold(all_peak, all_total, all_acc, peak, total, acc)
            peak = tl.zeros_like(peak) + _NOTHING
            total = tl.zeros_like(total)
            acc = tl.zeros_like(acc)
    return peak, total, acc, all_peak, all_total, all_acc


@triton.jit
def _invariant_attention_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    tables_ptr,
    rows_ptr,
    lens_ptr,
    tiles_ptr,
    chunks_ptr,
    out_ptr,
    parts_ptr,
    stats_ptr,
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
    num_q_heads,
    num_splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CODES: tl.constexpr,
    DECODE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """DECODE: tiles of one token, by rows_ptr and lens_ptr; else by tiles_ptr and chunks_ptr. PARTS: writes splits."""
    TOKENS: tl.constexpr = ROWS // GROUP
    # What no kernel of the step writes is read before the wait.
    if DECODE:
        tile, kv_head = tl.program_id(0), tl.program_id(1)
        first = 0
        q_first = tile
        num_new = 1
        context = tl.load(lens_ptr + tile) - 1
        table = tables_ptr + tl.load(rows_ptr + tile).to(tl.int64) * stride_table
    else:
        kv_head, tile = tl.program_id(0), tl.program_id(1)
        chunk = chunks_ptr + tl.load(tiles_ptr + tile * 2) * 4
        first = tl.load(tiles_ptr + tile * 2 + 1)
        q_first = tl.load(chunk)
        num_new = tl.load(chunk + 1)
        context = tl.load(chunk + 2)
        table = tables_ptr + tl.load(chunk + 3).to(tl.int64) * stride_table
    begin(PDL)

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
    position = context + tl.minimum(token, num_new - 1)
    high = context + tl.minimum(first + TOKENS, num_new)
    low = 0
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(context + first - WINDOW + 1, 0)
        low = lowest // TILE * TILE
    part_at = row.to(tl.int64)
    if PARTS:
        # This program's splits; places of parts are counted from the first one that the row sees.
        first_split = low // SPLIT
        share = tl.cdiv(tl.cdiv(high, SPLIT) - first_split, tl.num_programs(2))
        begin_split = first_split + tl.program_id(2) * share
        low = tl.maximum(low, begin_split * SPLIT)
        high = tl.minimum(high, (begin_split + share) * SPLIT)
        part_at = (tile.to(tl.int64) * num_q_heads + heads) * num_splits - first_split
    full = tl.maximum(tl.minimum((context + first + 1) // TILE * TILE, high), low)
    if WINDOW > 0:
        full = low

    peak = tl.full([ROWS], _NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    all_peak, all_total, all_acc = peak, total, acc
    if WINDOW == 0:
        peak, total, acc, all_peak, all_total, all_acc = _attend_keys(
            q, peak, total, acc, all_peak, all_total, all_acc, position, kv_ptr, scales_ptr, table, parts_ptr, stats_ptr,
            part_at, real, num_splits, lowest, low, full, kv_head, scale, softcap, stride_block, stride_kv, stride_slot,
            stride_head, stride_scales_block, stride_scales_kv, stride_scales_slot,
            HEAD_DIM, DIM, BLOCK_SIZE, TILE, SPLIT, WINDOW, SOFTCAP, CODES, False, PARTS,
        )  # fmt: skip
    peak, total, acc, all_peak, all_total, all_acc = _attend_keys(
        q, peak, total, acc, all_peak, all_total, all_acc, position, kv_ptr, scales_ptr, table, parts_ptr, stats_ptr,
        part_at, real, num_splits, lowest, full, high, kv_head, scale, softcap, stride_block, stride_kv, stride_slot,
        stride_head, stride_scales_block, stride_scales_kv, stride_scales_slot,
        HEAD_DIM, DIM, BLOCK_SIZE, TILE, SPLIT, WINDOW, SOFTCAP, CODES, True, PARTS,
    )  # fmt: skip
    if PARTS:
        if (high > low) & (
            tl.cdiv(high, TILE) * TILE % SPLIT != 0
        ):  # the row's last split ends before its last tile could
            _store_part(
                parts_ptr, stats_ptr, part_at + (high - 1) // SPLIT, peak, total, acc, real, num_splits, HEAD_DIM, DIM
            )
    else:
        all_peak, all_total, all_acc = _fold(all_peak, all_total, all_acc, peak, total, acc)
        # A padded row has seen nothing: its output is 0.
        out = all_acc / tl.where(all_total == 0.0, 1.0, all_total)[:, None]
        out_at = out_ptr + at[:, None] * stride_out_token + heads[:, None] * stride_out_head + dim[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=seen)


@triton.jit
def _fold_parts_kernel(
    parts_ptr,
    stats_ptr,
    lens_ptr,
    out_ptr,
    stride_out_token,
    stride_out_head,
    num_q_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    LOADED: tl.constexpr,
    PDL: tl.constexpr,
):
    seq, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens_ptr + seq)
    begin(PDL)
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(length - WINDOW, 0) // TILE * TILE // SPLIT
    count = tl.cdiv(length, SPLIT) - first_split
    dim = tl.arange(0, DIM)
    one = tl.arange(0, 1)
    place = (seq.to(tl.int64) * num_q_heads + head) * num_splits
    peak = tl.full([1], _NOTHING, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DIM], tl.float32)
    for first in tl.range(0, count, LOADED):
        for i in tl.static_range(LOADED):
            inside = first + i < count
            at = place + first + i + one
            mask = inside & (one < 1)
            next_peak = tl.load(stats_ptr + at * 2, mask=mask, other=_NOTHING)
            next_total = tl.load(stats_ptr + at * 2 + 1, mask=mask, other=0.0)
            real = mask[:, None] & (dim[None, :] < HEAD_DIM)
            next_acc = tl.load(parts_ptr + at[:, None] * HEAD_DIM + dim[None, :], mask=real, other=0.0)
            peak, total, acc = _fold(peak, total, acc, next_peak, next_total, next_acc)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_ptr + seq.to(tl.int64) * stride_out_token + head * stride_out_head + one[:, None] + dim[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(one[:, None] < 1) & (dim[None, :] < HEAD_DIM))


def invariant_rows(element_size: int, group: int) -> int:
    """Rows of every tile: what one group of four warps multiplies at once, and at least one token's heads."""
    rows = 32 if element_size > 2 else 64
    while rows < group:
        rows *= 2
    return rows


def _tile_of(head_dim: int, element_size: int) -> int:
    return 32 if head_dim > 128 or element_size > 2 else 64


def invariant_decode(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    table_rows: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    splits: int = 1,
    split_tokens: int = SPLIT_TOKENS,
    tile: int | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend one new token per sequence over its paged KV blocks; the new token's K and V are in the pool already.

    Args:
        q, kv, block_tables, table_rows, seq_lens, scale, softcap, window, out, scales: see paged_decode.
        splits: programs that share a sequence's splits, see choose_splits; changes no bit. 1: no second kernel.
        split_tokens, tile: keys of a split and of a tile, which divides it; both change bits. tile: None: by q.
    Returns: [num_seqs, num_q_heads, head_dim], q's dtype; accumulated in fp32.
    Raises: ValueError on a shape, dtype or device mismatch (checked on the host, without a sync).
    """
    num_seqs, num_q_heads, head_dim = q.shape
    if table_rows.shape != (num_seqs,) or seq_lens.shape != (num_seqs,):
        raise ValueError(f"{num_seqs} queries, {table_rows.shape[0]} table rows, {seq_lens.shape[0]} lengths")
    if splits < 1:
        raise ValueError(f"splits is {splits}: it must be at least 1")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts, stats, num_splits = out, out, 0
    if splits > 1:
        num_splits = triton.cdiv(block_tables.shape[1] * kv.shape[2], split_tokens)
        if window is not None:
            num_splits = min(num_splits, triton.cdiv(window, split_tokens) + 1)
        places = (num_seqs, num_q_heads, num_splits)
        parts = torch.empty((*places, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((*places, 2), dtype=torch.float32, device=q.device)
    tile = tile or _tile_of(head_dim, q.element_size())
    pdl = use_pdl(q.device, num_seqs)
    _launch(
        (num_seqs, kv.shape[3], splits), q, kv, scales, block_tables, table_rows, seq_lens, seq_lens, seq_lens, out, parts,
        stats, num_splits, scale, softcap, window, split_tokens, tile, decode=True, parts_only=splits > 1, pdl=pdl,
    )  # fmt: skip
    if splits > 1:
        dim = max(16, triton.next_power_of_2(head_dim))
        _fold_parts_kernel[(num_seqs, num_q_heads)](
            parts,
            stats,
            seq_lens,
            out,
            out.stride(0),
            out.stride(1),
            num_q_heads,
            num_splits,
            HEAD_DIM=head_dim,
            DIM=dim,
            TILE=tile,
            SPLIT=split_tokens,
            WINDOW=window or 0,
            LOADED=_LOADED,
            PDL=pdl,
            num_warps=1,
            launch_pdl=pdl,
            enable_fp_fusion=False,
        )
    return out


def invariant_prefill(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    chunks: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    split_tokens: int = SPLIT_TOKENS,
    tile: int | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Causal attention of chunks of new tokens over their sequences' paged KV; the chunks' own K and V are in the pool already.

    Args:
        q, kv, block_tables, chunks, scale, softcap, window, out, scales: see paged_prefill.
        tiles: [num_tiles, 2], int32: prefill_tiles(...) for invariant_rows(...).
        split_tokens, tile: see invariant_decode.
    Returns: [num_tokens, num_q_heads, head_dim], q's dtype; accumulated in fp32.
    Raises: ValueError on a shape, dtype or device mismatch (checked on the host, without a sync).
    """
    if chunks.dim() != 2 or chunks.shape[1] != 4 or tiles.dim() != 2 or tiles.shape[1] != 2:
        raise ValueError(f"chunks {tuple(chunks.shape)} and tiles {tuple(tiles.shape)} must be rows of 4 and of 2")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(
        (kv.shape[3], tiles.shape[0]), q, kv, scales, block_tables, tiles, tiles, tiles, chunks, out, out, out, 0, scale, softcap,
        window, split_tokens, tile or _tile_of(q.shape[2], q.element_size()), decode=False, parts_only=False, pdl=False,
    )  # fmt: skip
    return out


def _launch(
    grid: tuple[int, ...], q: Tensor, kv: Tensor, scales: Tensor | None, block_tables: Tensor, table_rows: Tensor,
    seq_lens: Tensor, tiles: Tensor, chunks: Tensor, out: Tensor, parts: Tensor, stats: Tensor, num_splits: int,
    scale: float, softcap: float | None, window: int | None, split_tokens: int, tile: int, *, decode: bool,
    parts_only: bool, pdl: bool,
) -> None:  # fmt: skip
    group = check_paged(q, kv, block_tables, scales)
    if split_tokens % tile:
        raise ValueError(f"a tile of {tile} keys does not divide a split of {split_tokens}")
    head_dim = q.shape[2]
    wide = head_dim > 128 or q.element_size() > 2
    _invariant_attention_kernel[grid](
        q,
        kv,
        kv if scales is None else scales,
        block_tables,
        table_rows,
        seq_lens,
        tiles,
        chunks,
        out,
        parts,
        stats,
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
        q.shape[1],
        num_splits,
        GROUP=group,
        ROWS=invariant_rows(q.element_size(), group),
        HEAD_DIM=head_dim,
        DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=kv.shape[2],
        TILE=tile,
        SPLIT=split_tokens,
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        CODES=scales is not None,
        DECODE=decode,
        PARTS=parts_only,
        PDL=pdl,
        num_warps=4,
        num_stages=2 if wide else 3,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
