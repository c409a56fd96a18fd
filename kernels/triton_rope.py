"""Rotary embedding fused with the KV write (and, where the model has it, the norm of each query and key head), in Triton.

One program takes one token and one KV head: it rotates that group's query heads in place, rotates the key and stores it into
the pool, and copies the value: K and V go straight from the projection's output to their slot. Into a quantized pool go their
codes and scales, as kernels/kv_codes.py has them, of what the model's dtype holds.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin, use_pdl
from diptych.kernels.triton_decode import check_scales, scale_strides
from diptych.kernels.triton_lora_rows import LoraDelta, known_t, row_constants

_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}


@triton.jit
def _load(at, mask, stride_split, more, SPLITS: tl.constexpr, ADDS: tl.constexpr, dtype: tl.constexpr):
    """The sum over the splits, with ADDS and `more`, rounded to the model's dtype, in fp32."""
    x = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(at + split * stride_split, mask=mask, other=0.0)
    if ADDS:
        x = x.to(tl.float32) + more
    return x.to(dtype).to(tl.float32)


@triton.jit
def _ranks_of_heads(b_ptr, adapter, first, rank, column, mask, columns, RANK: tl.constexpr, RANKS: tl.constexpr):
    """[RANKS, columns] of a slot from rank `first` on; zeros behind the `rank` of each column."""
    r = first + tl.arange(0, RANKS)
    at = b_ptr + (r[:, None].to(tl.int64) + adapter * RANK) * columns + column[None, :]
    return tl.load(at, mask=(r[:, None] < rank[None, :]) & mask[None, :], other=0.0)


@triton.jit
def _added_to_heads(
    b, t_ptr, token, adapter, part, first, q_rank, k_rank, v_rank, stride_split, stride_row, stride_slot,
    RANK: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """fp32, [columns of b]. part: of each column."""
    r = first + tl.arange(0, RANKS)
    at = adapter * stride_slot + r
    q = known_t(t_ptr, token, at, r < q_rank, stride_split, stride_row, SPLITS)[:, None]
    k = known_t(t_ptr, token, at + RANK, r < k_rank, stride_split, stride_row, SPLITS)[:, None]
    v = known_t(t_ptr, token, at + 2 * RANK, r < v_rank, stride_split, stride_row, SPLITS)[:, None]
    t = tl.where(part[None, :] == 0, q, tl.where(part[None, :] == 1, k, v))
    return tl.sum(t.to(b.dtype).to(tl.float32) * b.to(tl.float32), 0)


@triton.jit
def _codes(x, KIND: tl.constexpr):
    """x: fp32, in size at most the largest code. Returns: the nearest codes, ties to even, as bytes. By integers: the same
    everywhere, also where no instruction knows the format."""
    if KIND == 1:  # int8: a number that is added rounds to an integer in the low bits
        code = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        SHIFT: tl.constexpr = 20 if KIND == 2 else 21
        BIAS: tl.constexpr = 120 << 3 if KIND == 2 else 112 << 2
        LEAST: tl.constexpr = 0x3C800000 if KIND == 2 else 0x38800000
        GRID: tl.constexpr = 16384.0 if KIND == 2 else 128.0
        GRID_BITS: tl.constexpr = 0x46800000 if KIND == 2 else 0x43000000
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT) - BIAS
        tiny = (size.to(tl.float32, bitcast=True) + GRID).to(tl.int32, bitcast=True) - GRID_BITS
        code = tl.where(size < LEAST, tiny, normal) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def _store_codes(left, right, target, unit_at, mask, HALF: tl.constexpr, KIND: tl.constexpr):
    """One head of one part. left, right: [HALF_PADDED] fp32, 0 where not `mask`."""
    LARGEST: tl.constexpr = 127.0 if KIND == 1 else 448.0 if KIND == 2 else 57344.0
    most = tl.maximum(tl.max(tl.abs(left), 0), tl.max(tl.abs(right), 0))
    infinite = float("inf")
    bad = tl.where((tl.abs(left) < infinite) & (tl.abs(right) < infinite), 0, 1)  # a NaN is not below it either
    finite = tl.sum(bad, 0) == 0
    unit = tl.div_rn(most, tl.full([], LARGEST, tl.float32))
    whole = finite & (unit > 0.0)
    divisor = tl.where(whole, unit, 1.0)
    low = tl.where(whole, tl.div_rn(left, tl.zeros_like(left) + divisor), 0.0)
    high = tl.where(whole, tl.div_rn(right, tl.zeros_like(right) + divisor), 0.0)
    low = tl.minimum(tl.maximum(low, -LARGEST), LARGEST)
    high = tl.minimum(tl.maximum(high, -LARGEST), LARGEST)
    tl.store(target, _codes(low, KIND), mask=mask)
    tl.store(target + HALF, _codes(high, KIND), mask=mask)
    tl.store(unit_at, tl.where(finite, unit, float("nan")))


