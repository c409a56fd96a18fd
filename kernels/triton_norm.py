"""RMS norm (with the residual addition fused) and the gate of the feed-forward layer in Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin, use_pdl
from diptych.kernels.triton_lora_rows import LoraDelta, added_to_row, ranks_of_b, row_constants
from diptych.kernels.triton_quantize import BLOCK as SCALE_BLOCK
from diptych.kernels.triton_quantize import FP8_BLOCKS, QuantizedRows, room_for, store_quantized

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@triton.jit(do_not_specialize=["stride_scale", "stride_t_split"])  # of blocks and splits, a number of rows
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    t_ptr,
    b_ptr,
    ranks_ptr,
    adapters_ptr,
    eps,
    offset,
    size,
    stride_x,
    stride_split,
    stride_scale,
    stride_t_split,
    stride_t_row,
    stride_t_slot,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    T_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """RANKS: of an adapter, that are read before the wait and then at a time; 0: nothing is added to x."""
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
    if RANKS:
        slot = tl.load(adapters_ptr + row)
        rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
        b = ranks_of_b(b_ptr, slot, 0, rank, at, mask, size, RANK, RANKS)
    begin(PDL)
    x = tl.load(x_ptr + row * stride_x + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(x_ptr + split * stride_split + row * stride_x + at, mask=mask, other=0.0)
    if RANKS:
        more = added_to_row(
            b, t_ptr, row, slot, 0, 0, rank, stride_t_split, stride_t_row, stride_t_slot, RANK, RANKS, T_SPLITS
        )
        for first in tl.range(RANKS, rank, RANKS):
            b = ranks_of_b(b_ptr, slot, first, rank, at, mask, size, RANK, RANKS)
            more += added_to_row(
                b, t_ptr, row, slot, 0, first, rank, stride_t_split, stride_t_row, stride_t_slot, RANK, RANKS, T_SPLITS
            )
        x = tl.where(rank > 0, x.to(tl.float32) + more, x.to(tl.float32))  # else with its bits
    x = x.to(dtype)
    if RESIDUAL:
        # Rounded to the model's dtype before the norm, as the unfused sum is.
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * size + at, mask=mask, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(residual_ptr + row * size + at, x, mask=mask)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    y = (x * scale * weight).to(dtype)
    if QUANTIZED:
        y = y.to(tl.float32)
        store_quantized(y, out_ptr, scales_ptr, row, 0, size, stride_scale, BLOCK, BLOCKS, tl.max(tl.abs(y), 0))
    else:
        tl.store(out_ptr + row * size + at, y, mask=mask)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    offset: float = 0.0,
    delta: LoraDelta | None = None,
) -> Tensor:
    """y = s / sqrt(mean(s^2) + eps) * (weight + offset) over the last dim, s = x (+ residual).

    Args:
        x: [rows, size], contiguous in the last dim; or [splits, rows, size] fp32, whose sum, rounded to weight's dtype, is x
            (see triton_matmul). weight: [size], x's dtype.
        residual: [rows, size], contiguous, weight's dtype; overwritten with s.
        delta: what adapters add to x, in fp32, before it is rounded.
    Returns: [rows, size], weight's dtype; computed in fp32.
    Raises: ValueError on a shape or dtype mismatch.
    """
    rows, size = x.shape[-2:]
    out = torch.empty((rows, size), dtype=weight.dtype, device=x.device)
    _launch_norm(x, weight, eps, residual, offset, out, None, False, delta)
    return out


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    offset: float = 0.0,
    kind: str,
    delta: LoraDelta | None = None,
) -> QuantizedRows:
    """As rms_norm, and its result quantized (see triton_quantize.quantize_rows). Args: kind: one of triton_quantize.KINDS."""
    rows, size = x.shape[-2:]
    out = room_for(rows, size, kind, weight.dtype, x.device)
    _launch_norm(x, weight, eps, residual, offset, out.codes, out.scales, kind == FP8_BLOCKS, delta)
    return out


def _launch_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    offset: float,
    out: Tensor,
    scales: Tensor | None,
    blocks: bool,
    delta: LoraDelta | None,
) -> None:
    rows, size = x.shape[-2:]
    splits = x.shape[0] if x.dim() == 3 else 1
    wanted = torch.float32 if x.dim() == 3 else weight.dtype
    if weight.shape != (size,) or x.stride(-1) != 1 or x.dtype != wanted:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}")
    if residual is not None and (
        residual.shape != (rows, size) or residual.dtype != weight.dtype or not residual.is_contiguous()
    ):
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} does not fit x {tuple(x.shape)} {x.dtype}")
    block, pdl = triton.next_power_of_2(size), use_pdl(x.device, rows)
    if scales is not None:
        block = max(block, SCALE_BLOCK)
    if delta is not None:
        delta.check_fit(rows, size, parts=1)
    num_warps = max(1, min(16, block // (512 if delta is None else 256)))
    _rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        weight if scales is None else scales,
        *((weight,) * 4 if delta is None else delta.pointers),
        eps,
        offset,
        size,
        x.stride(-2),
        x.stride(0),
        0 if scales is None else scales.stride(-1),
        *((0, 0, 0) if delta is None else delta.strides),
        BLOCK=block,
        RESIDUAL=residual is not None,
        SPLITS=splits,
        QUANTIZED=scales is not None,
        BLOCKS=blocks,
        **row_constants(delta, block, num_warps),
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, fp32."""
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # tanh(t) as 1 - 2 / (exp(2 t) + 1): right for every t, also where exp ends in infinity.
        t = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * (1.0 - 1.0 / (tl.exp(2.0 * t) + 1.0))
    return gate * up


