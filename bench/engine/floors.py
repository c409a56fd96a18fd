"""Limits of the machine: read bandwidth and matmul rate, measured in the run, and the resulting tokens/s.

A step takes at least as long as reading the weights once, and at least as long as its floating-point operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diptych.engine.exec.models.description import ModelDescription
from diptych.kernels.native.api import HugePages

_READ_FLOATS = 64 << 20
_SIDE = 1024


@dataclass(frozen=True, slots=True)
class Ceilings:
    """bytes_per_s: reading memory; flops_per_s: torch.mm of 1024 x 1024; the best of several tries, in fp32."""

    bytes_per_s: float
    flops_per_s: float

    def better(self, other: Ceilings) -> Ceilings:
        return Ceilings(
            max(self.bytes_per_s, other.bytes_per_s),
            max(self.flops_per_s, other.flops_per_s),
        )


class CeilingBench:
    """Uses torch's number of threads."""

    def __init__(self) -> None:
        self._read = HugePages().take(_READ_FLOATS).fill_(1.0)
        self._left, self._right = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)

    def measure(self, repeats: int = 4) -> Ceilings:
        reads = min(_seconds(self._read.sum) for _ in range(repeats))
        products = min(_seconds(lambda: self._left @ self._right) for _ in range(repeats))
        return Ceilings(4 * _READ_FLOATS / reads, 2 * _SIDE**3 / products)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Floor:
    """Upper bound of tokens per second of any fp32 implementation on this machine."""

    def __init__(self, description: ModelDescription, ceilings: Ceilings) -> None:
        self._layers, self._head = description.layer_weights, description.head_weights
        # FLOPs of one query and one key, in all layers.
        self._attention = 4 * sum(block.attention.q_size for block in description.blocks)
        self._ceilings = ceilings

    def _step_s(self, flops: float) -> float:
        read = 4 * (self._layers + self._head) / self._ceilings.bytes_per_s
        return max(read, flops / self._ceilings.flops_per_s)

    def _prompt_flops(self, length: int) -> float:
        return 2 * (self._layers * length + self._head) + self._attention * length * (length + 1) / 2

    def _prompts_s(self, lengths: Sequence[int]) -> float:
        return self._step_s(sum(map(self._prompt_flops, lengths)))

    def _decode_s(self, lengths: Sequence[int], outputs: Sequence[int]) -> float:
        """All tokens after the first ones; all requests start together."""
        total = 0.0
        for index in range(1, max(outputs)):
            running = [length + index for length, count in zip(lengths, outputs, strict=True) if count > index]
            total += self._step_s(2 * (self._layers + self._head) * len(running) + self._attention * sum(running))
        return total

    def prefill_rate(self, lengths: Sequence[int]) -> float:
        return sum(lengths) / self._prompts_s(lengths)

    def decode_rate(self, lengths: Sequence[int], outputs: Sequence[int]) -> float:
        return (sum(outputs) - len(outputs)) / self._decode_s(lengths, outputs)

    def whole_rate(self, lengths: Sequence[int], outputs: Sequence[int]) -> float:
        """Output tokens per second of prompts and outputs together."""
        return sum(outputs) / (self._prompts_s(lengths) + self._decode_s(lengths, outputs))
