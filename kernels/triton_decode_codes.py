"""Paged decode attention over codes of a quantized cache, for models in 16 bits: the kernel that `paged_decode` launches there.

One warp takes all query heads of a KV head, as `_paged_decode_kernel` does, but keys and values are the left operands:

    scores [keys, heads]  = k [keys, dim] @ q [dim, heads]        heads are padded to 8 then, and not to 16
    out    [dim, heads]  += v [dim, keys] @ weights [keys, heads]

Products are taken in float16, which holds every code; sums in fp32. What is no code is brought into its range by powers of two:

- each row of q by its own, up to [2^14, 2^15). q keeps all bits of bf16 down to 2^-26 of its largest element;
- weights times V's scales by that of the largest scale so far; when a larger one comes, the output so far is lowered.

K's scales multiply scores.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin
from diptych.kernels.triton_kv import even_odd, lift_of, power_of_two, soft_cap

_TILE_CODES = 4096
"""Of K, of one iteration: a warp's registers hold no more."""
_LEAST = tl.constexpr(1.0e-30)
"""Largest magnitude of a row of q, or of scales, where all are smaller."""


@triton.jit
def _attend_codes(
    q_even,
    q_odd,
    unit,
    peak,
    total,
    most,
    even,
    odd,
    kv_ptr,
    scales_ptr,
    table,
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
    code_dtype: tl.constexpr,
    HEAD_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys [low, high). kv_ptr, and strides of kv, count pairs of codes."""
    pair = tl.arange(0, PAIRS)
    for start in tl.range(low, high, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < high
        if MASKED:
            block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        slot = block * stride_block + ((at % BLOCK_SIZE) * stride_slot + kv_head * stride_head)
        k_at = kv_ptr + slot[:, None] + pair[None, :]
        v_at = kv_ptr + stride_kv + slot[None, :] + pair[:, None]
        units = scales_ptr + block * stride_scales_block + ((at % BLOCK_SIZE) * stride_scales_slot + kv_head)
        if MASKED or HEAD_PAIRS != PAIRS:
            k = tl.load(k_at, mask=inside[:, None] & (pair[None, :] < HEAD_PAIRS), other=0)
            v = tl.load(v_at, mask=inside[None, :] & (pair[:, None] < HEAD_PAIRS), other=0)
            k_scale = tl.load(units, mask=inside, other=0.0)
            v_scale = tl.load(units + stride_scales_kv, mask=inside, other=0.0)
        else:
            k, v = tl.load(k_at), tl.load(v_at)
            k_scale, v_scale = tl.load(units), tl.load(units + stride_scales_kv)
        k_even, k_odd = even_odd(k, code_dtype, ASM)
        scores = tl.dot(k_even, q_even)
        scores = tl.dot(k_odd, q_odd, scores) * k_scale[:, None]
        if SOFTCAP:
            scores = soft_cap(scores * unit[None, :], softcap) * 1.4426950408889634
        if MASKED:
            scores = tl.where(inside[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        if SOFTCAP:
            weights = tl.exp2(scores - new_peak[None, :])
            shrink = tl.exp2(peak - new_peak)
        else:
            weights = tl.exp2(scores * unit[None, :] - (new_peak * unit)[None, :])
            shrink = tl.exp2((peak - new_peak) * unit)
        peak = new_peak
        total = total * shrink + tl.sum(weights, 0)
        new_most = tl.maximum(most, tl.max(v_scale, 0))
        lift = lift_of(new_most)
        shrink = shrink * (power_of_two(most) * lift * 0.00006103515625)  # 2^-14
        most = new_most
        weights = (weights * (v_scale * lift)[:, None]).to(tl.float16)
        v_even, v_odd = even_odd(v, code_dtype, ASM)
        even = tl.dot(v_even, weights, even * shrink[None, :])
        odd = tl.dot(v_odd, weights, odd * shrink[None, :])
    return peak, total, most, even, odd


@triton.jit(do_not_specialize=["splits"])
def decode_codes_kernel(
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
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GRAIN: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Arguments are those of `_paged_decode_kernel`, but for kv's strides: they count GRAIN codes (grain_of). So the compiler
    knows how many bytes it may load at once, also where a slot is no multiple of 16: 2 heads of 64 codes and a scale are 136."""
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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

    column = tl.arange(0, COLUMNS)
    pair = tl.arange(0, PAIRS)
    heads = kv_head * GROUP + column
    real = (column[None, :] < GROUP) & (2 * pair[:, None] < HEAD_DIM)
    q_at = q_ptr + seq.to(tl.int64) * stride_q_seq + heads[None, :] * stride_q_head + 2 * pair[:, None]
    q_even = tl.load(q_at, mask=real, other=0.0).to(tl.float32)
    q_odd = tl.load(q_at + 1, mask=real, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q_even), 0), tl.max(tl.abs(q_odd), 0))
    largest = tl.maximum(largest, _LEAST)
    lift = lift_of(largest)[None, :]
    q_even, q_odd = (q_even * lift).to(tl.float16), (q_odd * lift).to(tl.float16)
    unit = power_of_two(largest) * (scale * 0.00006103515625)  # 2^-14

    peak = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    even = tl.zeros([PAIRS, COLUMNS], tl.float32)
    odd = tl.zeros([PAIRS, COLUMNS], tl.float32)
    most = low * 0.0 + _LEAST
    grain: tl.constexpr = GRAIN // 2
    pairs_ptr = kv_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    full = low + tl.maximum(high - low, 0) // TILE * TILE
    peak, total, most, even, odd = _attend_codes(
        q_even, q_odd, unit, peak, total, most, even, odd, pairs_ptr, scales_ptr, table, low, full, kv_head, scale, softcap,
        stride_block * grain, stride_kv * grain, stride_slot * grain, stride_head * grain, stride_scales_block, stride_scales_kv,
        stride_scales_slot, kv_ptr.dtype.element_ty, HEAD_DIM // 2, PAIRS, BLOCK_SIZE, TILE, SOFTCAP, ASM, False,
    )  # fmt: skip
    peak, total, most, even, odd = _attend_codes(
        q_even, q_odd, unit, peak, total, most, even, odd, pairs_ptr, scales_ptr, table, full, high, kv_head, scale, softcap,
        stride_block * grain, stride_kv * grain, stride_slot * grain, stride_head * grain, stride_scales_block, stride_scales_kv,
        stride_scales_slot, kv_ptr.dtype.element_ty, HEAD_DIM // 2, PAIRS, BLOCK_SIZE, TILE, SOFTCAP, ASM, True,
    )  # fmt: skip

    # A split without keys (a short or padded sequence) has total == 0: its output is 0 and its log-sum-exp -inf.
    whole = tl.where(total == 0.0, 1.0, total)
    lower = (power_of_two(most) * 0.00006103515625 / whole)[None, :]
    even, odd = even * lower, odd * lower
    if not SPLIT:
        at = out_ptr + seq.to(tl.int64) * stride_out_seq + heads[None, :] * stride_out_head + 2 * pair[:, None]
        tl.store(at, even.to(out_ptr.dtype.element_ty), mask=real)
        tl.store(at + 1, odd.to(out_ptr.dtype.element_ty), mask=real)
    else:
        if not SOFTCAP:
            peak = peak * unit
        place = (seq.to(tl.int64) * num_q_heads + heads) * splits + split
        lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(whole))
        tl.store(lse_ptr + place, lse, mask=column < GROUP)
        at = partial_ptr + place[None, :] * HEAD_DIM + 2 * pair[:, None]
        tl.store(at, even, mask=real)
        tl.store(at + 1, odd, mask=real)


def grain_of(kv: Tensor) -> int:
    """Codes, a power of two of at most 16, that divide every stride of the slots and the address. kv: see paged_decode."""
    return math.gcd(16, kv.data_ptr(), *kv.stride()[:4])


def takes_pairs(q: Tensor, kv: Tensor) -> bool:
    """Whether decode_codes_kernel reads them: a model in 16 bits, and pairs of codes that are aligned."""
    return q.dtype != torch.float32 and q.shape[2] % 2 == 0 and grain_of(kv) > 1


def pairs_tile(head_dim: int) -> int:
    """Keys of one iteration. head_dim: a power of two."""
    return max(16, min(32, _TILE_CODES // head_dim))
