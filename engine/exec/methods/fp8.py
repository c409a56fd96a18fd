"""W8A8 in E4M3: weights with a scale for each output or each block of 128 x 128, and activations quantized for each row, or
each 128 inputs of a row, where they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.common.kv_format import Shard
from diptych.engine.exec.formats.base import settings_of
from diptych.engine.exec.formats.registry import read_parts, tensors_of
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.methods.base import StepRows, TensorPart, TensorSource
from diptych.engine.exec.methods.exact import finish, float8_product, in_bands, quantized_rows
from diptych.engine.exec.methods.quantized import BLOCK, SCALE_BYTES, Fp8Weights, joined

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of E4M3."""


class Fp8Method:
    """Implements methods.base.LinearMethod."""

    name = "fp8"

    def scales_whole_rows(self, layer: Linear) -> bool:
        """See LinearMethod.scales_whole_rows."""
        return not settings_of(layer)["blocked"]

    def num_bytes(self, layer: Linear, element_bytes: int) -> int:
        """See LinearMethod.num_bytes."""
        if not settings_of(layer)["blocked"]:
            return layer.num_weights + layer.outputs * SCALE_BYTES
        blocks = sum(-(-part.outputs // BLOCK[0]) for part in layer.parts) * -(-layer.inputs // BLOCK[1])
        return layer.num_weights + blocks * SCALE_BYTES

    def create(self, layer: Linear, shard: Shard) -> list[TensorPart]:
        """See LinearMethod.create."""
        return tensors_of(layer, shard)

    def load(self, layer: Linear, source: TensorSource, shard: Shard) -> Fp8Weights:
        """See LinearMethod.load. Raises: ConfigError also where blocks of a merged layer's parts do not meet."""
        parts = read_parts(layer, source, shard, Fp8Weights)
        block = parts[0].block
        if block is not None:
            for one, part in zip(layer.parts[:-1], parts[:-1], strict=True):
                outputs = part.weight.shape[0]
                if outputs % block[0]:
                    rule = f"{one.name} is followed by another layer in one block of {block[0]} outputs: must be a multiple"
                    raise ConfigError("quantization_config.weight_block_size", outputs, rule)
        return Fp8Weights(
            joined(part.weight for part in parts),
            joined(part.scales for part in parts),
            block,
            joined(part.bias for part in parts),
        )

    def apply(self, weights: Fp8Weights, x: Tensor, step: StepRows) -> Tensor:
        """See LinearMethod.apply. Sums are exact."""
        out = _by_output(weights, x) if weights.block is None else _by_block(weights, x, weights.block)
        return finish(out, weights.bias, x.dtype)


def _codes(scaled: Tensor) -> Tensor:
    return scaled.clamp(-LARGEST, LARGEST).to(E4M3)  # not every device saturates


def _by_output(weights: Fp8Weights, x: Tensor) -> Tensor:
    scaled, scales = quantized_rows(x, LARGEST)
    codes = _codes(scaled)
    out = [
        float8_product(codes, weights.weight[band]) * (scales * weights.scales[band]).double()
        for band in in_bands(*weights.weight.shape)
    ]
    return torch.cat(out, 1).float()


def _by_block(weights: Fp8Weights, x: Tensor, block: tuple[int, int]) -> Tensor:
    outputs, inputs = weights.weight.shape
    out = torch.zeros(x.shape[0], outputs, dtype=torch.float64, device=x.device)
    for index, first in enumerate(range(0, inputs, block[1])):
        span = slice(first, first + block[1])
        scaled, scales = quantized_rows(x[:, span], LARGEST)
        of_outputs = weights.scales[:, index].repeat_interleave(block[0])[:outputs]
        out += float8_product(_codes(scaled), weights.weight[:, span]) * (scales * of_outputs).double()
    return out.float()
