"""Paged decode attention in Triton: one new token per sequence over its paged KV.

One program holds all query heads that share a KV head (padded to the 16 rows that a matrix instruction takes), so each KV byte
is read once. Where sequences x KV heads are too few programs to fill the GPU, the context is cut into splits:

    keys      0 ........................... len
    splits    [ split 0 )[ split 1 )[ split 2 )     each: softmax over its own keys, and its log-sum-exp
    reduce    out = sum_i softmax(lse)_i * out_i    a second kernel

Codes of a quantized pool are read by a kernel of their own where the model has 16 bits: see triton_decode_codes.

The number of splits is fixed by the launch (a CUDA graph replays it for any lengths); their borders follow from each length.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin, use_pdl
from diptych.kernels.triton_decode_codes import decode_codes_kernel, grain_of, pairs_tile, takes_pairs
from diptych.kernels.triton_kv import add_codes, load_kv, soft_cap

LOG2_E = 1.4426950408889634
"""Softmax is computed with powers of two: a scale holds this factor, but where a softcap comes between."""
MIN_ROWS = 16
"""Rows of the smallest matrix instruction."""
MAX_SPLITS = 32
PROGRAMS, PROGRAMS_OF_PAIRS = 4, 8
"""Programs of one multiprocessor that read the most bytes per second: of two warps each, and of one warp (takes_pairs)."""
TILE_BYTES = 16384
"""K of one iteration; so much again for V, times the pipeline's stages, lies in shared memory."""


@triton.jit(do_not_specialize=["splits"])
def _paged_decode_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    tables_ptr,
    rows_ptr,
    lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    softcap,
    stride_q_seq,
    stride_q_head,
    stride_block,
    stride_kv,
    stride_slot,
    stride_head,
    stride_scales_block,
    stride_scales_kv,
    stride_scales_slot,
    stride_table,
    stride_out_seq,
    stride_out_head,
    num_q_heads,
    splits,
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
    PDL: tl.constexpr,
):
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # What no kernel of the step writes is read before the wait.
    length = tl.load(lens_ptr + seq)
    table = tables_ptr + tl.load(rows_ptr + seq).to(tl.int64) * stride_table
    begin(PDL)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, splits), TILE) * TILE
    low = first + split * share
    high = tl.minimum(low + share, length)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    heads = kv_head * GROUP + row
    real = (row[:, None] < GROUP) & (dim[None, :] < HEAD_DIM)
    q_at = q_ptr + seq.to(tl.int64) * stride_q_seq + heads[:, None] * stride_q_head + dim[None, :]
    q = tl.load(q_at, mask=real, other=0.0)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for start in tl.range(low, high, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < high
        block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = block * stride_block + (at % BLOCK_SIZE) * stride_slot + kv_head * stride_head
        seen = inside[:, None] & (dim[None, :] < HEAD_DIM)
        k = load_kv(kv_ptr + slot[:, None] + dim[None, :], seen, q.dtype, True)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CODES:
            units = scales_ptr + block * stride_scales_block + (at % BLOCK_SIZE) * stride_scales_slot + kv_head
            scores = scores * tl.load(units, mask=inside, other=0.0)[None, :]
        if SOFTCAP:
            scores = soft_cap(scores, softcap) * 1.4426950408889634
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        v = load_kv(kv_ptr + stride_kv + slot[:, None] + dim[None, :], seen, q.dtype, True)
        total = total * shrink + tl.sum(weights, 1)
        acc *= shrink[:, None]
        if CODES:
            acc = add_codes(acc, weights, v, units + stride_scales_kv, inside, kv_ptr.dtype.element_ty)
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak

    # A split without keys (a short or padded sequence) has total == 0: its output is 0 and its log-sum-exp -inf.
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if not SPLIT:
        out_at = out_ptr + seq.to(tl.int64) * stride_out_seq + heads[:, None] * stride_out_head + dim[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=real)
    else:
        slot_of_head = (seq.to(tl.int64) * num_q_heads + heads) * splits + split
        lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse_ptr + slot_of_head, lse, mask=row < GROUP)
        tl.store(partial_ptr + slot_of_head[:, None] * HEAD_DIM + dim[None, :], out, mask=real)


