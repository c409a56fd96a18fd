"""The decoder-only transformer of the Llama family, as plain functions over flattened tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, silu

from diptych.engine.exec.attention import PagedAttention, StepBatch
from diptych.engine.exec.model_config import ModelConfig
from diptych.engine.exec.rope import rope_tables, rotate
from diptych.engine.exec.weights import DecoderWeights, LayerWeights
from diptych.engine.runner import StepAborted

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


class Decoder:
    """Holds weights and rope tables; KV lives in the attention's pool."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, attention: PagedAttention, *, max_model_len: int
    ) -> None:
        self._config, self._weights, self._attention = config, weights, attention
        self._activate = _ACTIVATIONS[config.activation]
        like = weights.embedding
        self._cos, self._sin = rope_tables(
            config.rope, config.head_dim, max_model_len, dtype=like.dtype, device=like.device
        )

    def forward(
        self,
        batch: StepBatch,
        should_abort: Callable[[], bool] | None,
        on_layers: Callable[[int], None] | None = None,
    ) -> Tensor | None:
        """Compute the step's tokens and store their KV.

        Args: on_layers: told between two layers how many are done.
        Returns: logits of batch.sample_rows, [num_samples, vocab_size] in the model's dtype; None when there are none.
        Raises: StepAborted when should_abort() turned true between two layers.
        """
        weights = self._weights
        x = embedding(batch.token_ids, weights.embedding)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            if should_abort is not None and should_abort():
                raise StepAborted
            if index and on_layers is not None:
                on_layers(index)
            q, k, v = self._qkv(layer, layer.input_norm(x), cos, sin)
            self._attention.write(index, k, v, batch)
            if index == last and not batch.sample_rows:
                return None
            attended = self._attention.attend(index, q, k, v, batch)
            if index == last and batch.sample_rows != list(range(x.shape[0])):
                # Behind the last attention only the rows whose logits are wanted matter, in the order wanted.
                rows = torch.tensor(batch.sample_rows, device=x.device)
                attended, x = attended[rows], x[rows]
            x = x + layer.o(attended)
            x = x + self._mlp(layer, layer.post_norm(x))
        return weights.lm_head(weights.norm(x))

    def _qkv(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self._config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(x).view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk[:, :heads], qk[:, heads:]
            qk = torch.cat((layer.q_norm(q), layer.k_norm(k)), dim=1)
        qk = rotate(qk, cos, sin)
        return qk[:, :heads], qk[:, heads:], v

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(self._activate(gate).mul_(up))
