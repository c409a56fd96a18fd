"""Weight-only int4 in groups of inputs, as GPTQ and AWQ make them: w = (code - zero) * scale."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.common.kv_format import Shard
from diptych.engine.exec.formats.base import settings_of
from diptych.engine.exec.formats.registry import read_parts, tensors_of
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.methods.base import StepRows, TensorPart, TensorSource
from diptych.engine.exec.methods.exact import finish, grouped_product
from diptych.engine.exec.methods.quantized import Int4Weights, joined, unpacked

_CODE_BITS = 4
"""A code less its zero is at most 15, either sign."""
_ZERO_BYTES, _ORDER_BYTES = 1, 4


class Int4Method:
    """Implements methods.base.LinearMethod."""

    name = "int4"

    def scales_whole_rows(self, layer: Linear) -> bool:
        """See LinearMethod.scales_whole_rows."""
        return False

    def num_bytes(self, layer: Linear, element_bytes: int) -> int:
        """See LinearMethod.num_bytes."""
        settings = settings_of(layer)
        groups = layer.outputs * (layer.inputs // int(settings["group_size"]))
        order = layer.inputs * _ORDER_BYTES if settings["order"] else 0
        return layer.num_weights // 2 + groups * (element_bytes + _ZERO_BYTES) + order

    def create(self, layer: Linear, shard: Shard) -> list[TensorPart]:
        """See LinearMethod.create."""
        return tensors_of(layer, shard)

    def load(self, layer: Linear, source: TensorSource, shard: Shard) -> Int4Weights:
        """See LinearMethod.load. Raises: ConfigError also where parts of a merged layer order their inputs differently."""
        parts = read_parts(layer, source, shard, Int4Weights)
        first = parts[0]
        for one, part in zip(layer.parts, parts, strict=True):
            same = part.order is first.order or (
                part.order is not None and first.order is not None and torch.equal(part.order, first.order)
            )
            if not same:
                rule = f"{layer.parts[0].name} and {one.name} are one layer here, and their act-order differs"
                raise ConfigError("quantization_config.desc_act", True, rule)
        return Int4Weights(
            joined(part.codes for part in parts),
            joined(part.scales for part in parts),
            joined(part.zeros for part in parts),
            first.group_size,
            first.order,
            joined(part.bias for part in parts),
        )

    def apply(self, weights: Int4Weights, x: Tensor, step: StepRows) -> Tensor:
        """See LinearMethod.apply. See methods.exact.grouped_product for its sums."""

        def unpack(band: slice) -> tuple[Tensor, Tensor, None]:
            codes = unpacked(weights.codes[band]).to(torch.int8)
            zeros = weights.zeros[band].to(torch.int8).repeat_interleave(weights.group_size, 1)
            return codes - zeros, weights.scales[band].float(), None

        rows = x if weights.order is None else x[:, weights.order]
        out = grouped_product(rows, weights.codes.shape[0], weights.group_size, _CODE_BITS, unpack)
        return finish(out, weights.bias, x.dtype)
