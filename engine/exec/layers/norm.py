"""An RMS norm as a model declares it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Norm:
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dim.

    Args:
        name: of the tensor in the checkpoint, less ".weight".
        offset: 0, or 1 for a family whose weights are stored around zero.
    """

    name: str
    size: int
    eps: float
    offset: float = 0.0
