"""Plain versions of the kernels for quantized weights, in fp32 or float64, for tests. What they compute is the arithmetic of
docs/quantization.md."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The code of the largest value of a row."""
BLOCK = 128
"""Inputs, and outputs, that share a scale in block-scaled FP8."""


def quantize_rows_ref(x: Tensor, dtype: torch.dtype, *, block: bool = False) -> tuple[Tensor, Tensor]:
    """Codes [rows, size] and fp32 scales: [rows], or [rows, ceil(size / 128)] with `block`. A row of zeros has scale 0."""
    rows, size = x.shape
    width = BLOCK if block else size
    padded = torch.nn.functional.pad(x.float(), (0, -size % width)).view(rows, -1, width)
    largest = padded.abs().amax(-1)
    scales = largest / torch.full_like(largest, MOST[dtype])  # by a number, CUDA multiplies with its reciprocal
    units = padded / torch.where(scales == 0, 1.0, scales)[..., None]
    if dtype == torch.int8:
        codes = units.round().clamp(-127, 127).to(torch.int8)
    else:
        codes = units.clamp(-448.0, 448.0).to(dtype)
    return codes.view(rows, -1)[:, :size].contiguous(), scales if block else scales[:, 0]


def widened_ref(codes: Tensor, scales: Tensor) -> Tensor:
    """Float64 values of codes. scales: [rows], or of blocks of inputs [rows, n], or of blocks of both [m, n]."""
    wide = codes.double()
    if scales.dim() == 1:
        return wide * scales.double()[:, None]
    by_column = scales.double().repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    if scales.shape[0] != codes.shape[0]:
        by_column = by_column.repeat_interleave(BLOCK, 0)[: codes.shape[0]]
    return wide * by_column


def w8a8_ref(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Float64 product of quantized rows and a quantized weight, [rows, outputs]. Args: scales: see widened_ref."""
    return widened_ref(x, x_scales) @ widened_ref(weight, scales).T


def int4_weight_ref(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """[outputs, inputs] float64: (code - zero) * scale. Args: see triton_int4.pack_int4."""
    wide = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).double()
    per_input = (x.double().repeat_interleave(group_size, 1) for x in (zeros, scales))
    zero, scale = per_input
    return (wide - zero) * scale
