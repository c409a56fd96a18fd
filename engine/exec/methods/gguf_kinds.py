"""The block formats of GGUF that are computed with as they lie in the file. Without torch: the converter imports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """
    Args:
        weights, size_bytes: of a block.
        group: weights that share scale and offset.
        code_bits: a code is at most 2**code_bits, either sign.
    """

    weights: int
    size_bytes: int
    group: int
    code_bits: int

    def row_bytes(self, inputs: int) -> int:
        return inputs // self.weights * self.size_bytes


KINDS = {
    "Q8_0": Kind(32, 34, 32, 7),
    "Q4_1": Kind(32, 20, 32, 4),
    "Q5_0": Kind(32, 22, 32, 4),
    "Q4_K": Kind(256, 144, 32, 4),
    "Q6_K": Kind(256, 210, 16, 5),
}