@triton.jit(do_not_specialize=["stride_t_split"])  # a number of rows
def _rope_write_kernel(
    qkv_ptr,
    q_ptr,
    kv_ptr,
    scales_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    t_ptr,
    b_ptr,
    ranks_ptr,
    adapters_ptr,
    eps,
    offset,
    stride_token,
    stride_split,
    stride_q,
    stride_block,
    stride_kv,
    stride_slot,
    stride_head,
    stride_scales_block,
    stride_scales_kv,
    stride_scales_slot,
    stride_t_split,
    stride_t_row,
    stride_t_slot,
    num_q_heads,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    T_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """KIND: of codes; 0: elements are stored as they are. RANKS: of an adapter, that are read before the wait and then at a
    time; 0: nothing is added to qkv."""
    token, kv_head = tl.program_id(0), tl.program_id(1)
    # What no kernel of the step writes is read before the wait.
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token).to(tl.int64)
    dim = tl.arange(0, HALF_PADDED)
    in_half = dim < HALF
    cos = tl.load(cos_ptr + position * HALF + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * HALF + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
    # Rows 0 .. GROUP - 1 are the query heads, row GROUP is the key.
    row = tl.arange(0, HEADS)
    is_key = row == GROUP
    head = tl.where(is_key, num_q_heads + kv_head, kv_head * GROUP + row)
    mask = (row <= GROUP)[:, None] & in_half[None, :]
    column = head[:, None] * (2 * HALF) + dim[None, :]
    v_column = (num_q_heads + num_kv_heads + kv_head) * (2 * HALF) + dim
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    ADDS: tl.constexpr = RANKS > 0
    if ADDS:
        columns = (num_q_heads + 2 * num_kv_heads) * (2 * HALF)
        adapter = tl.load(adapters_ptr + token)
        q_rank = tl.load(ranks_ptr + adapter * 3, mask=adapter >= 0, other=0)
        k_rank = tl.load(ranks_ptr + adapter * 3 + 1, mask=adapter >= 0, other=0)
        v_rank = tl.load(ranks_ptr + adapter * 3 + 2, mask=adapter >= 0, other=0)
        # All columns of the program, one after the other: the value's behind the key's.
        c = tl.arange(0, HEADS * 2 * HALF_PADDED)
        c_row, c_half, c_dim = c // (2 * HALF_PADDED), c // HALF_PADDED % 2, c % HALF_PADDED
        c_part = (c_row >= GROUP).to(tl.int32) + (c_row > GROUP).to(tl.int32)
        c_head = tl.where(c_part == 0, kv_head * GROUP + c_row, num_q_heads + kv_head + (c_part - 1) * num_kv_heads)
        c_column = c_head * (2 * HALF) + c_half * HALF + c_dim
        c_mask = (c_row <= GROUP + 1) & (c_dim < HALF)
        c_rank = tl.where(c_part == 0, q_rank, tl.where(c_part == 1, k_rank, v_rank))
        b = _ranks_of_heads(b_ptr, adapter, 0, c_rank, c_column, c_mask, columns, RANK, RANKS)

    begin(PDL)
    if slot < 0:
        return
    token_64 = token.to(tl.int64)
    more_left, more_right, more_v_left, more_v_right = 0.0, 0.0, 0.0, 0.0
    if ADDS:
        more = _added_to_heads(
            b, t_ptr, token_64, adapter, c_part, 0, q_rank, k_rank, v_rank,
            stride_t_split, stride_t_row, stride_t_slot, RANK, RANKS, T_SPLITS,
        )  # fmt: skip
        for first in tl.range(RANKS, tl.maximum(q_rank, tl.maximum(k_rank, v_rank)), RANKS):
            b = _ranks_of_heads(b_ptr, adapter, first, c_rank, c_column, c_mask, columns, RANK, RANKS)
            more += _added_to_heads(
                b, t_ptr, token_64, adapter, c_part, first, q_rank, k_rank, v_rank,
                stride_t_split, stride_t_row, stride_t_slot, RANK, RANKS, T_SPLITS,
            )  # fmt: skip
        more = tl.where(c_rank > 0, more, -0.0)  # keeps every bit, which 0.0 would not of -0.0
        by_half = tl.permute(tl.reshape(more, [HEADS, 2, HALF_PADDED]), [0, 2, 1])
        more_left, more_right = tl.split(by_half)
        is_value = (row == GROUP + 1)[:, None]
        more_v_left = tl.sum(tl.where(is_value, more_left, -0.0), 0)
        more_v_right = tl.sum(tl.where(is_value, more_right, -0.0), 0)
    at = qkv_ptr + token_64 * stride_token + column
    left = _load(at, mask, stride_split, more_left, SPLITS, ADDS, dtype)
    right = _load(at + HALF, mask, stride_split, more_right, SPLITS, ADDS, dtype)
    if NORM:
        size = 2 * HALF
        scale = 1.0 / tl.sqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / size + eps)[:, None]
        q_left = tl.load(q_norm_ptr + dim, mask=in_half, other=0.0).to(tl.float32) + offset
        q_right = tl.load(q_norm_ptr + HALF + dim, mask=in_half, other=0.0).to(tl.float32) + offset
        k_left = tl.load(k_norm_ptr + dim, mask=in_half, other=0.0).to(tl.float32) + offset
        k_right = tl.load(k_norm_ptr + HALF + dim, mask=in_half, other=0.0).to(tl.float32) + offset
        left = left * scale * tl.where(is_key[:, None], k_left[None, :], q_left[None, :])
        right = right * scale * tl.where(is_key[:, None], k_right[None, :], q_right[None, :])
    new_left = (left * cos - right * sin).to(dtype)
    new_right = (right * cos + left * sin).to(dtype)
    is_query = (row < GROUP)[:, None] & in_half[None, :]
    q_at = q_ptr + token_64 * stride_q + column
    tl.store(q_at, new_left, mask=is_query)
    tl.store(q_at + HALF, new_right, mask=is_query)

    block = (slot // BLOCK_SIZE).to(tl.int64)
    target = kv_ptr + block * stride_block + (slot % BLOCK_SIZE) * stride_slot + kv_head * stride_head + dim
    key_mask = is_key[:, None] & in_half[None, :]
    v_at = qkv_ptr + token_64 * stride_token + v_column
    if KIND:
        k_left = tl.sum(tl.where(key_mask, new_left.to(tl.float32), 0.0), 0)
        k_right = tl.sum(tl.where(key_mask, new_right.to(tl.float32), 0.0), 0)
        unit_at = scales_ptr + block * stride_scales_block + (slot % BLOCK_SIZE) * stride_scales_slot + kv_head
        _store_codes(k_left, k_right, target, unit_at, in_half, HALF, KIND)
        v_left = _load(v_at, in_half, stride_split, more_v_left, SPLITS, ADDS, dtype)
        v_right = _load(v_at + HALF, in_half, stride_split, more_v_right, SPLITS, ADDS, dtype)
        _store_codes(v_left, v_right, target + stride_kv, unit_at + stride_scales_kv, in_half, HALF, KIND)
    else:
        tl.store(target[None, :] + tl.zeros([HEADS, 1], tl.int32), new_left, mask=key_mask)
        tl.store(target[None, :] + HALF + tl.zeros([HEADS, 1], tl.int32), new_right, mask=key_mask)
        v_left = _load(v_at, in_half, stride_split, more_v_left, SPLITS, ADDS, dtype)
        v_right = _load(v_at + HALF, in_half, stride_split, more_v_right, SPLITS, ADDS, dtype)
        tl.store(target + stride_kv, v_left.to(dtype), mask=in_half)
        tl.store(target + stride_kv + HALF, v_right.to(dtype), mask=in_half)


def rope_write(
    qkv: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    num_q_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    delta: LoraDelta | None = None,
) -> Tensor:
    """Rotate queries in place; store rotated keys and values into one layer's slots.

    Args:
        qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values of each token. Query heads are
            overwritten; keys and values stay as they are. Rows may be strided. Or [splits, num_tokens, ...] fp32, whose sum,
            rounded to the model's dtype, is qkv (see triton_matmul); it stays as it is.
        kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], one layer's view of the pool.
        cos, sin: [num_positions, head_dim / 2], contiguous; fp32 keeps the angles exact whatever the model's dtype.
        positions: [num_tokens], int32. slots: [num_tokens], int32, block * block_size + offset; < 0: a padded row, skipped.
        q_norm, k_norm: [head_dim] weights of an RMS norm of each head before the rotation, with `eps`; both or none.
        offset: added to these weights, in fp32.
        scales: of a quantized pool, whose codes are `kv`: see paged_decode.
        dtype: the model's; None: kv's.
        delta: what adapters add to queries, keys and values, in fp32, before they are rounded; of three parts.
    Returns: the queries, [num_tokens, num_q_heads, head_dim]: a view of qkv; of splits a new tensor.
    Raises: ValueError on a shape, dtype or device mismatch (checked on the host, without a sync).
    """
    num_kv_heads, head_dim = kv.shape[3], kv.shape[4]
    num_tokens = qkv.shape[-2]
    if qkv.shape[-1] != (num_q_heads + 2 * num_kv_heads) * head_dim or qkv.stride(-1) != 1:
        raise ValueError(f"qkv {tuple(qkv.shape)} is not {num_q_heads} + 2 x {num_kv_heads} heads of {head_dim}")
    splits, dtype = qkv.shape[0] if qkv.dim() == 3 else 1, dtype or kv.dtype
    if qkv.dtype != (torch.float32 if qkv.dim() == 3 else dtype) or qkv.device != kv.device:
        raise ValueError(f"qkv is {qkv.dtype} on {qkv.device}, the model's {dtype}, kv {kv.dtype} on {kv.device}")
    check_scales(kv, scales)
    if scales is None and kv.dtype != dtype:
        raise ValueError(f"kv is {kv.dtype} without scales, the model's dtype {dtype}")
    if cos.shape[-1] * 2 != head_dim or cos.shape != sin.shape or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"rope tables {tuple(cos.shape)} do not fit heads of {head_dim}")
    if positions.shape != (num_tokens,) or slots.shape != (num_tokens,) or slots.dtype != torch.int32:
        raise ValueError(f"{num_tokens} tokens, {tuple(positions.shape)} positions, {tuple(slots.shape)} slots")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together")
    if delta is not None:
        delta.check_fit(num_tokens, qkv.shape[-1], parts=3)
    group, pdl = num_q_heads // num_kv_heads, use_pdl(qkv.device, num_tokens)
    padded_half = triton.next_power_of_2(head_dim // 2)
    padded_heads = triton.next_power_of_2(group + (1 if delta is None else 2))
    num_warps = 1 if delta is None else 4
    width = num_q_heads * head_dim
    q = qkv if qkv.dim() == 2 else torch.empty((num_tokens, width), dtype=dtype, device=kv.device)
    _rope_write_kernel[(num_tokens, num_kv_heads)](
        qkv,
        q,
        kv if scales is None else kv.view(torch.uint8),
        kv if scales is None else scales,
        cos,
        sin,
        positions,
        slots,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        *((qkv, qkv, slots, slots) if delta is None else delta.pointers),
        eps,
        offset,
        qkv.stride(-2),
        qkv.stride(0),
        q.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        *scale_strides(scales),
        *((0, 0, 0) if delta is None else delta.strides),
        num_q_heads,
        num_kv_heads,
        GROUP=group,
        HEADS=padded_heads,
        HALF=head_dim // 2,
        HALF_PADDED=padded_half,
        BLOCK_SIZE=kv.shape[2],
        NORM=q_norm is not None,
        SPLITS=splits,
        KIND=0 if scales is None else _KINDS[kv.dtype],
        **row_constants(delta, 2 * padded_heads * padded_half, num_warps),
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
    return q[:, :width].view(num_tokens, num_q_heads, head_dim)
