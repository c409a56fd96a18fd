"""GPTQ as AutoGPTQ and GPTQModel write it: int4 in groups of inputs, packed along the inputs.

Tensors of a layer: qweight [inputs / 8, outputs] int32, qzeros [groups, outputs / 8] int32, scales [groups, outputs], g_idx
[inputs] int32, the group of each input. Format `gptq` stores zeros less one; `gptq_v2` stores them as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.common.kv_format import Shard
from diptych.engine.exec.formats.base import (
    FIELD,
    Quantization,
    all_or_none,
    cut,
    declared,
    group_of,
    group_size,
    input_order,
    left_out_by,
    nibbles,
    only,
    refusal,
    refuse_order,
    settings_of,
    take,
    take_bias,
    take_scales,
)
from diptych.engine.exec.layers.linear import Linear, Part
from diptych.engine.exec.methods.base import TensorPart, TensorSource
from diptych.engine.exec.methods.quantized import Int4Weights, packed

_FORMATS = {None: 1, "gptq": 1, "gptq_v2": 0}
"""What is added to stored zeros, by checkpoint_format."""


class GptqFormat:
    """Implements formats.base.CheckpointFormat."""

    name = "gptq"
    quant_methods: tuple[str, ...] = ("gptq",)
    without_effect: tuple[str, ...] = (
        "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_percent", "dataset",
        "disable_exllama", "exllama_config", "hyb_act", "max_input_length", "meta", "model_file_base_name", "model_name_or_path",
        "model_seqlen", "module_name_preceding_first_block", "pad_token_id", "static_groups", "tokenizer", "true_sequential",
        "use_cuda_fp16", "use_exllama",
    )  # fmt: skip

    def read(self, config: Mapping[str, Any]) -> Quantization:
        """See CheckpointFormat.read."""
        only(config, "bits", 4)
        only(config, "pack_dtype", None, "int32")
        only(config, "is_marlin_format", None, False)
        only(config, "method", None, "gptq")
        # Two names of one thing; the later writers have both.
        named = only(config, "checkpoint_format", *_FORMATS)
        other = only(config, "format", *_FORMATS)
        if None not in (named, other) and named != other:
            raise ConfigError("quantization_config.format", other, f"and checkpoint_format is {named}")
        added = _FORMATS[named or other]
        acts, symmetric = only(config, "desc_act", None, False, True), only(config, "sym", None, False, True)
        size, left_out = group_size(config), left_out_by(config, "modules_to_not_convert")
        named_in = _named_in(config)

        def declare(layer: Linear) -> Linear:
            if left_out(layer) or not named_in(layer):
                return layer
            of_layer = group_of(layer, size)
            return declared(
                layer, "int4", self.name, group_size=of_layer, symmetric=symmetric is True,
                order=acts is True, added_to_zeros=added,
            )  # fmt: skip

        return Quantization(declare, only(config, "lm_head", None, False, True) is True)

    def tensors(self, layer: Linear, part: Part, shard: Shard) -> list[TensorPart]:
        """See CheckpointFormat.tensors. g_idx is read whole: see `load`."""
        rows, columns = layer.share(part, shard)
        size, eight = settings_of(layer)["group_size"], cut(rows, 8, part.name, shard)
        groups, count = cut(columns, size, part.name, shard), layer.inputs // size
        return [
            TensorPart(
                f"{part.name}.qweight", (layer.inputs // 8, part.outputs), (cut(columns, 8, part.name, shard), rows)
            ),
            TensorPart(f"{part.name}.qzeros", (count, part.outputs // 8), (groups, eight)),
            TensorPart(f"{part.name}.scales", (count, part.outputs), (groups, rows)),
            TensorPart(f"{part.name}.g_idx", (layer.inputs,), (slice(None),)),
        ]

    def load(self, layer: Linear, part: Part, shard: Shard, source: TensorSource) -> Int4Weights:
        """See CheckpointFormat.load."""
        weight, zeros, scales, groups = self.tensors(layer, part, shard)
        settings = settings_of(layer)
        size = settings["group_size"]
        order = None
        if settings["order"] or source.shape(groups.name) is not None:
            order = input_order(source, groups.name, take(source, groups, torch.int32, torch.int64), size)
        refuse_order(layer, part, shard, order)
        codes = nibbles(take(source, weight, torch.int32), 0).T
        if order is not None:
            codes = codes[:, order]
        return Int4Weights(
            packed(codes),
            take_scales(source, scales).T.contiguous(),
            _zeros(source, zeros, settings["added_to_zeros"], settings["symmetric"]),
            size,
            order,
            take_bias(layer, part, shard, source),
        )


def _named_in(config: Mapping[str, Any]) -> Callable[[Linear], bool]:
    """modules_in_block_to_quantize: lists of names within a block; absent: every layer. Raises: ConfigError."""
    key = "modules_in_block_to_quantize"
    groups = config.get(key)
    if groups is None:
        return lambda layer: True
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise ConfigError(f"{FIELD}.{key}", groups, "must be lists of names")
    names = tuple(f".{name}" for group in groups for name in group)
    return lambda layer: all_or_none(layer, lambda part: part.endswith(names), key, groups)


def _zeros(source: TensorSource, part: TensorPart, added: int, symmetric: bool) -> Tensor:
    """Raises: ConfigError for a stored 15 to which one is added: readers of the format take it for 0 or for 16. And for
    another zero than 8 where the config says that there is none: some readers look at the config only."""
    zeros = nibbles(take(source, part, torch.int32), 1).T.contiguous()
    if added and bool((zeros == 15).any()):
        raise refusal(source, part.name, "has a zero point that does not fit; checkpoint_format gptq_v2 holds all")
    zeros += added
    if symmetric and bool((zeros != 8).any()):
        raise refusal(source, part.name, "has zero points, and the config says sym")
    return zeros
