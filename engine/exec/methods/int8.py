"""W8A8: int8 weights with a scale for each output, and activations quantized for each row where they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.kv_format import Shard
from diptych.engine.exec.formats.registry import read_parts, tensors_of
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.methods.base import StepRows, TensorPart, TensorSource
from diptych.engine.exec.methods.exact import finish, integer_product, quantized_rows
from diptych.engine.exec.methods.quantized import SCALE_BYTES, Int8Weights, joined

_LARGEST = 127.0


class Int8Method:
    """Implements methods.base.LinearMethod."""

    name = "int8"

    def scales_whole_rows(self, layer: Linear) -> bool:
        """See LinearMethod.scales_whole_rows."""
        return True

    def num_bytes(self, layer: Linear, element_bytes: int) -> int:
        """See LinearMethod.num_bytes."""
        return layer.num_weights + layer.outputs * SCALE_BYTES

    def create(self, layer: Linear, shard: Shard) -> list[TensorPart]:
        """See LinearMethod.create."""
        return tensors_of(layer, shard)

    def load(self, layer: Linear, source: TensorSource, shard: Shard) -> Int8Weights:
        """See LinearMethod.load."""
        parts = read_parts(layer, source, shard, Int8Weights)
        return Int8Weights(
            joined(part.weight for part in parts),
            joined(part.scales for part in parts),
            joined(part.bias for part in parts),
        )

    def apply(self, weights: Int8Weights, x: Tensor, step: StepRows) -> Tensor:
        """See LinearMethod.apply. Sums of integers, so that it equals every other exact implementation bit for bit."""
        scaled, scales = quantized_rows(x, _LARGEST)
        codes = scaled.round().clamp_(-_LARGEST, _LARGEST).nan_to_num_(0.0).to(torch.int8)
        out = integer_product(codes, weights.weight).float() * (scales * weights.scales)
        return finish(out, weights.bias, x.dtype)
