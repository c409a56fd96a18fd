"""Weights to the nearest code of a method, and what the codes mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
_MOST_INT8 = 127.0
_MOST_E4M3 = 448.0
MOST_CODE = 15
"""Of int4: codes are 0 to 15."""
MIDDLE = 8
"""The int4 code that means 0 where the format is symmetric."""
_SHRUNK = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72)
"""Ranges that are tried for a group's scale, as parts of the whole one."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One scale for each output: w = code * scale.

    Args:
        codes: [outputs, inputs] int8 or E4M3. scales: [outputs, 1] float32, above 0.
    """

    codes: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """[outputs, inputs] float32."""
        return self.codes.float() * self.scales


@dataclass(frozen=True, slots=True)
class Groups:
    """One scale and one zero for each output and group of inputs: w = (code - zero) * scale.

    Args:
        codes: [outputs, inputs] uint8, 0 to 15. scales: [outputs, groups] in the dtype that is stored, above 0.
        zeros: [outputs, groups] uint8, 0 to 15.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def values(self) -> Tensor:
        """[outputs, inputs] float32."""
        size = self.codes.shape[1] // self.scales.shape[1]
        zeros, scales = (each.float().repeat_interleave(size, 1) for each in (self.zeros, self.scales))
        return (self.codes.float() - zeros) * scales


def int8_rows(weight: Tensor) -> Rows:
    """weight: [outputs, inputs] float32. The largest magnitude of an output becomes 127."""
    scales = _scales(weight.abs().amax(1, keepdim=True) / _MOST_INT8)
    return Rows((weight / scales).round().clamp(-_MOST_INT8, _MOST_INT8).to(torch.int8), scales)


def fp8_rows(weight: Tensor) -> Rows:
    """weight: [outputs, inputs] float32. The largest magnitude of an output becomes 448."""
    scales = _scales(weight.abs().amax(1, keepdim=True) / _MOST_E4M3)
    return Rows((weight / scales).clamp(-_MOST_E4M3, _MOST_E4M3).to(E4M3), scales)


def _scales(scales: Tensor) -> Tensor:
    """A row of zeros gets scale 1; a scale too small for a normal number gets the smallest of those."""
    return torch.where(scales == 0, torch.ones_like(scales), scales.clamp(min=torch.finfo(scales.dtype).tiny))


def int4_grid(weight: Tensor, importance: Tensor, *, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero of one group: of some ranges, the one with the smallest squared error.

    Args:
        weight: [outputs, inputs of the group] float32.
        importance: [inputs of the group], a factor of each input's squared error.
        dtype: of the stored scales: what is returned has only values of it.
    Returns: scales [outputs] float32, zeros [outputs] float32.
    """
    low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # the smallest number above 0
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for part in _SHRUNK:
        if symmetric:
            scales = torch.maximum(-low, high) * part / (MOST_CODE / 2)
        else:
            scales = (high - low) * part / MOST_CODE
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        scales = scales.clamp(min=least).to(dtype).float()
        if symmetric:
            zeros = torch.full_like(scales, MIDDLE)
        else:
            zeros = (-low * part / scales).round().clamp(0, MOST_CODE)
        meant = int4_values(int4_codes(weight, scales, zeros), scales, zeros)
        error = ((weight - meant).square() * importance).sum(1)
        if best is None:
            best = error, scales, zeros
        else:
            better = error < best[0]
            best = (
                torch.where(better, error, best[0]),
                torch.where(better, scales, best[1]),
                torch.where(better, zeros, best[2]),
            )
    assert best is not None
    return best[1], best[2]


def int4_codes(weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """weight: [outputs, n]; scales, zeros: [outputs]. Returns: [outputs, n] float32 with integers of 0 to 15."""
    return (weight / scales[:, None] + zeros[:, None]).round().clamp(0, MOST_CODE)


def int4_values(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The reverse, for codes as int4_codes returns them."""
    return (codes - zeros[:, None]) * scales[:, None]


def int4_nearest(weight: Tensor, group_size: int, *, symmetric: bool, dtype: torch.dtype) -> Groups:
    """Each weight to its nearest code. weight: [outputs, inputs] float32; see int4_grid."""
    codes, scales, zeros = [], [], []
    for first in range(0, weight.shape[1], group_size):
        part = weight[:, first : first + group_size]
        of_group = int4_grid(part, torch.ones_like(part[0]), symmetric=symmetric, dtype=dtype)
        codes.append(int4_codes(part, *of_group))
        scales.append(of_group[0])
        zeros.append(of_group[1])
    return as_groups(torch.cat(codes, 1), torch.stack(scales, 1), torch.stack(zeros, 1), dtype)


def as_groups(codes: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Groups:
    """From float32 tensors, of which `scales` has values of `dtype` only."""
    return Groups(codes.to(torch.uint8), scales.to(dtype), zeros.to(torch.uint8))
