"""The reference: plain torch on any device, every method. Other back ends are compared with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from diptych.common.kv_format import QUANTIZED_KV, KvFormat
from diptych.engine.exec.attention import BatchBuilder, PagedAttention, StepBatch
from diptych.engine.exec.backends.base import (
    DENSE,
    AnyBlock,
    Hooks,
    Segment,
    field_refusal,
    kv_refusal,
    method_refusal,
)
from diptych.engine.exec.ends import cap, embed, wanted_rows
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.linear import keep_linear
from diptych.engine.exec.lora import LayerSlots, LoraLinear, LoraSizes, LoraSlots
from diptych.engine.exec.methods.base import LinearMethod, LinearWeights, LoadedLinear, StepRows
from diptych.engine.exec.methods.registry import METHODS
from diptych.engine.exec.parallel.communicator import Communicator, ReducedLinear
from diptych.engine.exec.parallel.place import RankPlace
from diptych.engine.exec.rope import rotate, table_of_each
from diptych.engine.exec.weights import BlockWeights, ModelWeights
from diptych.engine.messages import ScheduledSeq
from diptych.engine.runner import StepAborted
from diptych.kernels.dispatch import TORCH
from diptych.kernels.paged_attention import Scratch

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}
_TAKES = DENSE


class TorchBackend:
    """Implements backends.base.Backend."""

    name = TORCH
    batch_invariant = False
    """The order of a product's sums depends on the number of rows."""

    def refusal(self, block: AnyBlock, kv: KvFormat) -> str | None:
        """See Backend.refusal. It has every method."""
        return kv_refusal(kv, QUANTIZED_KV.values()) or field_refusal(block, _TAKES) or method_refusal(block, METHODS)

    def keep(self, method: LinearMethod, weights: LinearWeights) -> LoadedLinear:
        """See Backend.keep."""
        return keep_linear(method, weights)

    def lora_refusal(self, block: DecoderBlock, sizes: LoraSizes) -> str | None:
        """See Backend.lora_refusal. Over every method."""
        return None

    def lora_slots(self, part_outputs: tuple[int, ...], inputs: int, sizes: LoraSizes, like: Tensor) -> LoraSlots:
        """See Backend.lora_slots."""
        return LoraSlots(part_outputs, inputs, sizes, like)

    def keep_lora(self, linear: LoadedLinear, slots: LayerSlots[Any]) -> LoadedLinear:
        """See Backend.keep_lora."""
        assert isinstance(slots, LoraSlots), "what lora_slots returned"
        return LoraLinear(linear, slots)

    def place_refusal(self, place: RankPlace) -> str | None:
        """See Backend.place_refusal."""
        return None

    def keep_reduced(self, linear: LoadedLinear, communicator: Communicator) -> LoadedLinear:
        """See Backend.keep_reduced."""
        return ReducedLinear(linear, communicator)

    def runtime(self, weights: ModelWeights, pool: KvPool, max_model_len: int) -> TorchRuntime:
        """See Backend.runtime."""
        return TorchRuntime(weights, pool, max_model_len)


class TorchRuntime:
    """Implements backends.base.Runtime. Holds rope tables; KV lives in the pool."""

    def __init__(self, weights: ModelWeights, pool: KvPool, max_model_len: int) -> None:
        self._weights, self._pool = weights, pool
        self._description = description = weights.description
        self._batches = BatchBuilder(description, pool, max_model_len=max_model_len, dtype=weights.embedding.dtype)
        scratch = Scratch()
        attentions = [block.attention for block in description.blocks]
        self._attention = [PagedAttention(layer, i, pool, scratch) for i, layer in enumerate(attentions)]
        like = weights.embedding
        self._ropes = [layer.rope for layer in attentions]
        tables = table_of_each(self._ropes, description.head_dim, max_model_len, dtype=like.dtype, device=like.device)
        self._tables = dict(zip(self._ropes, tables, strict=True))

    def lay_out(self, seqs: Sequence[ScheduledSeq]) -> StepBatch:
        """See Runtime.lay_out."""
        return self._batches.build(seqs)

    def begin(self, batch: StepBatch) -> None:
        """See Runtime.begin."""
        for pool, group in zip(self._pool.groups, batch.groups, strict=True):
            if group.fresh_blocks is not None:
                pool.clear(group.fresh_blocks)

    def run(self, x: Tensor | None, batch: StepBatch, segment: Segment, hooks: Hooks) -> Tensor | None:
        """See Runtime.run."""
        description, weights, rows = self._description, self._weights, batch.rows
        if x is None:
            x = embed(batch.token_ids, weights.embedding, description.embedding, weights.vocabulary)
        x = x.to(weights.embedding.dtype)  # others keep rows in float32
        turned = {rope: (cos[batch.positions], sin[batch.positions]) for rope, (cos, sin) in self._tables.items()}
        for index in range(segment.first, segment.last):
            if hooks.should_abort is not None and hooks.should_abort():
                raise StepAborted
            if index and hooks.on_layers is not None:
                hooks.on_layers(index)
            layer, block = weights.blocks[index], description.blocks[index]
            is_last = segment.has_last_layer and index == segment.last - 1
            q, k, v = _qkv(block.attention, layer, layer.attention_norm(x), rows, *turned[self._ropes[index]])
            k, v = self._attention[index].write(k, v, batch)
            if is_last and not batch.sample_rows:
                return None
            attended = self._attention[index].attend(q, k, v, batch)
            if is_last and (wanted := wanted_rows(batch.sample_rows, x)) is not None:
                attended, x, rows = attended[wanted], x[wanted], rows.only(wanted)
            out = layer.o(attended, rows)
            x = x + (out if layer.attention_output_norm is None else layer.attention_output_norm(out))
            gate, up = layer.gate_up(layer.mlp_norm(x), rows).chunk(2, dim=-1)
            out = layer.down(_ACTIVATIONS[block.mlp.activation](gate).mul_(up), rows)
            x = x + (out if layer.mlp_output_norm is None else layer.mlp_output_norm(out))
        if segment.head:
            if segment.first == segment.last:
                rows = rows.only(wanted_rows(batch.sample_rows, batch.token_ids))
            return cap(weights.lm_head(weights.norm(x), rows), description.head.softcap)
        return x


def _qkv(
    attention: Attention, layer: BlockWeights, x: Tensor, rows: StepRows, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    qkv = layer.qkv(x, rows).view(x.shape[0], heads + 2 * kv_heads, attention.head_dim)
    qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = qk[:, :heads], qk[:, heads:]
        qk = torch.cat((layer.q_norm(q), layer.k_norm(k)), dim=1)
    qk = rotate(qk, cos, sin)
    return qk[:, :heads], qk[:, heads:], v
