"""The block formats of GGUF that are computed with as they lie in the file. Layouts are ggml's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Decoded = tuple[Tensor, Tensor, Tensor | None]
"""Codes [outputs, inputs] of integers, scales and offsets [outputs, inputs / group] float32: w = code * scale + offset."""


@dataclass(frozen=True, slots=True)
class Kind:
    """
    Args:
        weights, size_bytes: of a block.
        group: weights that share scale and offset.
        code_bits: a code is at most 2**code_bits, either sign.
        decode: [outputs, blocks, size_bytes] uint8 -> what they hold.
    """

    weights: int
    size_bytes: int
    group: int
    code_bits: int
    decode: Callable[[Tensor], Decoded]

    def row_bytes(self, inputs: int) -> int:
        return inputs // self.weights * self.size_bytes

    def decoded(self, rows: Tensor) -> Decoded:
        """rows: [outputs, bytes of a row] uint8."""
        return self.decode(torch.unflatten(rows, 1, (-1, self.size_bytes)))


def _half(blocks: Tensor, at: int) -> Tensor:
    """[outputs, blocks] float32, of a float16 at a byte of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


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


def _q4_k(blocks: Tensor) -> Decoded:
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
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


KINDS = {
    "Q8_0": Kind(32, 34, 32, 7, _q8_0),
    "Q4_1": Kind(32, 20, 32, 4, _q4_1),
    "Q5_0": Kind(32, 22, 32, 4, _q5_0),
    "Q4_K": Kind(256, 144, 32, 4, _q4_k),
    "Q6_K": Kind(256, 210, 16, 5, _q6_k),
}
