"""The decoder on the compiled kernels: a step is a handful of calls, each of one layer or several."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding

from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.model_config import ModelConfig
from diptych.engine.exec.native.batch import NativeBatch
from diptych.engine.exec.native.weights import PackedLinear
from diptych.engine.exec.norm import RmsNorm
from diptych.engine.exec.rope import rope_tables
from diptych.engine.exec.weights import DecoderWeights
from diptych.engine.runner import StepAborted
from diptych.kernels.native.api import ACTIVATIONS, Group, Layer, Library, Model, Step

_ROW_LAYERS = 128
"""Rows x layers of one call in a step of single tokens: some ten milliseconds. Each call gives up the interpreter lock, and
getting it back from a busy event loop takes longer than the look whether the step is still wanted is worth."""

_SCORES = 96 << 10
"""Scores of the queries that go through a chunk's tokens together: they stay in the second-level cache."""


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeDecoder:
    """Holds weights and rope tables; KV lives in the pool."""

    def __init__(
        self, library: Library, config: ModelConfig, weights: DecoderWeights, pool: KvPool, *, max_model_len: int
    ) -> None:
        self._library, self._config, self._weights = library, config, weights
        device = torch.device("cpu")
        cosines, sines = rope_tables(config.rope, config.head_dim, max_model_len, dtype=torch.float32, device=device)
        self._kept = (cosines.contiguous(), sines.contiguous(), pool.tensor)
        self._model = Model(
            layers=(Layer * config.num_layers)(*(self._layer(i, pool) for i in range(config.num_layers))),
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=pool.block_size,
            eps=config.rms_norm_eps,
        )
        self._buffers = _Buffers(config, library)

    def _layer(self, index: int, pool: KvPool) -> Layer:
        config, layer = self._config, self._weights.layers[index]
        (qkv, qkv_bias), (o, o_bias) = _packed(layer.qkv), _packed(layer.o)
        (gate_up, gate_up_bias), (down, down_bias) = _packed(layer.gate_up), _packed(layer.down)
        return Layer(
            input_norm=_weight(layer.input_norm),
            qkv=qkv,
            qkv_bias=qkv_bias,
            q_norm=_weight(layer.q_norm),
            k_norm=_weight(layer.k_norm),
            o=o,
            o_bias=o_bias,
            pre_feedforward_norm=_weight(layer.post_norm),
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=down,
            down_bias=down_bias,
            cosines=self._kept[0].data_ptr(),
            sines=self._kept[1].data_ptr(),
            kv=pool.tensor[:, index].data_ptr(),
            block_step=pool.tensor.stride(0),
            window=config.sliding_windows[index] or 0,
            activation=ACTIVATIONS[config.activation],
            scale=config.head_dim**-0.5,
        )

    def forward(
        self,
        batch: NativeBatch,
        should_abort: Callable[[], bool] | None,
        on_layers: Callable[[int], None] | None = None,
    ) -> Tensor | None:
        """See models.decoder.Decoder.forward."""
        x = embedding(torch.from_numpy(batch.token_ids), self._weights.embedding)
        step = self._buffers.step(x, batch)
        model, library = ctypes.byref(self._model), self._library
        last = self._config.num_layers - 1
        # Behind the last attention only the rows whose logits are wanted matter.
        whole = batch.decode_only and batch.sample_rows == list(range(len(batch.token_ids)))
        end = last + 1 if whole else last
        stride = max(1, _ROW_LAYERS // x.shape[0]) if batch.decode_only else 1
        for first in range(0, end, stride):
            _give_up(should_abort)
            if first and on_layers is not None:
                on_layers(first)
            library.layers(model, ctypes.byref(step), first, min(end, first + stride))
        if not whole:
            _give_up(should_abort)
            if last and on_layers is not None:
                on_layers(last)
            library.attention_part(model, ctypes.byref(step), last)
            if not batch.sample_rows:
                return None
            rows = torch.tensor(batch.sample_rows)
            x, attended = x[rows], self._buffers.attended(batch)[rows]
            step.x, step.attended, step.rows = x.data_ptr(), attended.data_ptr(), len(rows)
            library.feed_part(model, ctypes.byref(step), last)
        norm = self._weights.norm
        return self._weights.lm_head(library.norm(x, norm.weight, norm.eps))


def _give_up(should_abort: Callable[[], bool] | None) -> None:
    if should_abort is not None and should_abort():
        raise StepAborted


def _packed(linear: object) -> tuple[int, int | None]:
    if not isinstance(linear, PackedLinear):
        raise TypeError(f"{type(linear).__name__} is not packed")
    return linear.packed.data_ptr(), _at(linear.bias)


def _weight(norm: RmsNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


class _Buffers:
    """What a step computes into; it grows to the largest step and is then used again: fresh memory costs a page fault a
    page."""

    def __init__(self, config: ModelConfig, library: Library) -> None:
        self._tile = library.tile
        self._widths = {
            "normed": config.hidden_size,
            "qkv": config.q_size + 2 * config.kv_size,
            "attended": config.q_size,
            "gate": config.intermediate_size,
            "up": config.intermediate_size,
        }
        self._q_size = config.q_size
        self._tensors: dict[str, Tensor] = {}
        self._scores = torch.empty(0)

    def attended(self, batch: NativeBatch) -> Tensor:
        """[num_rows, num_heads * head_dim] of the step laid out last."""
        return self._tensors["attended"][: len(batch.token_ids) * self._q_size].view(-1, self._q_size)

    def step(self, x: Tensor, batch: NativeBatch) -> Step:
        rows, threads = x.shape[0], torch.get_num_threads()
        for name, width in self._widths.items():
            if name not in self._tensors or self._tensors[name].numel() < rows * width:
                self._tensors[name] = torch.empty((rows + rows // 4) * width)
        max_len = -(-batch.max_len // 64) * 64
        scores_step = max(_SCORES, self._tile * max_len)
        if self._scores.numel() < threads * scores_step:
            self._scores = torch.empty(threads * (scores_step + scores_step // 4))
        return Step(
            x=x.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in self._tensors.items()},
            positions=batch.positions.ctypes.data,
            tiles=batch.tiles.ctypes.data,
            groups=(Group * 1)(Group(batch.blocks.ctypes.data, batch.slots.ctypes.data)),
            scores=self._scores.data_ptr(),
            rows=rows,
            num_tiles=len(batch.tiles),
            max_len=max_len,
            scores_step=scores_step,
            num_threads=threads,
        )