@triton.jit
def summed(at, mask, stride_split, SPLITS: tl.constexpr, dtype: tl.constexpr):
    """The sum over the splits, rounded to the model's dtype, in fp32."""
    x = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(at + split * stride_split, mask=mask, other=0.0)
    return x.to(dtype).to(tl.float32)


@triton.jit
def _gate_mul_kernel(
    x_ptr,
    out_ptr,
    size,
    stride_x,
    stride_split,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = summed(x_ptr + row * stride_x + at, mask, stride_split, SPLITS, dtype)
    up = summed(x_ptr + row * stride_x + size + at, mask, stride_split, SPLITS, dtype)
    tl.store(out_ptr + row * size + at, gated(gate, up, ACTIVATION).to(dtype), mask=mask)


def gate_mul(gate_up: Tensor, activation: str = "silu", dtype: torch.dtype | None = None) -> Tensor:
    """activation(gate) * up, in fp32.

    Args:
        gate_up: [rows, 2 * size], gate first, contiguous in the last dim; or [splits, rows, 2 * size] fp32, whose sum, rounded
            to `dtype`, is what is meant (see triton_matmul).
        activation: one of ACTIVATIONS.
        dtype: of the result; None: gate_up's.
    Returns: [rows, size].
    Raises: ValueError on an odd width, a strided last dim or another activation.
    """
    rows, width = _checked_gate(gate_up, activation)
    splits = gate_up.shape[0] if gate_up.dim() == 3 else 1
    out = torch.empty((rows, width // 2), dtype=dtype or gate_up.dtype, device=gate_up.device)
    pdl = use_pdl(gate_up.device, rows)
    block = min(1024, triton.next_power_of_2(width // 2))
    _gate_mul_kernel[(rows, triton.cdiv(width // 2, block))](
        gate_up,
        out,
        width // 2,
        gate_up.stride(-2),
        gate_up.stride(0),
        BLOCK=block,
        ACTIVATION=activation,
        SPLITS=splits,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out


def _checked_gate(gate_up: Tensor, activation: str) -> tuple[int, int]:
    if activation not in ACTIVATIONS:
        raise ValueError(f"no activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    rows, width = gate_up.shape[-2:]
    if width % 2 or gate_up.stride(-1) != 1:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must hold two contiguous halves")
    return rows, width


@triton.jit(do_not_specialize=["stride_scale"])  # of blocks, a number of rows
def _gate_quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, size, stride_x, stride_scale,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    gate = tl.load(x_ptr + row * stride_x + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + size + at, mask=mask, other=0.0).to(tl.float32)
    y = gated(gate, up, ACTIVATION).to(x_ptr.dtype.element_ty).to(tl.float32)
    store_quantized(y, codes_ptr, scales_ptr, row, 0, size, stride_scale, BLOCK, BLOCKS, tl.max(tl.abs(y), 0))


def gate_quantized(gate_up: Tensor, activation: str, kind: str) -> QuantizedRows:
    """gate_mul, and its result quantized: for many rows. Args: gate_up: [rows, 2 * size]. kind: one of triton_quantize.KINDS.
    Raises: see gate_mul."""
    rows, width = _checked_gate(gate_up, activation)
    out = room_for(rows, width // 2, kind, gate_up.dtype, gate_up.device)
    block, pdl = max(SCALE_BLOCK, triton.next_power_of_2(width // 2)), use_pdl(gate_up.device, rows)
    _gate_quantize_kernel[(rows,)](
        gate_up,
        out.codes,
        out.scales,
        width // 2,
        gate_up.stride(0),
        out.scales.stride(-1),
        BLOCK=block,
        ACTIVATION=activation,
        BLOCKS=kind == FP8_BLOCKS,
        PDL=pdl,
        num_warps=max(1, min(16, block // 512)),
        launch_pdl=pdl,
    )
    return out
