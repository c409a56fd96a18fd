"""Quantized linear layers as the CUDA decoder keeps and applies them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from diptych.engine.exec.linear import bias_bytes
from diptych.engine.exec.methods.base import LinearWeights, StepRows
from diptych.engine.exec.methods.quantized import Fp8Weights, Int4Weights, Int8Weights
from diptych.kernels.triton_int4 import FEW_ROWS as FEW_INT4_ROWS
from diptych.kernels.triton_int4 import PackedInt4, choose_int4, dequantize_int4, int4_matmul, pack_int4
from diptych.kernels.triton_int4_words import (
    Int4Words,
    choose_words,
    dequantize_int4_words,
    int4_words_matmul,
    is_widened,
    pack_int4_words,
)
from diptych.kernels.triton_invariant_matmul import chains_of
from diptych.kernels.triton_norm import gate_mul, gate_quantized
from diptych.kernels.triton_quantize import BLOCK, FP8, FP8_BLOCKS, INT8, QuantizedRows, quantize_rows
from diptych.kernels.triton_w8a8 import FEW_ROWS, choose_w8a8, w8a8_matmul

WORDS = False
"""Whether weights of four bits lie in words (triton_int4_words) or in bytes (triton_int4). Words are faster, and wait for a run
of whole models on a GPU: docs/measurements/gpu-quantized.md."""
Rows = Tensor | QuantizedRows
"""Of a step, plain or as the layer that reads them wants them."""
ROWS_OF_LAUNCHES = (1, 9, 17, 33, 65, 68, 129, 132, *((257, 1025) if WORDS else ()))
"""Numbers of rows that take every kernel which a layer may need."""
_LIBRARY_GRAIN = 16
"""Sizes of a product that cuBLAS takes in FP8 are multiples of it."""
_LIBRARY_ROWS = 4
"""And rows, where weights are block-scaled."""


class W8A8Linear:
    """Weights and activations of eight bits. kind: of triton_quantize.KINDS."""

    __slots__ = ("weight", "scales", "bias", "kind")

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, kind: str) -> None:
        self.weight, self.scales, self.bias, self.kind = weight, scales, bias, kind

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes + bias_bytes(self.bias)

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def activations(self) -> str | None:
        """The kind of rows that it reads."""
        return self.kind

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        return self.project(x, summed=False, invariant=False)

    def project(self, x: Rows, *, summed: bool, invariant: bool) -> Tensor:
        """Args: summed: who reads the result adds up splits. Returns: [rows, outputs], or [splits, rows, outputs] fp32."""
        rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, self.kind)
        count, (outputs, size) = rows.shape[0], self.weight.shape
        if not invariant and count > FEW_ROWS and self._library_takes(rows):
            return self._multiplied_by_the_library(rows)
        splits = _splits(outputs, size, summed=summed and self.bias is None, invariant=invariant)
        blocks = self.kind == FP8_BLOCKS
        shape = choose_w8a8(count, outputs, size, silu=False, blocks=blocks, splits=splits)
        return w8a8_matmul(rows, self.weight, self.scales, self.bias, shape=shape)

    def _library_takes(self, rows: QuantizedRows) -> bool:
        if self.kind == INT8 or self.bias is not None or not self.weight.is_cuda or rows.dtype != torch.bfloat16:
            return False
        blocks = self.kind == FP8_BLOCKS
        if blocks and rows.shape[0] % _LIBRARY_ROWS:
            return False
        return not any(size % (BLOCK if blocks else _LIBRARY_GRAIN) for size in self.weight.shape)

    def _multiplied_by_the_library(self, rows: QuantizedRows) -> Tensor:
        blocks = self.kind == FP8_BLOCKS
        return torch._scaled_mm(
            rows.codes,
            self.weight.t(),
            rows.scales if blocks else rows.scales[:, None],
            self.scales.t() if blocks else self.scales[None],
            out_dtype=rows.dtype,
            use_fast_accum=not blocks,
        )

    def gated(self, x: Rows, activation: str, wanted: str | None, *, invariant: bool) -> Rows:
        """activation(gate) * up of a layer that holds both. Args: wanted: kind of rows that the next layer reads."""
        rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, self.kind)
        count, (outputs, size) = rows.shape[0], self.weight.shape
        blocks = self.kind == FP8_BLOCKS
        fused = activation == "silu" and (invariant or count <= FEW_ROWS) and not (blocks and outputs // 2 % 128)
        if fused:
            shape = choose_w8a8(count, outputs // 2, size, silu=True, blocks=blocks, splits=1 if invariant else None)
            out = w8a8_matmul(rows, self.weight, self.scales, self.bias, silu=True, shape=shape)
            return out if wanted is None else quantize_rows(out, wanted)
        return _gated(self.project(rows, summed=False, invariant=invariant), activation, wanted, rows.dtype)


class Int4Linear:
    """Weights of four bits, activations as they are. order: see methods.quantized.Int4Weights."""

    __slots__ = ("packed", "order", "bias")

    def __init__(self, packed: PackedInt4, order: Tensor | None, bias: Tensor | None) -> None:
        self.packed, self.order, self.bias = packed, order, bias

    @property
    def num_bytes(self) -> int:
        order = 0 if self.order is None else self.order.nbytes
        return self.packed.num_bytes + order + bias_bytes(self.bias)

    @property
    def inputs(self) -> int:
        return self.packed.inputs

    @property
    def activations(self) -> str | None:
        """See W8A8Linear."""
        return None

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        return self.project(x, summed=False, invariant=False)

    def project(self, x: Rows, *, summed: bool, invariant: bool) -> Tensor:
        """See W8A8Linear.project."""
        assert isinstance(x, Tensor)
        if self.order is not None:
            x = x.index_select(1, self.order)
        if not invariant and x.shape[0] > FEW_INT4_ROWS:
            return linear(x, dequantize_int4(self.packed), self.bias)
        outputs, size = self.packed.outputs, self.packed.inputs
        splits = _splits(outputs, size, summed=summed and self.bias is None, invariant=invariant)
        shape = choose_int4(x.shape[0], outputs, self.packed.codes.shape[0], silu=False, splits=splits)
        return int4_matmul(x, self.packed, self.bias, shape=shape)

    def gated(self, x: Rows, activation: str, wanted: str | None, *, invariant: bool) -> Rows:
        """See W8A8Linear.gated. Not fused: splits of gate and up fill the GPU, and the activation adds them up."""
        assert isinstance(x, Tensor)
        return _gated(self.project(x, summed=not invariant, invariant=invariant), activation, wanted, x.dtype)


class Int4WordsLinear:
    """Weights of four bits, activations as they are. order: see methods.quantized.Int4Weights."""

    __slots__ = ("packed", "order", "bias")

    def __init__(self, packed: Int4Words, order: Tensor | None, bias: Tensor | None) -> None:
        self.packed, self.order, self.bias = packed, order, bias

    @property
    def num_bytes(self) -> int:
        order = 0 if self.order is None else self.order.nbytes
        return self.packed.num_bytes + order + bias_bytes(self.bias)

    @property
    def inputs(self) -> int:
        return self.packed.inputs

    @property
    def activations(self) -> str | None:
        """See W8A8Linear."""
        return None

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        return self.project(x, summed=False, invariant=False)

    def project(self, x: Rows, *, summed: bool, invariant: bool) -> Tensor:
        """See W8A8Linear.project."""
        rows, weight = self._ordered(x), self.packed
        if not invariant and is_widened(rows.shape[0], weight.outputs):
            return linear(rows, dequantize_int4_words(weight), self.bias)
        splits = _splits(weight.outputs, weight.inputs, summed=summed and self.bias is None, invariant=invariant)
        shape = choose_words(
            rows.shape[0], weight.outputs, weight.codes.shape[0], silu=False, splits=splits, invariant=invariant
        )
        return int4_words_matmul(rows, weight, self.bias, shape=shape)

    def gated(self, x: Rows, activation: str, wanted: str | None, *, invariant: bool) -> Rows:
        """See W8A8Linear.gated."""
        rows, weight = self._ordered(x), self.packed
        if activation != "silu" or not weight.paired:
            return _gated(self.project(x, summed=not invariant, invariant=invariant), activation, wanted, rows.dtype)
        splits = None if self.bias is None and not invariant else 1
        shape = choose_words(
            rows.shape[0], weight.outputs, weight.codes.shape[0], silu=True, splits=splits, invariant=invariant
        )
        if shape.splits > 1:  # the activation adds them up
            return _gated(int4_words_matmul(rows, weight, shape=shape), activation, wanted, rows.dtype)
        out = int4_words_matmul(rows, weight, self.bias, silu=True, shape=shape)
        return out if wanted is None else quantize_rows(out, wanted)

    def _ordered(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        return x if self.order is None else x.index_select(1, self.order)


def _splits(outputs: int, size: int, *, summed: bool, invariant: bool) -> int | None:
    """None: as many as are fast. With `invariant` by the weight alone."""
    if not summed:
        return 1
    return chains_of(outputs, size) if invariant else None


def _gated(gate_up: Tensor, activation: str, wanted: str | None, dtype: torch.dtype) -> Rows:
    if wanted is not None and gate_up.dim() == 2:
        return gate_quantized(gate_up, activation, wanted)
    out = gate_mul(gate_up, activation, dtype)
    return out if wanted is None else quantize_rows(out, wanted)


QuantizedLinear = W8A8Linear | Int4Linear | Int4WordsLinear


def keep_quantized(weights: LinearWeights) -> QuantizedLinear | None:
    """Of methods int8, fp8 and int4; None: weights of another type. Raises: ValueError for a group size without a kernel."""
    if isinstance(weights, Int8Weights):
        return W8A8Linear(weights.weight, weights.scales, weights.bias, INT8)
    if isinstance(weights, Fp8Weights):
        kind = FP8 if weights.block is None else FP8_BLOCKS
        return W8A8Linear(weights.weight, weights.scales.contiguous(), weights.bias, kind)
    if isinstance(weights, Int4Weights):
        raw = (weights.codes, weights.scales, weights.zeros, weights.group_size)
        if WORDS:
            return Int4WordsLinear(pack_int4_words(*raw), weights.order, weights.bias)
        return Int4Linear(pack_int4(*raw), weights.order, weights.bias)
    return None
