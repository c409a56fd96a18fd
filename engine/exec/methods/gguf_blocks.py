"""What the blocks of a GGUF file hold. Layouts are ggml's."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.engine.exec.methods.gguf_kinds import KINDS

Decoded = tuple[Tensor, Tensor, Tensor | None]
"""Codes [outputs, inputs] of integers, scales and offsets [outputs, inputs / group] float32: w = code * scale + offset."""


def decoded(kind: str, rows: Tensor) -> Decoded:
    """rows: [outputs, bytes of a row] uint8."""
    return _DECODERS[kind](torch.unflatten(rows, 1, (-1, KINDS[kind].size_bytes)))


def half_at(blocks: Tensor, at: int) -> Tensor:
    """[outputs, blocks] float16, at a byte of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The same in float32."""
    return half_at(blocks, at).float()


def _low_then_high(codes: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: their low four bits, then their high ones."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _q8_0(blocks: Tensor) -> Decoded:
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return codes.flatten(1), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Decoded:
    return _low_then_high(blocks[..., 4:]).flatten(1), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Decoded:
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[..., 2:6, None] >> places & 1).flatten(-2)  # of 32 weights in order
    codes = (_low_then_high(blocks[..., 6:]) | fifth << 4).to(torch.int8) - 16
    return codes.flatten(1), _half(blocks, 0), None


def q4_k_bytes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of 8 groups of a block of Q4_K: what its two float16 are multiplied by. [outputs, blocks, 8] each, 0 to 63."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales, least


def _q4_k(blocks: Tensor) -> Decoded:
    scales, least = q4_k_bytes(blocks)
    codes = _low_then_high(torch.unflatten(blocks[..., 16:], -1, (4, 32)))
    scale, offset = _half(blocks, 0)[..., None] * scales, -_half(blocks, 2)[..., None] * least
    return codes.flatten(1), scale.flatten(1), offset.flatten(1)


def _q6_k(blocks: Tensor) -> Decoded:
    """Two halves of 128 weights: 64 bytes of low bits, 32 bytes of which each has the high bits of four."""
    low = torch.unflatten(blocks[..., :128], -1, (2, 2, 32))
    high = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32))
    low = torch.cat((low & 15, low >> 4), -2)
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8, device=blocks.device)
    codes = (low | (high >> shifts & 3) << 4).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return codes.flatten(1), (_half(blocks, 208)[..., None] * scales).flatten(1), None


_DECODERS = {"Q8_0": _q8_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q4_K": _q4_k, "Q6_K": _q6_k}
