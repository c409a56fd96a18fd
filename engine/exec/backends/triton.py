"""Triton kernels, fused across layers and captured in CUDA graphs."""

from __future__ import annotations

from dataclasses import fields

from diptych.common.kv_format import KvFormat
from diptych.engine.exec.backends.base import AnyBlock, Takes, field_refusal, kv_refusal, method_refusal
from diptych.engine.exec.cuda.runtime import CudaRuntime
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.embedding import Embedding, LmHead
from diptych.engine.exec.layers.linear import PLAIN, Linear
from diptych.engine.exec.layers.mlp import Mlp
from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.layers.rope import Rope
from diptych.engine.exec.linear import keep_linear
from diptych.engine.exec.methods.base import LinearMethod, LinearWeights, LoadedLinear
from diptych.engine.exec.weights import ModelWeights
from diptych.kernels.dispatch import TRITON

_MAX_HEAD_DIM = 256
_METHODS = frozenset({PLAIN})
"""A method in it is applied in CUDA graphs: it may not sync, and depends on a step through StepTensors.rows only."""
_TAKES = {
    Embedding: Takes(("name", "vocab_size", "size", "scale")),
    DecoderBlock: Takes(
        ("attention_norm", "attention", "mlp_norm", "mlp"), ("attention_output_norm", "mlp_output_norm")
    ),
    LmHead: Takes(("norm", "linear", "tied"), ("softcap",)),
    Attention: Takes(
        ("qkv", "o", "num_heads", "num_kv_heads", "head_dim", "rope", "scale"),
        ("q_norm", "k_norm", "softcap", "window"),
    ),
    Mlp: Takes(("gate_up", "down", "activation")),
    Linear: Takes(("parts", "inputs", "bias", "shard", "method", "settings")),
    Norm: Takes(("name", "size", "eps", "offset")),
    Rope: Takes(tuple(field.name for field in fields(Rope))),
}
"""Rope: tables come from engine.exec.rope, whatever its fields."""


class TritonBackend:
    """Implements backends.base.Backend."""

    name = TRITON

    def refusal(self, block: AnyBlock, kv: KvFormat) -> str | None:
        """See Backend.refusal."""
        reason = kv_refusal(kv) or field_refusal(block, _TAKES) or method_refusal(block, _METHODS)
        if reason is not None:
            return reason
        if isinstance(block, DecoderBlock) and block.attention.head_dim > _MAX_HEAD_DIM:
            return f"head_dim {block.attention.head_dim} is above {_MAX_HEAD_DIM}"
        return None

    def keep(self, method: LinearMethod, weights: LinearWeights) -> LoadedLinear:
        """See Backend.keep."""
        return keep_linear(method, weights)

    def runtime(self, weights: ModelWeights, pool: KvPool, max_model_len: int) -> CudaRuntime:
        """See Backend.runtime. Kernel by kernel, for steps that another back end shares; alone: engine.exec.cuda.backend."""
        return CudaRuntime(weights, pool, max_model_len)
