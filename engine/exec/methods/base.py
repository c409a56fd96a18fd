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

    def take(
        self, name: str, shape: tuple[int, ...], *, as_stored: bool = False, where: tuple[slice, ...] = ()
    ) -> Tensor:
        """The tensor, in the dtype and on the device that the source was opened for; each may be taken once.

        Args:
            shape: of the whole tensor.
            as_stored: in the checkpoint's own dtype, which may be one of integers: quantized weights and their scales.
            where: this part of it only, in memory of its own; what lies beside it need not be read. Steps are 1.
        Raises: ConfigError naming file and tensor when it is missing or has another shape; without `as_stored` also when
            it holds no floating-point numbers.
        """
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor that is not taken yet; None: there is none of this name."""
        ...

    def file_of(self, name: str) -> str:
        """The file that a tensor lies in, taken or not; the folder where there is none of this name."""
        ...


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step says of the rows that a linear layer computes.

    Args:
        adapters: [rows] int32 on the model's device: the adapter of each row, -1: none. None: no row has one.
    """

    adapters: Tensor | None = None

    def only(self, rows: Tensor | None) -> StepRows:
        """Of some rows, in this order. Args: rows: [n], indices; None: all."""
        return self if rows is None or self.adapters is None else StepRows(self.adapters[rows])


PLAIN_ROWS = StepRows()
"""Of a step in which no row has an adapter."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What a rank reads of one tensor of the checkpoint. shape: of the whole tensor; where: the rank's part, an index."""

    name: str
    shape: tuple[int, ...]
    where: tuple[slice, ...]

    def take(self, source: TensorSource, *, as_stored: bool = False) -> Tensor:
        """The rank's part. Raises: what the source raises."""
        return source.take(self.name, self.shape, as_stored=as_stored, where=self.where)


def cut_out(tensor: Tensor, where: tuple[slice, ...]) -> Tensor:
    """A part of a tensor, in memory of its own, so that the rest can be freed; where it is all of it, the tensor."""
    part = tensor[where]
    return part if part.numel() == tensor.numel() else part.clone()


class LinearWeights(Protocol):
    """What a method loaded: a type of its own."""

    @property
    def num_bytes(self) -> int: ...


class LinearMethod(Protocol):
    """Create, load and apply a linear layer. A method keeps no state: what a layer needs lies in its weights and in
    `layer.settings`, and what depends on a step is in StepRows. Where the tensors of a checkpoint lie, and which layers have
    the method, say engine.exec.formats.

    A back end may apply a method's weights with kernels of its own (see backends.base.Backend.keep); `apply` is the
    reference.
    """

    name: str

    def scales_whole_rows(self, layer: Linear) -> bool:
        """Whether activations get one scale for all inputs. Ranks that divide these have a scale each, and other values."""
        ...

    def num_bytes(self, layer: Linear, element_bytes: int) -> int:
        """Of the weights that `load` returns, biases left out.

        Args:
            layer: of a rank as parallel.place.local_description cuts it.
            element_bytes: of the model's dtype.
        """
        ...

    def create(self, layer: Linear, shard: Shard) -> list[TensorPart]:
        """The tensors that it reads, in the order in which they are merged. A rank's share is `layer.share`, for scales as
        for weights. Raises: ConfigError where a shard cannot be cut."""
        ...

    def load(self, layer: Linear, source: TensorSource, shard: Shard) -> LinearWeights:
        """Returns: the weights, of the method's own type. Raises: what the source raises."""
        ...

    def apply(self, weights: Any, x: Tensor, step: StepRows) -> Tensor:
        """x: [rows, inputs of the shard]; step: of the same rows. Returns: [rows, outputs of the shard]."""
        ...


class LoadedLinear(Protocol):
    """A linear layer with its weights, as a back end keeps them."""

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        """x: [rows, inputs]; step: of the same rows. Returns: [rows, outputs]."""
        ...
