"""Floats that bfloat16 has are kept in it: half the memory to read, the same results."""

from __future__ import annotations

import torch
from torch import Tensor

_CHECKED_AT_ONCE = 1 << 17
"""Values."""


def as_bfloat16(weight: Tensor) -> Tensor | None:
    """None: bfloat16 does not have all values. A few rows at a time, which stay in a core's cache. weight: [rows, columns]"""
    narrow = torch.empty(weight.shape, dtype=torch.bfloat16)
    some = max(1, _CHECKED_AT_ONCE // weight.shape[1])
    for first in range(0, len(weight), some):
        rows = slice(first, first + some)
        narrow[rows] = weight[rows]
        if not torch.equal(narrow[rows].float(), weight[rows]):
            return None
    return narrow
