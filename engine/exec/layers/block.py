"""One layer of a decoder as a model declares it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from diptych.engine.exec.layers.attention import Attention
from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.layers.mlp import Mlp
from diptych.engine.exec.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """The only place that says in which order a layer computes; back ends follow it:

        x += attention_output_norm(attention(attention_norm(x)))
        x += mlp_output_norm(mlp(mlp_norm(x)))

    Args:
        attention_output_norm, mlp_output_norm: None: what comes out is added as it is.
    """

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    attention_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.attention.linears + self.mlp.linears

    def with_linears(self, change: Callable[[Linear], Linear]) -> DecoderBlock:
        """The same with other linear layers."""
        return replace(self, attention=self.attention.with_linears(change), mlp=self.mlp.with_linears(change))
