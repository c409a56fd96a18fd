"""Linear layers in the form that is fastest on the device.

On the CPU a wide layer (more outputs than inputs) keeps its weight twice: transposed for a single row, where that reads
memory a third faster, and packed by oneDNN for more rows, where plain F.linear loses up to half (measured on AVX2 at
576 x 3072: 1 row 23 -> 15 ms, 8 rows 67 -> 42 ms, 32 rows 106 -> 74 ms for 30 layers). Narrow layers gain nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from diptych.engine.exec.layers.linear import PLAIN
from diptych.engine.exec.methods.base import LinearMethod, LinearWeights, LoadedLinear, StepRows
from diptych.engine.exec.methods.plain import PlainWeights

_PACK_FOR_ROWS = 32


class DenseLinear:
    """y = x @ weight.T + bias; x: [rows, in_features], weight: [out_features, in_features]."""

    __slots__ = ("weight", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + bias_bytes(self.bias)

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        return linear(x, self.weight, self.bias)


def bias_bytes(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.nbytes


class WideCpuLinear:
    """The same for a wide fp32 weight on the CPU."""

    __slots__ = ("_transposed", "_packed", "_bias")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._transposed = weight.t().contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        return 2 * self._transposed.nbytes + bias_bytes(self._bias)  # the packed form does not tell its own size

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        if x.shape[0] > 1:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return out
        if self._bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self._bias, x, self._transposed)


class MethodLinear:
    """A layer applied by its method's own reference."""

    __slots__ = ("_method", "_weights")

    def __init__(self, method: LinearMethod, weights: LinearWeights) -> None:
        self._method, self._weights = method, weights

    @property
    def num_bytes(self) -> int:
        return self._weights.num_bytes

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        return self._method.apply(self._weights, x, step)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> DenseLinear | WideCpuLinear:
    wide = weight.shape[0] > weight.shape[1]
    fp32_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    if wide and fp32_cpu and torch._C._has_mkldnn:
        return WideCpuLinear(weight, bias)
    return DenseLinear(weight, bias)


def keep_linear(method: LinearMethod, weights: LinearWeights) -> LoadedLinear:
    """For torch and Triton. Any other method than plain is applied by itself, whatever weights it keeps: LoRA over plain
    keeps plain ones."""
    if method.name != PLAIN:
        return MethodLinear(method, weights)
    assert isinstance(weights, PlainWeights)
    return make_linear(weights.weight, weights.bias)
