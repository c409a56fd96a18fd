"""FP8 `quantization_config`, as DeepSeek and transformers write it: E4M3 weights, activations quantized where they are used.

Tensors of a layer: weight [outputs, inputs] E4M3, and weight_scale_inv [blocks of outputs, blocks of inputs] with
weight_block_size, else weight_scale, one for each output or one for all. Both multiply, whatever their name says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diptych.common.errors import ConfigError
from diptych.common.kv_format import Shard
from diptych.engine.exec.formats.base import (
    FIELD,
    Quantization,
    checked_scales,
    cut,
    declared,
    left_out_by,
    only,
    settings_of,
    take,
    take_bias,
    take_output_scales,
)
from diptych.engine.exec.layers.linear import Linear, Part
from diptych.engine.exec.methods.base import TensorPart, TensorSource
from diptych.engine.exec.methods.quantized import BLOCK, Fp8Weights

E4M3 = torch.float8_e4m3fn


class Fp8Format:
    """Implements formats.base.CheckpointFormat."""

    name = "fp8"
    quant_methods: tuple[str, ...] = ("fp8",)
    without_effect: tuple[str, ...] = ()

    def read(self, config: Mapping[str, Any]) -> Quantization:
        """See CheckpointFormat.read."""
        only(config, "activation_scheme", "dynamic")
        only(config, "fmt", None, "e4m3")
        only(config, "scale_fmt", None, "float")
        only(config, "dequantize", None, False)
        blocked = is_blocked(config, "weight_block_size", FIELD)
        left_out = left_out_by(config, "modules_to_not_convert", "ignored_layers")

        def declare(layer: Linear) -> Linear:
            return layer if left_out(layer) else declared(layer, "fp8", self.name, blocked=blocked)

        return Quantization(declare, only(config, "lm_head", None, False, True) is True)

    def tensors(self, layer: Linear, part: Part, shard: Shard) -> list[TensorPart]:
        """See CheckpointFormat.tensors."""
        return fp8_tensors(layer, part, shard, "weight_scale_inv")

    def load(self, layer: Linear, part: Part, shard: Shard, source: TensorSource) -> Fp8Weights:
        """See CheckpointFormat.load."""
        return load_fp8(layer, part, shard, source, "weight_scale_inv")


def is_blocked(config: Mapping[str, Any], key: str, prefix: str) -> bool:
    """Whether the config asks for blocks. Raises: ConfigError for blocks of another size than 128 x 128."""
    block = config.get(key)
    if block is not None and (not isinstance(block, (list, tuple)) or tuple(block) != BLOCK):
        raise ConfigError(f"{prefix}.{key}", block, f"must be {list(BLOCK)} or absent")
    return block is not None


def fp8_tensors(layer: Linear, part: Part, shard: Shard, block_scales: str) -> list[TensorPart]:
    """See CheckpointFormat.tensors. block_scales: what the scales of blocks are called."""
    rows, columns = layer.share(part, shard)
    weight = TensorPart(f"{part.name}.weight", (part.outputs, layer.inputs), (rows, columns))
    if not settings_of(layer)["blocked"]:
        return [weight, TensorPart(f"{part.name}.weight_scale", (part.outputs, 1), (rows, slice(None)))]
    shape = (-(-part.outputs // BLOCK[0]), -(-layer.inputs // BLOCK[1]))
    where = (cut(rows, BLOCK[0], part.name, shard), cut(columns, BLOCK[1], part.name, shard))
    return [weight, TensorPart(f"{part.name}.{block_scales}", shape, where)]


def load_fp8(layer: Linear, part: Part, shard: Shard, source: TensorSource, block_scales: str) -> Fp8Weights:
    """See CheckpointFormat.load. block_scales: see fp8_tensors."""
    weight, scales = fp8_tensors(layer, part, shard, block_scales)
    codes, bias = take(source, weight, E4M3).contiguous(), take_bias(layer, part, shard, source)
    if not settings_of(layer)["blocked"]:
        rows = layer.share(part, shard)[0]
        return Fp8Weights(codes, take_output_scales(source, scales.name, part.outputs, rows), None, bias)
    stored = scales.take(source, as_stored=True).float()
    return Fp8Weights(codes, checked_scales(source, scales.name, stored), BLOCK, bias)
