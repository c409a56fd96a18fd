"""Products of quantized weights whose sums are exact, so that the order of adding changes no bit.

A row's result therefore depends neither on the other rows of a step nor on threads or the device. All sums are of integers
(scaled by a power of two) that float64 holds exactly; what is rounded is rounded element by element."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_ROWS = 1024
"""Rows of x computed together."""
_WEIGHTS = 1 << 23
"""Weights unpacked at once, at 8 bytes each."""
_EXACT_BITS = 52
"""Of the sums: float64 holds integers of 53 bits."""
_FLOAT_SUMS = 1024
"""Products of two int8 whose sum float32 holds: 1,024 x 127 x 128 is below 2**24."""
_MOST_SHIFTED = 200
"""Beyond the exponents of float32; those of infinity and NaN are of no meaning."""

Unpack = Callable[[slice], tuple[Tensor, Tensor, Tensor | None]]
"""Some outputs -> codes [some, inputs] of integers, scales and offsets [some, groups] float32; offsets None: all are 0."""


def in_bands(outputs: int, inputs: int) -> list[slice]:
    """Outputs in pieces that are unpacked at once."""
    step = max(1, _WEIGHTS // inputs)
    return [slice(first, min(first + step, outputs)) for first in range(0, outputs, step)]


def grouped_product(x: Tensor, outputs: int, group_size: int, code_bits: int, unpack: Unpack) -> Tensor:
    """x times weights code * scale + offset, where `group_size` inputs share scale and offset.

    x counts in fixed point, with at least 53 - 5 - log2(group_size) bits below the largest value of its row: what is
    smaller counts as 0. Float32 has 24.

    Args:
        x: [rows, inputs], a float.
        code_bits: every code is an integer of at most 2**code_bits, either sign.
    Returns: [rows, outputs] float32.
    """
    parts = [_grouped(rows, outputs, group_size, code_bits, unpack) for rows in torch.split(x, _ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _grouped(x: Tensor, outputs: int, group_size: int, code_bits: int, unpack: Unpack) -> Tensor:
    inputs = x.shape[1]
    bits = _EXACT_BITS - code_bits - (group_size - 1).bit_length()
    wide = x.double()
    _, exponents = torch.frexp(wide.abs().amax(1, keepdim=True))
    shifts = bits - exponents.clamp(-_MOST_SHIFTED, _MOST_SHIFTED)
    fixed = (wide * _power_of_two(shifts)).round_()
    out = torch.empty(x.shape[0], outputs, dtype=torch.float32, device=x.device)
    sums = None
    for band in in_bands(outputs, inputs):
        codes, scales, offsets = unpack(band)
        codes, scales = codes.double(), scales.double()
        total = torch.zeros(x.shape[0], codes.shape[0], dtype=torch.float64, device=x.device)
        if offsets is not None and sums is None:
            sums = fixed.view(x.shape[0], -1, group_size).sum(2)
        for group in range(inputs // group_size):
            span = slice(group * group_size, (group + 1) * group_size)
            # A product and a sum apart: fused, they would be rounded once in some places and twice in others.
            total += (fixed[:, span] @ codes[:, span].T).mul_(scales[:, group])
            if offsets is not None and sums is not None:
                total += sums[:, group, None] * offsets[:, group].double()
        out[:, band] = total.mul_(_power_of_two(-shifts)).float()
    return out


def _power_of_two(exponents: Tensor) -> Tensor:
    """Exact, where a library's pow need not be. exponents: integers from -1022 to 1023. Returns: float64."""
    return (exponents.to(torch.int64) + 1023 << 52).view(torch.float64)


def integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """codes: [rows, inputs] int8; weight: [outputs, inputs] int8. Returns: [rows, outputs] int32, exact.

    Float32 holds the sum of 1,024 products. Integer products of a library are not used: without VNNI they may saturate at
    16 bits in between.
    """
    out = torch.zeros(codes.shape[0], weight.shape[0], dtype=torch.int32, device=codes.device)
    for band in in_bands(*weight.shape):
        for first in range(0, codes.shape[1], _FLOAT_SUMS):
            span = slice(first, first + _FLOAT_SUMS)
            out[:, band] += (codes[:, span].float() @ weight[band, span].float().T).to(torch.int32)
    return out


def float8_product(codes: Tensor, weight: Tensor) -> Tensor:
    """codes: [rows, inputs], weight: [outputs, inputs], both E4M3. Returns: [rows, outputs] float64, exact: every product is
    a multiple of 2**-18 below 2**18, so up to 65,536 inputs fit. weight: without NaN."""
    return codes.double() @ _values_of_e4m3(weight).T


def _values_of_e4m3(weight: Tensor) -> Tensor:
    """As float64; eight times as fast on a CPU as torch's own conversion, which goes number by number.

    The bits of E4M3 are those of float16 but for the exponent's bias, 7 and 15, also where numbers are subnormal.
    """
    bits = weight.view(torch.uint8).to(torch.int16)
    halves = (bits << 8 & -0x8000) | (bits & 0x7F) << 7
    return halves.view(torch.float16).float().double().mul_(256)


def quantized_rows(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """x: [..., n]. Returns: x / scale, float32, and the scales [..., 1], float32, that bring the largest value of each row
    to `largest`; 0 for a row of zeros. A row that holds NaN or infinity gets such a scale."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    scales = most / torch.full_like(most, largest)  # a GPU multiplies by the reciprocal of a plain number
    return torch.where(scales > 0, wide / scales, 0.0), scales


def finish(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """out: [rows, outputs] float32. Returns: with the bias, in the model's dtype."""
    return (out if bias is None else out + bias.float()).to(dtype)
