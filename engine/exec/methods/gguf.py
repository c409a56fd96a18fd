"""Weights as a GGUF file packs them; activations stay in the model's dtype."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from diptych.common.kv_format import Shard
from diptych.engine.exec.formats.base import settings_of
from diptych.engine.exec.formats.registry import read_parts, tensors_of
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.methods.base import StepRows, TensorPart, TensorSource
from diptych.engine.exec.methods.exact import finish, grouped_product
from diptych.engine.exec.methods.gguf_blocks import Decoded, decoded
from diptych.engine.exec.methods.gguf_kinds import KINDS
from diptych.engine.exec.methods.quantized import GgufParts, GgufWeights, joined


class GgufMethod:
    """Implements methods.base.LinearMethod."""

    name = "gguf"

    def scales_whole_rows(self, layer: Linear) -> bool:
        """See LinearMethod.scales_whole_rows."""
        return False

    def num_bytes(self, layer: Linear, element_bytes: int) -> int:
        """See LinearMethod.num_bytes."""
        kinds = settings_of(layer)["kinds"].split("+")
        return sum(
            part.outputs * KINDS[kind].row_bytes(layer.inputs) for part, kind in zip(layer.parts, kinds, strict=True)
        )

    def create(self, layer: Linear, shard: Shard) -> list[TensorPart]:
        """See LinearMethod.create."""
        return tensors_of(layer, shard)

    def load(self, layer: Linear, source: TensorSource, shard: Shard) -> GgufWeights | GgufParts:
        """See LinearMethod.load. Parts of one kind that follow each other are one."""
        merged = []
        for kind, run in groupby(read_parts(layer, source, shard, GgufWeights), lambda part: part.kind):
            parts = list(run)
            blocks, bias = joined(part.blocks for part in parts), joined(part.bias for part in parts)
            merged.append(GgufWeights(kind, blocks, bias))
        return merged[0] if len(merged) == 1 else GgufParts(tuple(merged))

    def apply(self, weights: GgufWeights | GgufParts, x: Tensor, step: StepRows) -> Tensor:
        """See LinearMethod.apply. See methods.exact.grouped_product for its sums."""
        if isinstance(weights, GgufParts):
            return torch.cat([self.apply(part, x, step) for part in weights.parts], 1)
        kind, blocks = KINDS[weights.kind], weights.blocks

        def unpack(band: slice) -> Decoded:
            return decoded(weights.kind, blocks[band])

        out = grouped_product(x, blocks.shape[0], kind.group, kind.code_bits, unpack)
        return finish(out, weights.bias, x.dtype)
