"""C, compiled on this machine: fp32 on the CPU."""

from __future__ import annotations

from diptych.common.kv_format import KvFormat
from diptych.engine.exec.backends.base import DENSE, AnyBlock, field_refusal, kv_refusal, method_refusal
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.linear import PLAIN
from diptych.engine.exec.methods.base import LinearMethod, LinearWeights, LoadedLinear
from diptych.engine.exec.methods.plain import PlainWeights
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.native.decoder import NativeRuntime
from diptych.engine.exec.native.weights import Packer
from diptych.engine.exec.weights import ModelWeights
from diptych.kernels.dispatch import NATIVE
from diptych.kernels.native.api import KV_CODES, Library

_METHODS = frozenset({PLAIN})
_TAKES = DENSE


class NativeBackend:
    """Implements backends.base.Backend."""

    name = NATIVE
    batch_invariant = True

    def __init__(self, library: Library, description: ModelDescription) -> None:
        self._library, self._first = library, description.blocks[0]
        self._packer = Packer(library)

    def refusal(self, block: AnyBlock, kv: KvFormat) -> str | None:
        """See Backend.refusal. The kernels step through a row in whole vectors and panels."""
        reason = kv_refusal(kv, KV_CODES) or field_refusal(block, _TAKES) or method_refusal(block, _METHODS)
        return reason or (self._misfit(block) if isinstance(block, DecoderBlock) else None)

    def _misfit(self, block: DecoderBlock) -> str | None:
        attention, mlp, first = block.attention, block.mlp, self._first
        misfit = self._library.misfit(
            hidden=attention.qkv.inputs, ffn=mlp.size, head_dim=attention.head_dim, activation=mlp.activation
        )
        if misfit is not None:
            return misfit
        for name, same in (
            ("intermediate_size", mlp.size == first.mlp.size),
            ("rms_norm_eps", len(_epsilons(block) | _epsilons(first)) == 1),
        ):
            if not same:
                return f"{name} is not the first layer's"
        return None

    def keep(self, method: LinearMethod, weights: LinearWeights) -> LoadedLinear:
        """See Backend.keep."""
        if method.name != PLAIN:
            raise TypeError(f"{method.name} was refused")
        assert isinstance(weights, PlainWeights)
        return self._packer(weights.weight, weights.bias)

    def runtime(self, weights: ModelWeights, pool: KvPool, max_model_len: int) -> NativeRuntime:
        """See Backend.runtime."""
        return NativeRuntime(self._library, weights, pool, max_model_len)


def _epsilons(block: DecoderBlock) -> set[float]:
    attention = block.attention
    norms = [block.attention_norm, block.mlp_norm, attention.q_norm, attention.k_norm]
    norms += [block.attention_output_norm, block.mlp_output_norm]
    return {norm.eps for norm in norms if norm is not None}
