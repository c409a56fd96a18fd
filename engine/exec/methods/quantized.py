"""Quantized weights of a linear layer as methods load them, the same for every back end.

Each back end keeps them in a form of its own (see backends.base.Backend.keep). What they mean is said by the methods'
`apply`, the reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = (128, 128)
"""Outputs and inputs that share a scale in block-scaled FP8."""
SCALE_BYTES = 4
"""Of int8 and FP8."""


def _bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """Symmetric, for activations quantized for each row.

    Args:
        weight: [outputs, inputs] int8.
        scales: [outputs] float32, one for each output.
        bias: [outputs], the model's dtype.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return _bytes(self.weight, self.scales, self.bias)


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """E4M3, for activations quantized for each row.

    Args:
        weight: [outputs, inputs] float8_e4m3fn.
        scales: float32; [outputs], or with `block` one for each block: [ceil(outputs / 128), ceil(inputs / 128)].
        block: BLOCK; None: one scale for each output.
        bias: [outputs], the model's dtype.
    """

    weight: Tensor
    scales: Tensor
    block: tuple[int, int] | None
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return _bytes(self.weight, self.scales, self.bias)


@dataclass(frozen=True, slots=True)
class Int4Weights:
    """Groups of inputs share a scale and a zero; activations stay in the model's dtype.

    Args:
        codes: [outputs, inputs // 2] uint8: input 2k in the low four bits, 2k + 1 in the high ones; codes 0 to 15.
        scales: [outputs, inputs // group_size], the model's dtype.
        zeros: [outputs, inputs // group_size] uint8, the codes that mean 0: 0 to 15, 8 where the format is symmetric.
        order: [inputs] int32, input order[k] of the layer is multiplied by code k; None: as they are.
        bias: [outputs], the model's dtype.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    order: Tensor | None
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return _bytes(self.codes, self.scales, self.zeros, self.order, self.bias)


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """Packed as in a GGUF file.

    Args:
        kind: the name of the blocks' format, "Q8_0" for example.
        blocks: [outputs, bytes of a row] uint8.
        bias: [outputs], the model's dtype.
    """

    kind: str
    blocks: Tensor
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return _bytes(self.blocks, self.bias)


@dataclass(frozen=True, slots=True)
class GgufParts:
    """Of a merged layer whose parts have several kinds: their outputs follow each other in this order."""

    parts: tuple[GgufWeights, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def joined(parts: Iterable[Tensor | None]) -> Any:
    """Tensors of a merged layer's parts, along the outputs; None where no part has one."""
    found = [part for part in parts if part is not None]
    return None if not found else found[0] if len(found) == 1 else torch.cat(found)


def unpacked(codes: Tensor) -> Tensor:
    """codes: [outputs, inputs // 2] uint8, see Int4Weights. Returns: [outputs, inputs] uint8, 0 to 15."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def packed(codes: Tensor) -> Tensor:
    """The reverse of `unpacked`; codes of any integer type."""
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4
