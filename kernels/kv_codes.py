"""Codes and scales of a quantized KV cache, in plain torch: the reference of every kernel that writes or reads them.

    scale   = max |x| / largest code     fp32, of one head of one part (K or V) of one token
    code    = x / scale                  rounded to the nearest, ties to even; int8, E4M3 or E5M2
    element = code * scale               fp32

The largest code is that of the dtype: 127, 448 or 57344.

A head of zeros has scale 0, and so has one whose scale is too small for fp32. A head with a NaN or an infinity has scale NaN
and codes 0: each of its elements is NaN, and whoever reads it is found by its logits. So codes are always finite.

KV is quantized once, where it is computed. Everything else, and the step itself, reads what comes back from the codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def largest_code(dtype: torch.dtype) -> float:
    """dtype: of codes."""
    return torch.finfo(dtype).max if dtype.is_floating_point else float(torch.iinfo(dtype).max)


@dataclass(frozen=True, slots=True)
class SlotCodec:
    """A slot is one part of one token in one layer: codes of all heads, then a scale for each.

    Args:
        heads: of a slot. dim: elements of a head.
        dtype: of the codes.
        slot_bytes: scales included.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    slot_bytes: int

    @property
    def _codes_end(self) -> int:
        return self.heads * self.dim

    def codes_of(self, slots: Tensor) -> Tensor:
        """slots: [..., slot_bytes] uint8. Returns: [..., heads, dim], a view."""
        codes = slots[..., : self._codes_end].view(self.dtype)
        strides = (*slots.stride()[:-1], self.dim, 1)
        return codes.as_strided((*slots.shape[:-1], self.heads, self.dim), strides)

    def scales_of(self, slots: Tensor) -> Tensor:
        """slots: [..., slot_bytes] uint8. Returns: [..., heads] float32, a view."""
        return slots[..., self._codes_end :].view(torch.float32)

    def encode(self, x: Tensor) -> Tensor:
        """x: [num_tokens, heads, dim], any floating dtype. Returns: [num_tokens, slot_bytes] uint8."""
        slots = torch.empty((x.shape[0], self.slot_bytes), dtype=torch.uint8, device=x.device)
        codes, scales = quantize(x, self.dtype)
        self.codes_of(slots).copy_(codes)
        self.scales_of(slots).copy_(scales)
        return slots

    def decode(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """slots: [..., slot_bytes] uint8. Returns: [..., heads, dim] of `dtype`."""
        return dequantize(self.codes_of(slots), self.scales_of(slots)).to(dtype)

    def scrub(self, slots: Tensor) -> None:
        """What stands for a NaN or an infinity becomes 0, in place. slots: [..., slot_bytes] uint8."""
        self.scales_of(slots).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        codes = self.codes_of(slots)
        if codes.is_floating_point():
            codes.copy_(codes.float().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x: [..., dim]. Returns: codes [..., dim] of `dtype`, and scales [...] float32."""
    most = largest_code(dtype)
    wide = x.float()
    largest = wide.abs().amax(-1)
    scales = largest / torch.full_like(largest, most)  # by a number, CUDA multiplies with its reciprocal
    whole = torch.isfinite(scales) & (scales > 0)
    divided = wide / torch.where(whole, scales, 1.0)[..., None]
    divided = torch.where(whole[..., None], divided, 0.0).clamp_(-most, most)
    codes = divided if dtype.is_floating_point else divided.round_()
    return codes.to(dtype), torch.where(torch.isfinite(scales), scales, float("nan"))


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """codes: [..., dim]; scales: [...] float32. Returns: [..., dim] float32."""
    return codes.float() * scales[..., None]
