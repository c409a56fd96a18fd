"""Rows quantized as they are computed, for layers whose activations have eight bits (W8A8).

Each row has a scale, its largest magnitude over the largest code; block-scaled FP8 has one for each 128 inputs of a row. Codes
are the row times the reciprocal of its scale, rounded to the nearest, ties to even: at a tie, and only there, a code may be the
neighbour of what a division gives. A row of zeros, or of magnitudes below 1e-30, has scale 0 and codes 0.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin, use_pdl

BLOCK = 128
"""Inputs that share a scale in block-scaled FP8."""
INT8, FP8, FP8_BLOCKS = "int8", "fp8", "fp8-blocks"
KINDS = (INT8, FP8, FP8_BLOCKS)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """
    Args:
        codes: [rows, size], int8 or float8_e4m3fn.
        scales: float32, [rows], or [rows, ceil(size / 128)] whose first stride is 1.
        dtype: of the rows before.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape


def room_for(rows: int, size: int, kind: str, dtype: torch.dtype, device: torch.device) -> QuantizedRows:
    """Of rows that a kernel writes. Raises: ValueError for a kind that is not known."""
    if kind not in KINDS:
        raise ValueError(f"no kind {kind!r}; known: {', '.join(KINDS)}")
    code = torch.int8 if kind == INT8 else torch.float8_e4m3fn
    codes = torch.empty((rows, size), dtype=code, device=device)
    if kind == FP8_BLOCKS:
        scales = torch.empty((triton.cdiv(size, BLOCK), rows), dtype=torch.float32, device=device).t()
    else:
        scales = torch.empty(rows, dtype=torch.float32, device=device)
    return QuantizedRows(codes, scales, dtype)


@triton.jit
def _code(units, dtype: tl.constexpr):
    """Nearest codes of x / scale, in fp32."""
    if dtype == tl.int8:
        rounded = (units + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no bits behind the point
        code = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
    else:
        # Rounded here, so that the conversion is exact: Triton's interpreter rounds ties and subnormals differently.
        units = tl.minimum(tl.maximum(units, -448.0), 448.0)
        bits = units.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # 3 bits of mantissa
        small = (units + 24576.0) - 24576.0  # 1.5 * 2^14: a multiple of 2^-9, the least subnormal
        code = tl.where(tl.abs(units) < 0.015625, small, normal)
    return code.to(dtype)


@triton.jit
def _scale(largest, MOST: tl.constexpr):
    """Scale and its reciprocal; both 0 for zeros."""
    scale = tl.where(largest < 1e-30, 0.0, tl.div_rn(largest, largest * 0.0 + MOST))
    return scale, tl.where(scale == 0.0, 0.0, 1.0 / tl.where(scale == 0.0, 1.0, scale))


@triton.jit
def store_quantized(
    x, codes_ptr, scales_ptr, row, first, size, stride_scale, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, largest
):
    """A row's elements from `first` on, quantized and stored.

    Args:
        x: [BLOCK] fp32, zeros past `size`. largest: magnitude of the whole row, not needed with BLOCKS.
        stride_scale: between a row's scales.
    """
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    MOST: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    at = first + tl.arange(0, BLOCK)
    if BLOCKS:
        parts: tl.constexpr = BLOCK // 128
        wide = tl.reshape(x, [parts, 128])
        scale, over = _scale(tl.max(tl.abs(wide), 1), MOST)
        part = first // 128 + tl.arange(0, parts)
        tl.store(scales_ptr + row + part * stride_scale, scale, mask=part * 128 < size)
        code = tl.reshape(_code(wide * over[:, None], dtype), [BLOCK])
    else:
        scale, over = _scale(largest, MOST)
        tl.store(scales_ptr + row, scale, mask=first == 0)
        code = _code(x * over, dtype)
    tl.store(codes_ptr + row * size + at, code, mask=at < size)


@triton.jit(do_not_specialize=["stride_scale"])  # of blocks, a number of rows
def _quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, size, stride_x, stride_scale,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    begin(PDL)
    largest = 0.0
    if not BLOCKS:
        every = tl.arange(0, WHOLE)
        largest = tl.max(
            tl.abs(tl.load(x_ptr + row * stride_x + every, mask=every < size, other=0.0).to(tl.float32)), 0
        )
    at = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + at, mask=at < size, other=0.0).to(tl.float32)
    store_quantized(x, codes_ptr, scales_ptr, row, first, size, stride_scale, BLOCK, BLOCKS, largest)


_FEW_ROWS = 64
_PART = 1024
"""Elements of a program when rows are few: each of a row's programs finds the largest for itself."""


def quantize_rows(x: Tensor, kind: str) -> QuantizedRows:
    """Args: x: [rows, size], contiguous in the last dim. kind: one of KINDS. Raises: ValueError."""
    rows, size = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} must be contiguous in the last dim")
    out = room_for(rows, size, kind, x.dtype, x.device)
    whole, pdl = max(BLOCK, triton.next_power_of_2(size)), use_pdl(x.device, rows)
    block = min(whole, _PART) if rows <= _FEW_ROWS or kind == FP8_BLOCKS else whole
    _quantize_kernel[(rows, triton.cdiv(size, block))](
        x,
        out.codes,
        out.scales,
        size,
        x.stride(0),
        out.scales.stride(-1),
        WHOLE=whole,
        BLOCK=block,
        BLOCKS=kind == FP8_BLOCKS,
        PDL=pdl,
        num_warps=4 if kind == FP8_BLOCKS else max(1, min(16, whole // 512)),
        launch_pdl=pdl,
    )
    return out
