"""Codes and scales of a quantized KV cache, in plain torch: the reference of every kernel that writes or reads them.

    scale   = max |x| / LARGEST_CODE     fp32, of one head of one part (K or V) of one token
    code    = x / scale                  rounded to the nearest, ties to even; int8, E4M3 or E5M2
    element = code * scale               fp32

A head of zeros has scale 0, and so has one whose scale is too small for fp32. A head with a NaN or an infinity has scale NaN
and codes 0: each of its elements is NaN, and whoever reads it is found by its logits. So codes are always finite.

KV is quantized once, where it is computed. Everything else, and the step itself, reads what comes back from the codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.common.kv_format import LARGEST_CODE, KvGroup, Shard


@dataclass(frozen=True, slots=True)
class SlotCodec:
    """A slot is one part of one token in one layer: codes of all heads, then a scale for each: see common/kv_format.py.

    Args:
        heads: of a slot. dim: elements of a head.
        dtype: of the codes, a key of LARGEST_CODE.
        slot_bytes: scales included.
    """

    heads: int
    dim: int
    dtype: str
    slot_bytes: int

    @classmethod
    def of(cls, group: KvGroup, shard: Shard) -> SlotCodec | None:
        """None: the group's elements are not codes."""
        if not group.quantized:
            return None
        return cls(group.heads_per_rank(shard), group.dims[0], group.dtype, group.slot_bytes(shard))

    @property
    def code_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def _codes_end(self) -> int:
        return self.heads * self.dim

    def codes_of(self, slots: Tensor) -> Tensor:
        """slots: [..., slot_bytes] uint8. Returns: [..., heads, dim], a view."""
        return slots[..., : self._codes_end].view(self.code_dtype).unflatten(-1, (self.heads, self.dim))

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


def quantize(x: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """x: [..., dim]. Returns: codes [..., dim] of `dtype`, and scales [...] float32."""
    most = LARGEST_CODE[dtype]
    wide = x.float()
    scales = wide.abs().amax(-1) / most
    whole = torch.isfinite(scales) & (scales > 0)
    divided = wide / torch.where(whole, scales, 1.0)[..., None]
    divided = torch.where(whole[..., None], divided, 0.0).clamp_(-most, most)
    code_dtype: torch.dtype = getattr(torch, dtype)
    codes = divided if code_dtype.is_floating_point else divided.round_()
    return codes.to(code_dtype), torch.where(torch.isfinite(scales), scales, float("nan"))


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """codes: [..., dim]; scales: [...] float32. Returns: [..., dim] float32."""
    return codes.float() * scales[..., None]
