"""Codes and scales of quantized KV in numpy, for conversion between workers: bit for bit those of kernels/kv_codes.py, which
computes them beside a model.

A head's record is its codes and, behind them, the bytes of its scale: what no conversion may separate. In a slot the codes of
all heads come first: see common/kv_format.py.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from diptych.common.kv_format import DTYPES, KV_SCALE_DTYPE, dtype_bytes

SCALE_BYTES = dtype_bytes(KV_SCALE_DTYPE)
_LEAST_EXPONENT = {bits: 1 - (1 << (6 - bits)) + 1 for bits in (2, 3)}
"""Of normal codes with so many mantissa bits: 2**-14 and 2**-6."""


def records_of(slots: np.ndarray, heads: int, dim: int) -> np.ndarray:
    """slots: [..., slot_bytes] uint8. Returns: [..., heads, dim + SCALE_BYTES] uint8."""
    codes, scales = np.split(slots, [heads * dim], axis=-1)
    outer = slots.shape[:-1]
    return np.concatenate((codes.reshape(*outer, heads, dim), scales.reshape(*outer, heads, SCALE_BYTES)), axis=-1)


def slots_of(records: np.ndarray) -> np.ndarray:
    """The inverse."""
    codes, scales = np.split(records, [records.shape[-1] - SCALE_BYTES], axis=-1)
    outer = records.shape[:-2]
    return np.concatenate((codes.reshape(*outer, -1), scales.reshape(*outer, -1)), axis=-1)


def decode(records: np.ndarray, dtype: str) -> np.ndarray:
    """records: [..., dim + SCALE_BYTES] uint8. Returns: [..., dim] float32."""
    codes, scales = np.split(records, [records.shape[-1] - SCALE_BYTES], axis=-1)
    units = np.ascontiguousarray(scales).view(np.float32)
    with np.errstate(invalid="ignore"):  # NaN scales
        found: np.ndarray = _values(dtype)[codes] * units
    return found


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """x: [..., dim] float32. Returns: [..., dim + SCALE_BYTES] uint8."""
    most = np.float32(DTYPES[dtype].largest_code)
    with np.errstate(invalid="ignore"):
        units = np.abs(x).max(axis=-1, keepdims=True) / most
        whole = np.isfinite(units) & (units > 0)
        divided = np.where(whole, x / np.where(whole, units, np.float32(1)), np.float32(0))
    codes = _nearest(np.clip(divided, -most, most), dtype)
    units = np.where(np.isfinite(units), units, np.float32(np.nan)).astype(np.float32)
    return np.concatenate((codes, units.view(np.uint8)), axis=-1)


@cache
def _values(dtype: str) -> np.ndarray:
    """[256] float32: of each code."""
    codes = np.arange(256, dtype=np.uint8)
    bits = DTYPES[dtype].mantissa_bits
    if not bits:
        return codes.view(np.int8).astype(np.float32)
    size = (codes & 0x7F).astype(np.int32)
    exponent, mantissa = size >> bits, size & ((1 << bits) - 1)
    fraction = (mantissa + np.where(exponent > 0, 1 << bits, 0)).astype(np.float32)
    shifted = np.ldexp(fraction, np.maximum(exponent, 1) - 1 + _LEAST_EXPONENT[bits] - bits)
    values: np.ndarray = np.where(codes & 0x80, -shifted, shifted).astype(np.float32)
    return values


def _nearest(x: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest codes, ties to even, as bytes. x: float32, in size at most the largest code."""
    bits = DTYPES[dtype].mantissa_bits
    if not bits:
        integers: np.ndarray = np.rint(x).astype(np.int8).view(np.uint8)
        return integers
    raw = np.ascontiguousarray(x, np.float32).view(np.uint32)
    size, shift = raw & np.uint32(0x7FFFFFFF), np.uint32(23 - bits)
    least = _LEAST_EXPONENT[bits]
    half = np.uint32((1 << (22 - bits)) - 1)
    normal = ((size + half + ((size >> shift) & np.uint32(1))) >> shift) - np.uint32((least + 126) << bits)
    tiny = np.rint(np.ldexp(size.view(np.float32), bits - least)).astype(np.uint32)
    code = np.where(size < np.float32(2.0**least).view(np.uint32), tiny, normal)
    found: np.ndarray = (code | ((raw >> np.uint32(24)) & np.uint32(0x80))).astype(np.uint8)
    return found
