"""Weights as the checkpoint has them, in the model's dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from diptych.common.kv_format import Shard
from diptych.engine.exec.layers.linear import PLAIN, Linear, Part, ShardBy
from diptych.engine.exec.methods.base import StepRows, TensorPart, TensorSource


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """weight: [outputs, inputs]; bias: [outputs]."""

    weight: Tensor
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def _part(part: Part, layer: Linear, shard: Shard) -> list[TensorPart]:
    rows, columns = layer.share(part, shard)
    out = [TensorPart(f"{part.name}.weight", (part.outputs, layer.inputs), (rows, columns))]
    if layer.bias:
        out.append(TensorPart(f"{part.name}.bias", (part.outputs,), (rows,)))
    return out


class PlainMethod:
    """Implements methods.base.LinearMethod."""

    name = PLAIN

    def scales_whole_rows(self, layer: Linear) -> bool:
        """See LinearMethod.scales_whole_rows."""
        return False

    def num_bytes(self, layer: Linear, element_bytes: int) -> int:
        """See LinearMethod.num_bytes."""
        return layer.num_weights * element_bytes

    def create(self, layer: Linear, shard: Shard) -> list[TensorPart]:
        """See LinearMethod.create."""
        return [one for part in layer.parts for one in _part(part, layer, shard)]

    def load(self, layer: Linear, source: TensorSource, shard: Shard) -> PlainWeights:
        """See LinearMethod.load. Of a layer that is divided by inputs only rank 0 has the bias: results are added up."""
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for part in self.create(layer, shard):
            (weights if len(part.shape) == 2 else biases).append(part.take(source))
        has_bias = biases and (layer.shard is not ShardBy.INPUTS or shard.rank == 0)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return PlainWeights(weight, torch.cat(biases) if has_bias else None)

    def apply(self, weights: PlainWeights, x: Tensor, step: StepRows) -> Tensor:
        """See LinearMethod.apply."""
        return linear(x, weights.weight, weights.bias)
