"""The decoder of the Llama family over fused kernels. No sync and no host decision inside: graphs capture it as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding

from diptych.engine.exec.cuda.batch import StepTensors
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.linear import Linear
from diptych.engine.exec.model_config import ModelConfig
from diptych.engine.exec.rope import rope_tables
from diptych.engine.exec.weights import AnyLinear, DecoderWeights
from diptych.engine.runner import StepAborted
from diptych.kernels.triton_decode import paged_decode
from diptych.kernels.triton_matmul import MAX_ROWS, MatmulShape, choose_shape, small_matmul
from diptych.kernels.triton_norm import gate_mul, rms_norm
from diptych.kernels.triton_prefill import paged_prefill, prefill_rows
from diptych.kernels.triton_rope import rope_write

PROJECTIONS: tuple[str, ...] = ("qkv", "o", "gate_up", "down")
"""Of few rows: those that our own kernel may take instead of cuBLAS's."""


class CudaDecoder:
    """Holds weights and rope tables; KV lives in the pool."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, pool: KvPool, block_tables: Tensor, *, max_model_len: int
    ) -> None:
        self._config, self._weights = config, weights
        self._layers = [pool.tensor[:, layer] for layer in range(config.num_layers)]
        self._tables, self._scale = block_tables, config.head_dim**-0.5
        like = weights.embedding
        self.group = config.num_heads // config.num_kv_heads
        self.tile_rows = prefill_rows(config.head_dim, like.element_size(), self.group)
        # fp32 whatever the model's dtype: the kernel rotates in fp32.
        cos, sin = rope_tables(config.rope, config.head_dim, max_model_len, dtype=torch.float32, device=like.device)
        self._cos, self._sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def forward(
        self, step: StepTensors, should_abort: Callable[[], bool] | None, *, want_logits: bool
    ) -> Tensor | None:
        """Compute the step's tokens and store their KV.

        Returns: logits of step.sample_rows, [num_samples, vocab_size] in the model's dtype; None if they are not wanted.
        Raises: StepAborted when should_abort() turned true between two layers.
        """
        weights, eps = self._weights, self._config.rms_norm_eps
        residual = embedding(step.token_ids, weights.embedding)
        x = rms_norm(residual, weights.layers[0].input_norm.weight, eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            if should_abort is not None and should_abort():
                raise StepAborted
            qkv = self._linear("qkv", layer.qkv, x)
            q = rope_write(
                qkv,
                self._layers[index],
                self._cos,
                self._sin,
                step.positions,
                step.slots,
                num_q_heads=self._config.num_heads,
                q_norm=None if layer.q_norm is None else layer.q_norm.weight,
                k_norm=None if layer.k_norm is None else layer.k_norm.weight,
                eps=eps,
            )
            if index == last and not want_logits:
                return None
            attended = self._attend(index, q, step).flatten(1)
            if index == last and step.sample_rows is not None:
                # Behind the last attention only the rows whose logits are wanted matter, in the order wanted.
                attended, residual = (t.index_select(0, step.sample_rows) for t in (attended, residual))
            o = self._linear("o", layer.o, attended)
            x = rms_norm(o, layer.post_norm.weight, eps, residual)
            after = weights.norm if index == last else weights.layers[index + 1].input_norm
            down = self._linear("down", layer.down, self._gate_up(layer.gate_up, x))
            x = rms_norm(down, after.weight, eps, residual)
        return self._linear("lm_head", weights.lm_head, x)

    def _linear(self, name: str, layer: AnyLinear, x: Tensor) -> Tensor:
        """Returns: [rows, columns]; of qkv, o and down maybe [splits, rows, columns], see small_matmul."""
        shape = self._shape(name, layer, x)
        if shape is not None and isinstance(layer, Linear):
            return small_matmul(x, layer.weight, shape=shape)
        return layer(x)

    def _gate_up(self, layer: AnyLinear, x: Tensor) -> Tensor:
        activation = self._config.activation
        shape = self._shape("gate_up", layer, x) if activation == "silu" else None
        if shape is not None and isinstance(layer, Linear):
            return small_matmul(x, layer.weight, silu=True, shape=shape)
        return gate_mul(layer(x), activation)

    def _shape(self, name: str, layer: AnyLinear, x: Tensor) -> MatmulShape | None:
        """How our kernel is cut for this projection; None: cuBLAS takes it."""
        if not isinstance(layer, Linear) or layer.bias is not None or x.dtype == torch.float32:
            return None
        if name not in PROJECTIONS or x.shape[0] > MAX_ROWS:
            return None
        columns, size = layer.weight.shape
        silu = name == "gate_up"
        return choose_shape(x.shape[0], columns // 2 if silu else columns, size, silu=silu)

    def _attend(self, index: int, q: Tensor, step: StepTensors) -> Tensor:
        kv, window = self._layers[index], self._config.sliding_windows[index]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_decode = step.decode_lens.shape[0]
        if num_decode:
            paged_decode(
                q[:num_decode],
                kv,
                self._tables,
                step.decode_rows,
                step.decode_lens,
                scale=self._scale,
                window=window,
                splits=step.splits,
                out=out[:num_decode],
            )
        if step.chunks is not None and step.tiles is not None:
            paged_prefill(
                q,
                kv,
                self._tables,
                step.chunks,
                step.tiles,
                scale=self._scale,
                window=window,
                rows=self.tile_rows,
                out=out,
            )
        return out
