"""RMS norm (with the residual addition fused) and the gate of the feed-forward layer in Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin, use_pdl

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    offset,
    size,
    stride_x,
    stride_split,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
    begin(PDL)
    x = tl.load(x_ptr + row * stride_x + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(x_ptr + split * stride_split + row * stride_x + at, mask=mask, other=0.0)
    x = x.to(out_ptr.dtype.element_ty)
    if RESIDUAL:
        # Rounded to the model's dtype before the norm, as the unfused sum is.
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * size + at, mask=mask, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(residual_ptr + row * size + at, x, mask=mask)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / size + eps)
    tl.store(out_ptr + row * size + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, offset: float = 0.0) -> Tensor:
    """y = s / sqrt(mean(s^2) + eps) * (weight + offset) over the last dim, s = x (+ residual).

    Args:
        x: [rows, size], contiguous in the last dim; or [splits, rows, size] fp32, whose sum, rounded to weight's dtype, is x
            (see triton_matmul). weight: [size], x's dtype.
        residual: [rows, size], contiguous, weight's dtype; overwritten with s.
    Returns: [rows, size], weight's dtype; computed in fp32.
    Raises: ValueError on a shape or dtype mismatch.
    """
    rows, size = x.shape[-2:]
    splits = x.shape[0] if x.dim() == 3 else 1
    wanted = torch.float32 if x.dim() == 3 else weight.dtype
    if weight.shape != (size,) or x.stride(-1) != 1 or x.dtype != wanted:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}")
    if residual is not None and (
        residual.shape != (rows, size) or residual.dtype != weight.dtype or not residual.is_contiguous()
    ):
        raise ValueError(f"residual {tuple(residual.shape)} {residual.dtype} does not fit x {tuple(x.shape)} {x.dtype}")
    out = torch.empty((rows, size), dtype=weight.dtype, device=x.device)
    block, pdl = triton.next_power_of_2(size), use_pdl(x.device, rows)
    _rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        offset,
        size,
        x.stride(-2),
        x.stride(0),
        BLOCK=block,
        RESIDUAL=residual is not None,
        SPLITS=splits,
        PDL=pdl,
        num_warps=max(1, min(16, block // 512)),
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _gate_mul_kernel(x_ptr, out_ptr, size, stride_x, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    gate = tl.load(x_ptr + row * stride_x + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + size + at, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # tanh(t) as 1 - 2 / (exp(2 t) + 1): right for every t, also where exp ends in infinity.
        t = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * (1.0 - 1.0 / (tl.exp(2.0 * t) + 1.0))
    tl.store(out_ptr + row * size + at, (gate * up).to(out_ptr.dtype.element_ty), mask=mask)


def gate_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up, in fp32.

    Args:
        gate_up: [rows, 2 * size], gate first, contiguous in the last dim.
        activation: one of ACTIVATIONS.
    Returns: [rows, size], its dtype.
    Raises: ValueError on an odd width, a strided last dim or another activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"no activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    rows, width = gate_up.shape
    if width % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} must hold two contiguous halves")
    out = torch.empty((rows, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    pdl = use_pdl(gate_up.device, rows)
    block = min(1024, triton.next_power_of_2(width // 2))
    _gate_mul_kernel[(rows, triton.cdiv(width // 2, block))](
        gate_up,
        out,
        width // 2,
        gate_up.stride(0),
        BLOCK=block,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
