"""Triton kernels, fused across layers and captured in CUDA graphs."""

from __future__ import annotations

from diptych.engine.exec.backends.base import AnyBlock
from diptych.engine.exec.cuda.runtime import CudaRuntime
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.linear import keep_linear
from diptych.engine.exec.methods.base import LinearMethod, LinearWeights, LoadedLinear
from diptych.engine.exec.weights import ModelWeights
from diptych.kernels.dispatch import TRITON

_MAX_HEAD_DIM = 256


class TritonBackend:
    """Implements backends.base.Backend."""

    name = TRITON

    def refusal(self, block: AnyBlock) -> str | None:
        """See Backend.refusal."""
        if isinstance(block, DecoderBlock) and block.attention.head_dim > _MAX_HEAD_DIM:
            return f"head_dim {block.attention.head_dim} is above {_MAX_HEAD_DIM}"
        return None

    def keep(self, method: LinearMethod, weights: LinearWeights) -> LoadedLinear:
        """See Backend.keep."""
        return keep_linear(method, weights)

    def runtime(self, weights: ModelWeights, pool: KvPool, max_model_len: int) -> CudaRuntime:
        """See Backend.runtime. Kernel by kernel, for steps that another back end shares; alone: engine.exec.cuda.backend."""
        return CudaRuntime(weights, pool, max_model_len)
