"""C, compiled on this machine: fp32 on the CPU."""

from __future__ import annotations

from diptych.engine.exec.backends.base import AnyBlock
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.layers.block import DecoderBlock
from diptych.engine.exec.layers.embedding import Embedding
from diptych.engine.exec.layers.linear import PLAIN
from diptych.engine.exec.methods.base import LinearMethod, LinearWeights, LoadedLinear
from diptych.engine.exec.methods.plain import PlainWeights
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.native.decoder import NativeRuntime
from diptych.engine.exec.native.weights import Packer
from diptych.engine.exec.weights import ModelWeights
from diptych.kernels.dispatch import NATIVE
from diptych.kernels.native.api import Library


class NativeBackend:
    """Implements backends.base.Backend."""

    name = NATIVE

    def __init__(self, library: Library, description: ModelDescription) -> None:
        self._library, self._first = library, description.blocks[0]
        self._packer = Packer(library)

    def refusal(self, block: AnyBlock) -> str | None:
        """See Backend.refusal. The kernels step through a row in whole vectors and panels."""
        if not isinstance(block, DecoderBlock):
            linears = [] if isinstance(block, Embedding) else [block.linear]
        else:
            if (reason := self._misfit(block)) is not None:
                return reason
            linears = [block.attention.qkv, block.attention.o, block.mlp.gate_up, block.mlp.down]
        methods = sorted({linear.method for linear in linears} - {PLAIN})
        return f"it has no linear method {methods[0]}" if methods else None

    def _misfit(self, block: DecoderBlock) -> str | None:
        attention, mlp, first = block.attention, block.mlp, self._first
        misfit = self._library.misfit(
            hidden=attention.qkv.inputs, ffn=mlp.size, head_dim=attention.head_dim, activation=mlp.activation
        )
        if misfit is not None:
            return misfit
        norms = [block.attention_norm, block.mlp_norm, attention.q_norm, attention.k_norm]
        norms += [block.attention_output_norm, block.mlp_output_norm]
        for name, same in (
            ("intermediate_size", mlp.size == first.mlp.size),
            ("rms_norm_eps", {norm.eps for norm in norms if norm is not None} == {first.attention_norm.eps}),
        ):
            if not same:
                return f"{name} is not the first layer's"
        return None

    def keep(self, method: LinearMethod, weights: LinearWeights) -> LoadedLinear:
        """See Backend.keep."""
        if not isinstance(weights, PlainWeights):
            raise TypeError(f"{method.name} was refused")
        return self._packer(weights.weight, weights.bias)

    def runtime(self, weights: ModelWeights, pool: KvPool, max_model_len: int) -> NativeRuntime:
        """See Backend.runtime."""
        return NativeRuntime(self._library, weights, pool, max_model_len)
