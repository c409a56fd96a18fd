"""Rotary position embedding: tables of cosines and sines, and the rotation (halves, as Hugging Face checkpoints expect)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.engine.exec.layers.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32. llama3: wavelengths beyond the trained context are slowed by `factor`, short ones kept,
    those between blended (as in transformers' modeling_rope_utils). Raises: ValueError for another kind."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float) / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / inverse
        longest = rope.original_max_position / rope.low_freq_factor
        shortest = rope.original_max_position / rope.high_freq_factor
        blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - blend) * inverse / rope.factor + blend * inverse
        slowed = torch.where(wavelength > longest, inverse / rope.factor, inverse)
        return torch.where((wavelength <= longest) & (wavelength >= shortest), blended, slowed)
    if rope.kind != "default":
        raise ValueError(f"no rope of kind {rope.kind}")
    return inverse


def rope_tables(
    rope: Rope, head_dim: int, num_positions: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [num_positions, 1, head_dim / 2]: angles in fp32, then the model's dtype."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float), inverse_frequencies(rope, head_dim))[:, None]
    return angles.cos().to(device=device, dtype=dtype), angles.sin().to(device=device, dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [rows, heads, head_dim]; cos, sin: [rows, 1, head_dim / 2]. Returns: a new contiguous tensor."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(left, cos, out=out[..., :half]).addcmul_(right, sin, value=-1)
    torch.mul(right, cos, out=out[..., half:]).addcmul_(left, sin)
    return out


def table_of_each(
    ropes: Sequence[Rope], head_dim: int, num_positions: int, *, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """rope_tables for each layer's rope; layers with the same one share theirs."""
    made: dict[Rope, tuple[Tensor, Tensor]] = {}
    for rope in ropes:
        if rope not in made:
            made[rope] = rope_tables(rope, head_dim, num_positions, dtype=dtype, device=device)
    return [made[rope] for rope in ropes]
