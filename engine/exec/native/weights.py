"""Linear layers packed for the compiled kernels: one copy of every weight, in panels."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.engine.exec.linear import bias_bytes
from diptych.engine.exec.methods.base import StepRows
from diptych.kernels.native.api import HugePages, Library


class PackedLinear:
    """y = x @ weight.T + bias on torch's number of threads."""

    __slots__ = ("packed", "bias", "_library", "_outputs")

    def __init__(self, library: Library, memory: HugePages, weight: Tensor, bias: Tensor | None) -> None:
        self._library, self._outputs = library, weight.shape[0]
        self.packed, self.bias = library.pack(weight, memory), bias

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes + bias_bytes(self.bias)

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        """See LoadedLinear."""
        return self._library.linear(x.contiguous(), self.packed, self.bias, self._outputs, torch.get_num_threads())


class Packer:
    """Makes the linear layers of one model."""

    def __init__(self, library: Library) -> None:
        self._library, self._memory = library, HugePages()

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return PackedLinear(self._library, self._memory, weight, bias)
