"""Layers of a rank: what it computes itself, apart from what it then hears from the other ranks."""

from __future__ import annotations

from torch import Tensor

from diptych.engine.exec.methods.base import LoadedLinear, StepRows
from diptych.engine.exec.parallel.communicator import Communicator, GatheredLinear


class SummedLinear:
    """A layer that is divided by inputs, outermost. The decoder applies `inner` and adds up the ranks' results where it adds the
    residual: see CudaDecoder."""

    __slots__ = ("inner", "communicator")

    def __init__(self, inner: LoadedLinear, communicator: Communicator) -> None:
        self.inner, self.communicator = inner, communicator

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        """See LoadedLinear."""
        return self.communicator.all_reduce(self.inner(x, step))


def own_part(layer: LoadedLinear) -> LoadedLinear:
    """What this rank computes of a layer."""
    return layer.inner if isinstance(layer, SummedLinear | GatheredLinear) else layer
