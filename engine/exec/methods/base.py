"""What a method for linear layers is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from diptych.common.kv_format import Shard
from diptych.engine.exec.layers.linear import Linear

WHOLE = Shard()
"""Of a worker without tensor parallelism. Each rank has its part of every layer: see layers.linear.ShardBy."""


class TensorSource(Protocol):
    """Tensors by name: a checkpoint, or what stands in for one."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, in the dtype and on the device that the source was opened for; each may be taken once.

        Raises: ConfigError naming file and tensor when it is missing or has another shape.
        """
        ...


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What a rank reads of one tensor of the checkpoint. shape: of the whole tensor; where: the rank's part, an index."""

    name: str
    shape: tuple[int, ...]
    where: tuple[slice, ...]


class LinearWeights(Protocol):
    """What a method loaded: a type of its own."""

    @property
    def num_bytes(self) -> int: ...


class LinearMethod(Protocol):
    """Create, load and apply a linear layer. A method keeps no state: what a layer needs lies in its weights, and what
    depends on a step in buffers that they name.

    A back end may apply a method's weights with kernels of its own (see backends.base.Backend.keep); `apply` is the
    reference.
    """

    name: str

    def create(self, layer: Linear, shard: Shard) -> list[TensorPart]:
        """The tensors that it reads, in the order in which they are merged. Raises: ConfigError where a shard cannot be cut."""
        ...

    def load(self, layer: Linear, source: TensorSource, shard: Shard) -> LinearWeights:
        """Returns: the weights, of the method's own type. Raises: what the source raises."""
        ...

    def apply(self, weights: Any, x: Tensor) -> Tensor:
        """x: [rows, inputs of the shard]. Returns: [rows, outputs of the shard]."""
        ...


class LoadedLinear(Protocol):
    """A linear layer with its weights, as a back end keeps them."""

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs]. Returns: [rows, outputs]."""
        ...
