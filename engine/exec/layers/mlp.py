"""A gated feed-forward layer as a model declares it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from diptych.engine.exec.layers.linear import Linear

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(gate(x)) * up(x)), with gate and up the parts of `gate_up` in that order.

    Args:
        activation: one of ACTIVATIONS.
    """

    gate_up: Linear
    down: Linear
    activation: str = "silu"

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def with_linears(self, change: Callable[[Linear], Linear]) -> Mlp:
        return replace(self, gate_up=change(self.gate_up), down=change(self.down))

    @property
    def size(self) -> int:
        """Of gate and of up."""
        return self.down.inputs
