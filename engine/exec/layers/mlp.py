"""A gated feed-forward layer as a model declares it."""

from __future__ import annotations

from dataclasses import dataclass

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
    def size(self) -> int:
        """Of gate and of up."""
        return self.down.inputs
