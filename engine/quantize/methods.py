"""One block's linear layers by each method: the tensors that are stored, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.methods.plain import PlainWeights
from diptych.engine.quantize.blocks import LAYERS, Inputs, PlainBlock, linears_of, norms_of
from diptych.engine.quantize.gptq import Int4Rule, gptq
from diptych.engine.quantize.rounding import Groups, Rows, int4_nearest
from diptych.engine.quantize.smoothing import smoothing_factors

Tensors = dict[str, Tensor]
_BEFORE = {"qkv": "attention_norm", "gate_up": "mlp_norm"}
"""The norm whose output is all that a layer gets."""


def quantize_rows(block: DecoderBlock, plain: PlainBlock, quantize: Callable[[Tensor], Rows]) -> Tensors:
    """int8 and fp8. Returns: the tensors to store, by name."""
    stored: Tensors = {}
    for name, linear in linears_of(block).items():
        rows = quantize(plain.linears[name].weight)
        for part, of_part in _parts(linear):
            stored[f"{part}.weight"] = rows.codes[of_part]
            stored[f"{part}.weight_scale"] = rows.scales[of_part]
    return stored


def quantize_groups(
    block: DecoderBlock, plain: PlainBlock, rule: Int4Rule, inputs: Mapping[str, Inputs] | None
) -> tuple[Tensors, PlainBlock]:
    """int4: by GPTQ, or without `inputs` each weight to its nearest code.

    Returns: the tensors to store, by name, and the block as they mean it. Raises: ValueError, see gptq.
    """
    stored: Tensors = {}
    meant: dict[str, PlainWeights] = {}
    for name, linear in linears_of(block).items():
        weight = plain.linears[name].weight
        if inputs is None:
            groups = int4_nearest(weight, rule.group_size, symmetric=rule.symmetric, dtype=rule.dtype)
        else:
            groups = gptq(weight, inputs[name].hessian, rule)
        for part, of_part in _parts(linear):
            one = Groups(groups.codes[of_part], groups.scales[of_part], groups.zeros[of_part])
            stored |= {f"{part}.{end}": tensor for end, tensor in packed_groups(one, rule.symmetric).items()}
        meant[name] = replace(plain.linears[name], weight=groups.values())
    return stored, PlainBlock(meant, plain.norms)


def _parts(linear: Linear) -> Iterator[tuple[str, slice]]:
    """Name and outputs of each part of a merged layer."""
    first = 0
    for part in linear.parts:
        yield part.name, slice(first, first + part.outputs)
        first += part.outputs


def packed_groups(groups: Groups, symmetric: bool) -> Tensors:
    """In the layout pack-quantized, by the ends of the tensors' names. Eight codes of an output lie in one int32, the first in
    the lowest four bits; zeros are packed alike along the outputs."""
    out = {
        "weight_packed": _eight(groups.codes),
        "weight_scale": groups.scales,
        "weight_shape": torch.tensor(groups.codes.shape),
    }
    if not symmetric:
        missing = -len(groups.zeros) % 8
        zeros = torch.nn.functional.pad(groups.zeros, (0, 0, 0, missing))
        out["weight_zero_point"] = _eight(zeros.T.contiguous()).T
    return out


def _eight(codes: Tensor) -> Tensor:
    """codes: [rows, 8 n] uint8 of 0 to 15. Returns: [rows, n] int32."""
    wide = codes.view(len(codes), -1, 8).to(torch.int64)
    words: Tensor = (wide << torch.arange(0, 32, 4, device=codes.device)).sum(2)
    return words.to(torch.int32)  # a sum of 2**31 and more becomes negative: the same bits


def smooth(block: DecoderBlock, plain: PlainBlock, inputs: Mapping[str, Inputs]) -> tuple[PlainBlock, Tensors, float]:
    """Move the range of large inputs into the weights, where what comes before can be divided exactly: a norm whose weight is
    all that it multiplies by, and `up`, whose outputs are inputs of `down`.

    Returns: the block; the tensors that replace the checkpoint's and are no weights of linear layers, float32; and the
        largest factor.
    """
    linears, norms, replaced, most = dict(plain.linears), dict(plain.norms), {}, 1.0
    declared, layers = norms_of(block), linears_of(block)
    for name in LAYERS:
        if name == "o" or (name in _BEFORE and declared[_BEFORE[name]].offset):
            continue
        factors = smoothing_factors(inputs[name].largest, linears[name].weight)
        if name == "down":
            gate_up, up = linears["gate_up"], slice(len(factors), None)
            weight = gate_up.weight.clone()
            weight[up] /= factors[:, None]
            bias = None if gate_up.bias is None else gate_up.bias.clone()
            if bias is not None:
                bias[up] /= factors
                replaced[f"{layers['gate_up'].parts[1].name}.bias"] = bias[up]
            linears["gate_up"] = PlainWeights(weight, bias)
        else:
            norm = _BEFORE[name]
            norms[norm] = norms[norm] / factors
            replaced[f"{declared[norm].name}.weight"] = norms[norm]
        linears[name] = replace(linears[name], weight=linears[name].weight * factors)
        most = max(most, float(factors.max()))
    return PlainBlock(linears, norms), replaced, most
