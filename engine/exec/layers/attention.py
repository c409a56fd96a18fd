"""Causal self-attention as a model declares it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.layers.norm import Norm
from diptych.engine.exec.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class Attention:
    """o(attend(rope(q_norm(q)), rope(k_norm(k)), v)), with q, k and v the parts of `qkv` in that order.

    Args:
        q_norm, k_norm: of each head; both or neither.
        scale: of a query's product with a key.
        softcap: scores become softcap * tanh(score / softcap) before the mask; None: they stay.
        window: tokens that a query sees, itself included; None: all.
    """

    qkv: Linear
    o: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    scale: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    softcap: float | None = None
    window: int | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o

    def with_linears(self, change: Callable[[Linear], Linear]) -> Attention:
        return replace(self, qkv=change(self.qkv), o=change(self.o))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
