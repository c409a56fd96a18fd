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

_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}


@triton.jit
def _load(at, mask, stride_split, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """The sum over the splits, rounded to the model's dtype, in fp32."""
    x = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(at + split * stride_split, mask=mask, other=0.0)
    return x.to(dtype).to(tl.float32)


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


@triton.jit
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
    PDL: tl.constexpr,
):
    """KIND: of codes; 0: elements are stored as they are."""
    token, kv_head = tl.program_id(0), tl.program_id(1)
    # What no kernel of the step writes is read before the wait.
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token).to(tl.int64)
    dim = tl.arange(0, HALF_PADDED)
    in_half = dim < HALF
    cos = tl.load(cos_ptr + position * HALF + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * HALF + dim, mask=in_half, other=0.0).to(tl.float32)[None, :]

    begin(PDL)
    if slot < 0:
        return
    # Rows 0 .. GROUP - 1 are the query heads, row GROUP is the key.
    row = tl.arange(0, HEADS)
    is_key = row == GROUP
    head = tl.where(is_key, num_q_heads + kv_head, kv_head * GROUP + row)
    mask = (row <= GROUP)[:, None] & in_half[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    at = qkv_ptr + token.to(tl.int64) * stride_token + head[:, None] * (2 * HALF) + dim[None, :]
    left = _load(at, mask, stride_split, SPLITS, dtype)
    right = _load(at + HALF, mask, stride_split, SPLITS, dtype)
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
    q_at = q_ptr + token.to(tl.int64) * stride_q + head[:, None] * (2 * HALF) + dim[None, :]
    tl.store(q_at, new_left, mask=is_query)
    tl.store(q_at + HALF, new_right, mask=is_query)

    block = (slot // BLOCK_SIZE).to(tl.int64)
    target = kv_ptr + block * stride_block + (slot % BLOCK_SIZE) * stride_slot + kv_head * stride_head + dim
    key_mask = is_key[:, None] & in_half[None, :]
    v_at = qkv_ptr + token.to(tl.int64) * stride_token + (num_q_heads + num_kv_heads + kv_head) * (2 * HALF) + dim
    if KIND:
        k_left = tl.sum(tl.where(key_mask, new_left.to(tl.float32), 0.0), 0)
        k_right = tl.sum(tl.where(key_mask, new_right.to(tl.float32), 0.0), 0)
        unit_at = scales_ptr + block * stride_scales_block + (slot % BLOCK_SIZE) * stride_scales_slot + kv_head
        _store_codes(k_left, k_right, target, unit_at, in_half, HALF, KIND)
        v_left = _load(v_at, in_half, stride_split, SPLITS, dtype)
        v_right = _load(v_at + HALF, in_half, stride_split, SPLITS, dtype)
        _store_codes(v_left, v_right, target + stride_kv, unit_at + stride_scales_kv, in_half, HALF, KIND)
    else:
        tl.store(target[None, :] + tl.zeros([HEADS, 1], tl.int32), new_left, mask=key_mask)
        tl.store(target[None, :] + HALF + tl.zeros([HEADS, 1], tl.int32), new_right, mask=key_mask)
        v_left = _load(v_at, in_half, stride_split, SPLITS, dtype)
        v_right = _load(v_at + HALF, in_half, stride_split, SPLITS, dtype)
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
    group, pdl = num_q_heads // num_kv_heads, use_pdl(qkv.device, num_tokens)
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
        num_q_heads,
        num_kv_heads,
        GROUP=group,
        HEADS=triton.next_power_of_2(group + 1),
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=kv.shape[2],
        NORM=q_norm is not None,
        SPLITS=splits,
        KIND=0 if scales is None else _KINDS[kv.dtype],
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return q[:, :width].view(num_tokens, num_q_heads, head_dim)
