"""compressed-tensors, as LLM Compressor writes it: int-quantized, float-quantized and pack-quantized.

Tensors of a layer: weight [outputs, inputs] int8 or E4M3 and weight_scale; or weight_packed [outputs, inputs / 8] int32,
weight_scale [outputs, groups], weight_shape, and where the config says so weight_zero_point [outputs / 8, groups] int32 and
weight_g_idx [inputs]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from diptych.common.errors import ConfigError
from diptych.common.kv_format import Shard
from diptych.engine.exec.formats.base import (
    FIELD,
    Quantization,
    Setting,
    all_or_none,
    cut,
    declared,
    group_of,
    group_size,
    input_order,
    nibbles,
    only,
    pass_over,
    refusal,
    refuse_order,
    settings_of,
    take,
    take_bias,
    take_output_scales,
    take_scales,
)
from diptych.engine.exec.formats.fp8 import fp8_tensors, is_blocked, load_fp8
from diptych.engine.exec.layers.linear import Linear, Part
from diptych.engine.exec.methods.base import TensorPart, TensorSource
from diptych.engine.exec.methods.quantized import Fp8Weights, Int4Weights, Int8Weights, packed

_FORMATS = {
    "int8": ("int-quantized", "naive-quantized"),
    "fp8": ("float-quantized", "naive-quantized"),
    "int4": ("pack-quantized",),
}
"""Names of the layouts that hold a method."""
_OBSERVED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""How scales were found, and what they are stored in, which the tensors say."""
_ACTIVATION_ORDERS = {
    None: False,
    False: False,
    "weight": False,
    "static": False,
    True: True,
    "group": True,
    "dynamic": True,
}
"""actorder -> whether groups are of inputs in another order than the checkpoint's."""


@dataclass(frozen=True, slots=True)
class _Group:
    """One of config_groups.

    Args:
        settings: of the method, but the group size.
        size: inputs that share a scale, -1: all; None: there are no groups.
    """

    name: str
    targets: tuple[str, ...]
    method: str
    settings: Mapping[str, Setting]
    size: int | None

    def has(self, name: str) -> bool:
        return _matches(name, self.targets)


