"""The 64-bit sum that travels with KV in GPU memory, where the host never sees the bytes: reference and constants.

    sum over 8-byte words w at position p of  h ^ (h >> 32),  h = (w + p * STEP) * FACTOR,  all modulo 2**64

One changed word always changes the sum (every word's term is a bijection of it); words that are swapped, or of another slab's
life, change it but for one case in 2**64. It finds damage and mix-ups, not forgers: handles carry a MAC for those.
"""

from __future__ import annotations

import numpy as np

STEP = 0x1E3779B97F4A7C15
FACTOR = 0x3F58476D1CE4E5B9
"""Odd and below 2**63: Triton takes them for signed numbers."""
WORD_BYTES = 8


def kv_sum(data: np.ndarray) -> int:
    """data: uint8, a multiple of 8 bytes. Returns: the sum, 0 <= sum < 2**64. Raises: ValueError for another length."""
    if data.nbytes % WORD_BYTES:
        raise ValueError(f"{data.nbytes} bytes are no whole number of {WORD_BYTES}-byte words")
    words = np.ascontiguousarray(data).view(np.int64)
    mixed = (words + np.arange(len(words), dtype=np.int64) * np.int64(STEP)) * np.int64(FACTOR)
    return int((mixed ^ (mixed >> np.int64(32))).sum(dtype=np.int64)) & (2**64 - 1)
