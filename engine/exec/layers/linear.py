"""A linear layer as a model declares it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diptych.common.kv_format import Shard

PLAIN = "plain"
"""The method of weights that are kept as they are: see engine.exec.methods."""


class ShardBy(Enum):
    """How tensor parallelism divides a layer's weight among ranks."""

    OUTPUTS = "outputs"
    """Each rank has a part of the outputs (of every part of a merged layer)."""
    INPUTS = "inputs"
    """Each rank has a part of the inputs; the ranks' results are added up."""
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class Part:
    """One linear layer of the checkpoint: its tensors are `name`.weight [outputs, inputs] and, with a bias, `name`.bias.

    Args:
        heads: heads that the outputs are, which ranks do not cut; 0: outputs may be cut anywhere.
        kv: they are KV heads: each rank has those of its KV pool, see Shard.heads.
    """

    name: str
    outputs: int
    heads: int = 0
    kv: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight.T + bias. Several parts are merged along the outputs, in the order given.

    Args:
        method: how weights are kept and applied; a key of engine.exec.methods.registry.METHODS. Families leave it plain:
            the checkpoint's quantization_config says which layers have another.
        settings: of the method, by name: bits, group size.
    """

    parts: tuple[Part, ...]
    inputs: int
    bias: bool = False
    shard: ShardBy = ShardBy.REPLICATED
    method: str = PLAIN
    settings: tuple[tuple[str, int | float | str | bool], ...] = ()

    def share(self, part: Part, shard: Shard) -> tuple[slice, slice]:
        """Rows and columns of a part's weight that a rank has; slice(None): all. Raises: ConfigError naming what cannot be
        divided."""
        rows = columns = slice(None)
        if self.shard is ShardBy.OUTPUTS:
            count = part.heads or part.outputs
            mine = shard.heads(count) if part.kv else shard.units(count, part.name)
            size = part.outputs // count
            if len(mine) < count:
                rows = slice(mine.start * size, mine.stop * size)
        elif self.shard is ShardBy.INPUTS:
            mine = shard.units(self.inputs, part.name)
            if len(mine) < self.inputs:
                columns = slice(mine.start, mine.stop)
        return rows, columns

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def num_weights(self) -> int:
        """Without biases."""
        return self.outputs * self.inputs
