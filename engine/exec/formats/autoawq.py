"""AutoAWQ's `gemm` layout, which GPTQModel writes as well: int4 in groups of inputs, packed along the outputs.

Tensors of a layer: qweight [inputs, outputs / 8] int32, qzeros [groups, outputs / 8] int32, scales [groups, outputs]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diptych.common.kv_format import Shard
from diptych.engine.exec.formats.base import (
    Quantization,
    cut,
    declared,
    group_of,
    group_size,
    left_out_by,
    nibbles,
    only,
    settings_of,
    take,
    take_bias,
    take_scales,
)
from diptych.engine.exec.layers.linear import Linear, Part
from diptych.engine.exec.methods.base import TensorPart, TensorSource
from diptych.engine.exec.methods.quantized import Int4Weights, packed

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of the eight in an int32, from the lowest four bits on."""


class AutoAwqFormat:
    """Implements formats.base.CheckpointFormat."""

    name = "awq"
    quant_methods: tuple[str, ...] = ("awq",)
    without_effect: tuple[str, ...] = (
        "do_fuse", "exllama_config", "fuse_max_seq_len", "meta", "modules_to_fuse",
    )  # fmt: skip

    def read(self, config: Mapping[str, Any]) -> Quantization:
        """See CheckpointFormat.read."""
        only(config, "bits", 4)
        only(config, "version", "gemm", "GEMM")
        only(config, "zero_point", None, True, False)  # zeros are stored in any case, and read
        only(config, "sym", None, True, False)
        only(config, "backend", None, "autoawq", "auto")  # llm-awq packs otherwise
        only(config, "method", None, "awq")
        only(config, "desc_act", None, False)
        only(config, "pack_dtype", None, "int32")
        for key in ("checkpoint_format", "format"):
            only(config, key, None, "gemm")
        size, left_out = group_size(config), left_out_by(config, "modules_to_not_convert")

        def declare(layer: Linear) -> Linear:
            if left_out(layer):
                return layer
            of_layer = group_of(layer, size)
            return declared(layer, "int4", self.name, group_size=of_layer, symmetric=False, order=False)

        return Quantization(declare, only(config, "lm_head", None, False, True) is True)

    def tensors(self, layer: Linear, part: Part, shard: Shard) -> list[TensorPart]:
        """See CheckpointFormat.tensors."""
        rows, columns = layer.share(part, shard)
        size, eight = settings_of(layer)["group_size"], cut(rows, 8, part.name, shard)
        groups, count = cut(columns, size, part.name, shard), layer.inputs // size
        return [
            TensorPart(f"{part.name}.qweight", (layer.inputs, part.outputs // 8), (columns, eight)),
            TensorPart(f"{part.name}.qzeros", (count, part.outputs // 8), (groups, eight)),
            TensorPart(f"{part.name}.scales", (count, part.outputs), (groups, rows)),
        ]

    def load(self, layer: Linear, part: Part, shard: Shard, source: TensorSource) -> Int4Weights:
        """See CheckpointFormat.load."""
        weight, zeros, scales = self.tensors(layer, part, shard)
        codes = nibbles(take(source, weight, torch.int32), 1, _ORDER).T
        return Int4Weights(
            packed(codes),
            take_scales(source, scales).T.contiguous(),
            nibbles(take(source, zeros, torch.int32), 1, _ORDER).T.contiguous(),
            settings_of(layer)["group_size"],
            None,
            take_bias(layer, part, shard, source),
        )
