"""C, compiled on this machine: float32 and bfloat16 on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.common.kv_format import KvFormat
from diptych.engine.exec.backends.base import DENSE, AnyBlock, field_refusal, kv_refusal, method_refusal
from diptych.engine.exec.formats.base import settings_of
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.embedding import Embedding
from diptych.engine.exec.layers.linear import PLAIN, Linear
from diptych.engine.exec.lora import LayerSlots, LoraSizes
from diptych.engine.exec.methods.base import LinearMethod, LinearWeights, LoadedLinear
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.native.decoder import NativeRuntime
from diptych.engine.exec.native.lora import PackedSlots
from diptych.engine.exec.native.weights import PackedLinear, Packer
from diptych.engine.exec.parallel.communicator import Communicator
from diptych.engine.exec.parallel.place import RankPlace
from diptych.engine.exec.weights import ModelWeights
from diptych.kernels.dispatch import NATIVE
from diptych.kernels.native.api import GROUP_STEP, KV_CODES, MAX_INT8_INPUTS, Library

_METHODS = {torch.float32: frozenset({PLAIN, "int8", "int4", "gguf"}), torch.bfloat16: frozenset({PLAIN})}
_TAKES = DENSE


class NativeBackend:
    """Implements backends.base.Backend."""

    name = NATIVE
    batch_invariant = True

    def __init__(self, library: Library, description: ModelDescription, dtype: torch.dtype) -> None:
        """Args: dtype: of the computation, one of native.library.DTYPES."""
        self._library, self._first = library, description.blocks[0]
        self._dtype, self._methods = dtype, _METHODS[dtype]
        self._packer = Packer(library)

    def refusal(self, block: AnyBlock, kv: KvFormat) -> str | None:
        """See Backend.refusal. The kernels step through a row in whole vectors and panels."""
        reason = (
            kv_refusal(kv, KV_CODES) or field_refusal(block, _TAKES) or method_refusal(block, _METHODS[torch.float32])
        )
        if reason is None and (unknown := method_refusal(block, self._methods)):
            reason = f"{unknown} in {str(self._dtype).removeprefix('torch.')}"
        if reason is None and not isinstance(block, Embedding):
            reason = next(filter(None, map(_linear_misfit, block.linears)), None)
        return reason or (self._misfit(block) if isinstance(block, DecoderBlock) else None)

    def _misfit(self, block: DecoderBlock) -> str | None:
        attention, mlp, first = block.attention, block.mlp, self._first
        misfit = self._library.misfit(
            hidden=attention.qkv.inputs, ffn=mlp.size, head_dim=attention.head_dim, activation=mlp.activation
        )
        if misfit is not None:
            return misfit
        kinds = settings_of(mlp.gate_up).get("kinds", "")
        if len(set(kinds.split("+"))) > 1:
            return f"its gate and up are of several kinds, {kinds}"
        for name, same in (
            ("intermediate_size", mlp.size == first.mlp.size),
            ("rms_norm_eps", len(_epsilons(block) | _epsilons(first)) == 1),
        ):
            if not same:
                return f"{name} is not the first layer's"
        return None

    def keep(self, method: LinearMethod, weights: LinearWeights) -> LoadedLinear:
        """See Backend.keep."""
        if method.name not in self._methods:
            raise TypeError(f"{method.name} was refused")
        return self._packer(weights)

    def lora_refusal(self, block: DecoderBlock, sizes: LoraSizes) -> str | None:
        """See Backend.lora_refusal. Whatever the kernels take, they take with adapters."""
        return None

    def lora_slots(self, part_outputs: tuple[int, ...], inputs: int, sizes: LoraSizes, like: Tensor) -> PackedSlots:
        """See Backend.lora_slots."""
        return PackedSlots(self._library.lanes, part_outputs, inputs, sizes, like.dtype)

    def keep_lora(self, linear: LoadedLinear, slots: LayerSlots[Any]) -> LoadedLinear:
        """See Backend.keep_lora."""
        assert isinstance(slots, PackedSlots), "what lora_slots returned"
        assert isinstance(linear, PackedLinear), "what keep returned"
        return linear.with_lora(slots)

    def place_refusal(self, place: RankPlace) -> str | None:
        """See Backend.place_refusal. A rank's sizes are those of the blocks that it is asked for."""
        return None

    def keep_reduced(self, linear: LoadedLinear, communicator: Communicator) -> LoadedLinear:
        """See Backend.keep_reduced."""
        assert isinstance(linear, PackedLinear), "what keep returned"
        return linear.reduced(communicator)

    def runtime(self, weights: ModelWeights, pool: KvPool, max_model_len: int) -> NativeRuntime:
        """See Backend.runtime."""
        return NativeRuntime(self._library, weights, pool, max_model_len)


def _linear_misfit(layer: Linear) -> str | None:
    """Why the kernels of its method do not take a layer of this size, or None."""
    if layer.method == "int8" and layer.inputs > MAX_INT8_INPUTS:
        return f"int8 over {layer.inputs} inputs, at most {MAX_INT8_INPUTS}"
    if layer.method == "int4":
        group = settings_of(layer)["group_size"]
        if group % GROUP_STEP or layer.inputs % group:
            return f"group_size {group} over {layer.inputs} inputs is no multiple of {GROUP_STEP} that divides them"
    return None


def _epsilons(block: DecoderBlock) -> set[float]:
    attention = block.attention
    norms = [block.attention_norm, block.mlp_norm, attention.q_norm, attention.k_norm]
    norms += [block.attention_output_norm, block.mlp_output_norm]
    return {norm.eps for norm in norms if norm is not None}
