"""Triton kernels, fused across layers and captured in CUDA graphs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from diptych.common.kv_format import QUANTIZED_KV, KvFormat
from diptych.engine.exec.backends.base import DENSE, AnyBlock, field_refusal, kv_refusal, method_refusal
from diptych.engine.exec.cuda.adapted import AdaptedLinear
from diptych.engine.exec.cuda.parted import SummedLinear
from diptych.engine.exec.cuda.quantized import keep_quantized
from diptych.engine.exec.cuda.runtime import CudaRuntime
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.embedding import Embedding
from diptych.engine.exec.layers.linear import PLAIN
from diptych.engine.exec.linear import DenseLinear, keep_linear
from diptych.engine.exec.lora import LayerSlots, LoraSizes, LoraSlots
from diptych.engine.exec.methods.base import LinearMethod, LinearWeights, LoadedLinear
from diptych.engine.exec.methods.plain import PlainWeights
from diptych.engine.exec.parallel.communicator import Communicator
from diptych.engine.exec.parallel.place import RankPlace
from diptych.engine.exec.weights import ModelWeights
from diptych.kernels.dispatch import TRITON

_MAX_HEAD_DIM = 256
_METHODS = frozenset({PLAIN, "int8", "fp8", "int4"})
"""A method in it is applied in CUDA graphs: it may not sync, and depends on a step through StepTensors.rows only."""
_TAKES = DENSE
_INVARIANT_METHODS = frozenset({PLAIN, "int8", "fp8", "int4"})
"""Those with kernels for --batch-invariant."""
_INT4_GRAIN = 32
"""Groups of inputs that the int4 kernels take are multiples of it."""


class TritonBackend:
    """Implements backends.base.Backend."""

    name = TRITON

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def refusal(self, block: AnyBlock, kv: KvFormat) -> str | None:
        """See Backend.refusal."""
        reason = (
            kv_refusal(kv, QUANTIZED_KV.values()) or field_refusal(block, _TAKES) or method_refusal(block, _METHODS)
        )
        if reason is None and self.batch_invariant:
            reason = method_refusal(block, _INVARIANT_METHODS)
        reason = reason or _group_refusal(block)
        return reason or (_misfit(block.attention) if isinstance(block, DecoderBlock) else None)

    def keep(self, method: LinearMethod, weights: LinearWeights) -> LoadedLinear:
        """See Backend.keep."""
        quantized = keep_quantized(weights)
        if quantized is not None:
            return quantized
        if self.batch_invariant and isinstance(weights, PlainWeights):
            return DenseLinear(weights.weight, weights.bias)
        return keep_linear(method, weights)

    def lora_refusal(self, block: DecoderBlock, sizes: LoraSizes) -> str | None:
        """See Backend.lora_refusal. Whatever the kernels take, they take with adapters."""
        return None

    def lora_slots(self, part_outputs: tuple[int, ...], inputs: int, sizes: LoraSizes, like: Tensor) -> LoraSlots:
        """See Backend.lora_slots."""
        return LoraSlots(part_outputs, inputs, sizes, like)

    def keep_lora(self, linear: LoadedLinear, slots: LayerSlots[Any]) -> LoadedLinear:
        """See Backend.keep_lora."""
        assert isinstance(slots, LoraSlots), "what lora_slots returned"
        return AdaptedLinear(linear, slots, join=not self.batch_invariant)

    def place_refusal(self, place: RankPlace) -> str | None:
        """See Backend.place_refusal."""
        return None

    def keep_reduced(self, linear: LoadedLinear, communicator: Communicator) -> LoadedLinear:
        """See Backend.keep_reduced."""
        return SummedLinear(linear, communicator)

    def runtime(self, weights: ModelWeights, pool: KvPool, max_model_len: int) -> CudaRuntime:
        """See Backend.runtime. Kernel by kernel, for steps that another back end shares; alone: engine.exec.cuda.backend."""
        return CudaRuntime(weights, pool, max_model_len, batch_invariant=self.batch_invariant)


def _group_refusal(block: AnyBlock) -> str | None:
    for linear in () if isinstance(block, Embedding) else block.linears:
        size = dict(linear.settings).get("group_size", _INT4_GRAIN)
        if linear.method == "int4" and (not isinstance(size, int) or size % _INT4_GRAIN):
            return f"it has no int4 kernel for groups of {size}"
    return None


def _misfit(attention: Attention) -> str | None:
    q, k = attention.q_norm, attention.k_norm
    if q is not None and k is not None and (q.eps, q.offset) != (k.eps, k.offset):
        return "q_norm and k_norm differ in eps or offset"
    return None if attention.head_dim <= _MAX_HEAD_DIM else f"head_dim {attention.head_dim} is above {_MAX_HEAD_DIM}"