@triton.jit(do_not_specialize=["splits"])
def _reduce_splits_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    stride_out_seq,
    stride_out_head,
    num_q_heads,
    splits,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    seq, head = tl.program_id(0), tl.program_id(1)
    split = tl.arange(0, SPLITS_PADDED)
    dim = tl.arange(0, DIM)
    base = (seq.to(tl.int64) * num_q_heads + head) * splits
    lse = tl.load(lse_ptr + base + split, mask=split < splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    real = (split[:, None] < splits) & (dim[None, :] < HEAD_DIM)
    part = tl.load(partial_ptr + (base + split)[:, None] * HEAD_DIM + dim[None, :], mask=real, other=0.0)
    out = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_at = out_ptr + seq.to(tl.int64) * stride_out_seq + head * stride_out_head + dim
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def choose_splits(num_seqs: int, num_kv_heads: int, num_programs: int) -> int:
    """Splits of the context so that about `num_programs` programs run: see PROGRAMS. 1: no second kernel."""
    return max(1, min(MAX_SPLITS, num_programs // max(1, num_seqs * num_kv_heads)))


def check_paged(q: Tensor, kv: Tensor, block_tables: Tensor, scales: Tensor | None = None) -> int:
    """Query heads per KV head. Raises: ValueError on a shape, dtype, stride or device mismatch; no sync."""
    check_scales(kv, scales)
    if q.dim() != 3 or kv.dim() != 5 or kv.shape[1] != 2 or q.shape[2] != kv.shape[4]:
        raise ValueError(f"q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}")
    if q.shape[1] % kv.shape[3]:
        raise ValueError(f"{kv.shape[3]} KV heads do not divide {q.shape[1]} query heads")
    if (q.dtype != kv.dtype and scales is None) or q.device != kv.device or block_tables.device != q.device:
        raise ValueError(f"q is {q.dtype} on {q.device}, kv {kv.dtype} on {kv.device}, table on {block_tables.device}")
    if q.stride(2) != 1 or kv.stride(4) != 1:
        raise ValueError("q and kv must be contiguous in head_dim")
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or block_tables.stride(1) != 1:
        raise ValueError(f"block tables must be rows of int32, not {block_tables.dtype}")
    return q.shape[1] // kv.shape[3]


def check_scales(kv: Tensor, scales: Tensor | None) -> None:
    """Raises: ValueError."""
    if scales is None:
        return
    if scales.shape != kv.shape[:4] or scales.dtype != torch.float32 or scales.device != kv.device:
        raise ValueError(f"scales {tuple(scales.shape)} in {scales.dtype} do not fit kv {tuple(kv.shape)}")
    if scales.stride(3) != 1:
        raise ValueError("scales must be contiguous over the heads")


def scale_strides(scales: Tensor | None) -> tuple[int, int, int]:
    """Of block, part and slot."""
    return (0, 0, 0) if scales is None else (scales.stride(0), scales.stride(1), scales.stride(2))


def paged_decode(
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
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int = 3,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attend one new token per sequence over its paged KV blocks; the new token's K and V are in the pool already.

    Args:
        q: [num_seqs, num_q_heads, head_dim], contiguous in the last dim.
        kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], one layer's view of the pool, any strides but the last. Of a
            quantized pool these are codes, int8 or fp8, and `scales`, [num_blocks, 2, block_size, num_kv_heads] fp32, theirs: see
            kernels/kv_codes.py.
        block_tables: [num_tables, max_blocks], int32; entries past a sequence's end, and before its window, are not read.
        table_rows: [num_seqs], int32: the row of block_tables of each sequence.
        seq_lens: [num_seqs], int32, tokens including the new one. 0: a padded row; its output is 0.
        softcap: scores become softcap * tanh(score / softcap); None: they stay.
        window: keys that a query sees, itself included; None: all.
        splits: see choose_splits. tile: keys of one iteration; None: what fits the GPU well. num_warps: None: likewise.
        out: [num_seqs, num_q_heads, head_dim]; None: a new tensor.
    Returns: [num_seqs, num_q_heads, head_dim], q's dtype; accumulated in fp32.
    Raises: ValueError on a shape, dtype or device mismatch (checked on the host, without a sync).
    """
    group = check_paged(q, kv, block_tables, scales)
    num_seqs, num_q_heads, head_dim = q.shape
    if table_rows.shape != (num_seqs,) or seq_lens.shape != (num_seqs,):
        raise ValueError(f"{num_seqs} queries, {table_rows.shape[0]} table rows, {seq_lens.shape[0]} lengths")
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits is {splits}: it must be between 1 and {MAX_SPLITS}")
    if out is None:
        out = torch.empty((num_seqs, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty((num_seqs, num_q_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_seqs, num_q_heads, splits), dtype=torch.float32, device=q.device)
    pdl = use_pdl(q.device, num_seqs)
    num_kv_heads, dim = kv.shape[3], triton.next_power_of_2(head_dim)
    pairs = scales is not None and takes_pairs(q, kv)
    grain = grain_of(kv) if pairs else 1
    arguments = (
        q,
        kv,
        kv if scales is None else scales,
        block_tables,
        table_rows,
        seq_lens,
        out,
        partial,
        lse,
        scale * LOG2_E if softcap is None else scale,
        softcap or 0.0,
        q.stride(0),
        q.stride(1),
        *(stride // grain for stride in kv.stride()[:4]),
        *scale_strides(scales),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        num_q_heads,
        splits,
    )
    rule = {
        "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": kv.shape[2], "SPLIT": splits > 1, "WINDOW": window or 0,
        "SOFTCAP": softcap is not None, "PDL": pdl, "num_stages": num_stages, "launch_pdl": pdl,
    }  # fmt: skip
    if pairs:
        decode_codes_kernel[(num_kv_heads, num_seqs, splits)](
            *arguments,
            COLUMNS=max(8, triton.next_power_of_2(group)),
            PAIRS=max(16, dim // 2),
            TILE=tile or pairs_tile(dim),
            GRAIN=grain,
            ASM=q.is_cuda,
            num_warps=num_warps or 1,
            **rule,
        )
    else:
        _paged_decode_kernel[(num_seqs, num_kv_heads, splits)](
            *arguments,
            ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
            DIM=max(16, dim),
            TILE=tile or max(16, min(128, TILE_BYTES // (dim * q.element_size()))),
            CODES=scales is not None,
            num_warps=num_warps or 2,
            **rule,
        )
    if splits > 1:
        _reduce_splits_kernel[(num_seqs, num_q_heads)](
            partial,
            lse,
            out,
            out.stride(0),
            out.stride(1),
            num_q_heads,
            splits,
            HEAD_DIM=head_dim,
            DIM=dim,
            SPLITS_PADDED=triton.next_power_of_2(splits),
            PDL=pdl,
            num_warps=1 if splits * dim <= 1024 else 4,
            launch_pdl=pdl,
        )
    return out
