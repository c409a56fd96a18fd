"""Our own layout for the packed weights of a GGUF file, written by the conversion of such a file.

A layer has one tensor, `weight`: [outputs, bytes of a row] uint8, rows as in the file. quantization_config says the kind of
each layer's blocks: {"quant_method": "gguf", "lm_head": true, "kinds": {"model.layers.0.mlp.up_proj": "Q4_1", ...}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diptych.common.errors import ConfigError
from diptych.common.kv_format import Shard
from diptych.engine.exec.formats.base import (
    FIELD,
    Quantization,
    all_or_none,
    cut,
    declared,
    only,
    refusal,
    settings_of,
    take,
    take_bias,
)
from diptych.engine.exec.layers.linear import Linear, Part
from diptych.engine.exec.methods.base import TensorPart, TensorSource
from diptych.engine.exec.methods.gguf_blocks import decoded
from diptych.engine.exec.methods.gguf_kinds import KINDS
from diptych.engine.exec.methods.quantized import GgufWeights


class GgufFormat:
    """Implements formats.base.CheckpointFormat."""

    name = "gguf"
    quant_methods: tuple[str, ...] = ("gguf",)
    without_effect: tuple[str, ...] = ()

    def read(self, config: Mapping[str, Any]) -> Quantization:
        """See CheckpointFormat.read. Layers without a kind are plain."""
        kinds = config.get("kinds")
        if not isinstance(kinds, Mapping):
            raise ConfigError(f"{FIELD}.kinds", kinds, "must be an object of layers")

        def declare(layer: Linear) -> Linear:
            if not all_or_none(layer, lambda name: name in kinds, "kinds", sorted(kinds)):
                return layer
            named = [kinds[part.name] for part in layer.parts]
            for part, kind in zip(layer.parts, named, strict=True):
                found = KINDS.get(kind) if isinstance(kind, str) else None
                if found is None:
                    raise ConfigError(f"{FIELD}.kinds.{part.name}", kind, f"supported: {', '.join(KINDS)}")
                if layer.inputs % found.weights:
                    rule = f"blocks of {found.weights} weights must divide the {layer.inputs} inputs"
                    raise ConfigError(f"{FIELD}.kinds.{part.name}", kind, rule)
            return declared(layer, "gguf", self.name, kinds="+".join(named))

        return Quantization(declare, only(config, "lm_head", None, False, True) is True)

    def tensors(self, layer: Linear, part: Part, shard: Shard) -> list[TensorPart]:
        """See CheckpointFormat.tensors."""
        rows, columns = layer.share(part, shard)
        kind = KINDS[kind_of(layer, part)]
        blocks = cut(columns, kind.weights, part.name, shard)
        if blocks != slice(None):
            blocks = slice(blocks.start * kind.size_bytes, blocks.stop * kind.size_bytes)
        return [TensorPart(f"{part.name}.weight", (part.outputs, kind.row_bytes(layer.inputs)), (rows, blocks))]

    def load(self, layer: Linear, part: Part, shard: Shard, source: TensorSource) -> GgufWeights:
        """See CheckpointFormat.load. A scale of 0 is how GGUF holds a block of zeros."""
        [tensor], name = self.tensors(layer, part, shard), kind_of(layer, part)
        blocks = take(source, tensor, torch.uint8).contiguous()
        _, scales, offsets = decoded(name, blocks)
        if not bool(scales.isfinite().all()) or (offsets is not None and not bool(offsets.isfinite().all())):
            raise refusal(source, tensor.name, "has a scale that is infinite or NaN")
        return GgufWeights(name, blocks, take_bias(layer, part, shard, source))


def kind_of(layer: Linear, part: Part) -> str:
    """Of a part's blocks."""
    kinds: list[str] = settings_of(layer)["kinds"].split("+")
    return kinds[layer.parts.index(part)]