class CompressedTensorsFormat:
    """Implements formats.base.CheckpointFormat."""

    name = "compressed-tensors"
    quant_methods: tuple[str, ...] = ("compressed-tensors",)
    without_effect: tuple[str, ...] = ("global_compression_ratio", "run_compressed", "version")

    def read(self, config: Mapping[str, Any]) -> Quantization:
        """See CheckpointFormat.read. The head counts as one more layer, which most checkpoints ignore."""
        only(config, "quantization_status", None, "compressed", "frozen")
        only(config, "kv_cache_scheme", None)
        sparsity = config.get("sparsity_config")
        if sparsity:
            if not isinstance(sparsity, Mapping):
                raise ConfigError(f"{FIELD}.sparsity_config", sparsity, "must be an object")
            only(sparsity, "format", "dense", prefix=f"{FIELD}.sparsity_config")
            pass_over(config, "sparsity_config")
        groups, ignored = _groups(config), _names(config.get("ignore"), f"{FIELD}.ignore")

        def declare(layer: Linear) -> Linear:
            if all_or_none(layer, lambda name: _matches(name, ignored), "ignore", list(ignored)):
                return layer
            for group in groups:
                if all_or_none(layer, group.has, f"config_groups.{group.name}.targets", list(group.targets)):
                    settings = dict(group.settings)
                    if group.size is not None:
                        at = f"{FIELD}.config_groups.{group.name}.weights"
                        settings["group_size"] = group_of(layer, group.size, at)
                    return declared(layer, group.method, self.name, **settings)
            return layer

        return Quantization(declare, head=True)

    def tensors(self, layer: Linear, part: Part, shard: Shard) -> list[TensorPart]:
        """See CheckpointFormat.tensors."""
        if layer.method == "fp8":
            return fp8_tensors(layer, part, shard, "weight_scale")
        rows, columns = layer.share(part, shard)
        if layer.method == "int8":
            return [
                TensorPart(f"{part.name}.weight", (part.outputs, layer.inputs), (rows, columns)),
                TensorPart(f"{part.name}.weight_scale", (part.outputs, 1), (rows, slice(None))),
            ]
        settings, size = settings_of(layer), settings_of(layer)["group_size"]
        groups, count = cut(columns, size, part.name, shard), layer.inputs // size
        packed_weight = (part.outputs, layer.inputs // 8)
        out = [
            TensorPart(f"{part.name}.weight_packed", packed_weight, (rows, cut(columns, 8, part.name, shard))),
            TensorPart(f"{part.name}.weight_scale", (part.outputs, count), (rows, groups)),
            TensorPart(f"{part.name}.weight_shape", (2,), (slice(None),)),
        ]
        if not settings["symmetric"]:
            where = (cut(rows, 8, part.name, shard), groups)
            out.append(TensorPart(f"{part.name}.weight_zero_point", (-(-part.outputs // 8), count), where))
        if settings["order"]:
            out.append(TensorPart(f"{part.name}.weight_g_idx", (layer.inputs,), (slice(None),)))
        return out

    def load(
        self, layer: Linear, part: Part, shard: Shard, source: TensorSource
    ) -> Int8Weights | Fp8Weights | Int4Weights:
        """See CheckpointFormat.load."""
        if layer.method == "fp8":
            return load_fp8(layer, part, shard, source, "weight_scale")
        if layer.method == "int4":
            return self._int4(layer, part, shard, source)
        weight, scales = self.tensors(layer, part, shard)
        rows = layer.share(part, shard)[0]
        return Int8Weights(
            take(source, weight, torch.int8).contiguous(),
            take_output_scales(source, scales.name, part.outputs, rows),
            take_bias(layer, part, shard, source),
        )

    def _int4(self, layer: Linear, part: Part, shard: Shard, source: TensorSource) -> Int4Weights:
        """Codes and zeros are stored with 8 added, as unsigned ones."""
        settings = settings_of(layer)
        size = settings["group_size"]
        tensors = {one.name.rpartition(".")[2]: one for one in self.tensors(layer, part, shard)}
        shape = take(source, tensors["weight_shape"], torch.int64, torch.int32).tolist()
        if shape != [part.outputs, layer.inputs]:
            raise refusal(source, tensors["weight_shape"].name, f"says {shape}, not {[part.outputs, layer.inputs]}")
        codes = nibbles(take(source, tensors["weight_packed"], torch.int32), 1)
        scales = take_scales(source, tensors["weight_scale"]).contiguous()
        order = None
        if settings["order"]:
            groups = tensors["weight_g_idx"]
            stored = take(source, groups, torch.int32, torch.int64)
            if not bool((stored == -1).all()):  # so it is left where calibration ordered nothing
                order = input_order(source, groups.name, stored, size)
            refuse_order(layer, part, shard, order)
        if settings["symmetric"]:
            zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=scales.device)
        else:
            zeros = nibbles(take(source, tensors["weight_zero_point"], torch.int32), 0)[: scales.shape[0]].contiguous()
        return Int4Weights(
            packed(codes if order is None else codes[:, order]),
            scales,
            zeros,
            size,
            order,
            take_bias(layer, part, shard, source),
        )


def _groups(config: Mapping[str, Any]) -> list[_Group]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"{FIELD}.config_groups", groups, "must be an object of groups")
    return [_group(groups[name], name, config.get("format")) for name in groups]


def _group(group: Any, name: str, layout: Any) -> _Group:
    prefix = f"{FIELD}.config_groups.{name}"
    if not isinstance(group, Mapping):
        raise ConfigError(prefix, group, "must be an object")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{prefix}.weights", weights, "must be an object")
    only(group, "output_activations", None, prefix=prefix)
    method, settings, size = _scheme(weights, inputs, prefix)
    layout, field = (
        (layout, f"{FIELD}.format") if group.get("format") is None else (group["format"], f"{prefix}.format")
    )
    if layout not in _FORMATS[method]:
        raise ConfigError(field, layout, f"must be {' or '.join(_FORMATS[method])}, for {method}")
    return _Group(name, _names(group.get("targets"), f"{prefix}.targets"), method, settings, size)


def _scheme(weights: Mapping[str, Any], inputs: Any, prefix: str) -> tuple[str, dict[str, Setting], int | None]:
    """Returns: method, its settings, and the group size. Raises: ConfigError naming the field that we cannot do."""
    at = f"{prefix}.weights"
    pass_over(weights, *_OBSERVED)
    only(weights, "dynamic", None, False, prefix=at)
    kind, bits = only(weights, "type", None, "int", "float", prefix=at), only(weights, "num_bits", 4, 8, prefix=at)
    ordered = _order(weights, at)
    if bits == 4:
        only(weights, "type", None, "int", prefix=at)
        only(weights, "block_structure", None, prefix=at)
        if inputs is not None:
            raise ConfigError(f"{prefix}.input_activations", inputs, "must be absent where weights have 4 bits")
        strategy = only(weights, "strategy", "group", "channel", prefix=at)
        symmetric = only(weights, "symmetric", None, True, False, prefix=at) is not False
        if strategy == "channel":
            only(weights, "group_size", None, -1, prefix=at)
        size = group_size(weights, at) if strategy == "group" else -1
        return "int4", {"symmetric": symmetric, "order": ordered}, size
    if ordered:
        raise ConfigError(f"{at}.actorder", weights.get("actorder"), "must be absent where weights have 8 bits")
    only(weights, "symmetric", None, True, prefix=at)
    only(weights, "group_size", None, -1, prefix=at)
    method = "fp8" if kind == "float" else "int8"
    blocked = method == "fp8" and is_blocked(weights, "block_structure", at)
    if blocked:
        only(weights, "strategy", "block", prefix=at)
    else:
        only(weights, "block_structure", None, prefix=at)
        only(weights, "strategy", "channel", "tensor", prefix=at)
    _check_inputs(inputs, f"{prefix}.input_activations", kind or "int", blocked)
    return method, {"blocked": blocked} if method == "fp8" else {}, None


def _order(weights: Mapping[str, Any], at: str) -> bool:
    return _ACTIVATION_ORDERS[only(weights, "actorder", *_ACTIVATION_ORDERS, prefix=at)]


def _check_inputs(inputs: Any, at: str, kind: str, blocked: bool) -> None:
    """Raises: ConfigError unless activations are quantized for each row, or with blocks for each 128 inputs of a row."""
    if not isinstance(inputs, Mapping):
        raise ConfigError(at, inputs, "must say how activations are quantized: 8-bit weights alone are not built")
    pass_over(inputs, *_OBSERVED)
    only(inputs, "num_bits", 8, prefix=at)
    only(inputs, "type", kind, *((None,) if kind == "int" else ()), prefix=at)
    only(inputs, "symmetric", None, True, prefix=at)
    only(inputs, "dynamic", True, prefix=at)
    only(inputs, "strategy", *(("group",) if blocked else ("token",)), prefix=at)
    only(inputs, "group_size", *((128,) if blocked else (None, -1)), prefix=at)
    only(inputs, "actorder", None, False, prefix=at)
    only(inputs, "block_structure", None, prefix=at)


def _names(value: Any, field: str) -> tuple[str, ...]:
    names = value or ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(field, value, "must be a list of names")
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise ConfigError(field, name, f"not a regular expression: {error}") from None
    return tuple(names)


def _matches(name: str, targets: tuple[str, ...]) -> bool:
    """By the class Linear, a layer's whole name, or `re:` and what its name begins with."""
    return any(
        re.match(one[3:], name) is not None if one.startswith("re:") else one in ("Linear", name) for one in targets
    )
