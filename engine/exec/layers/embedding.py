"""Both ends of a language model as it declares them."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.exec.layers.linear import Linear
from diptych.engine.exec.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class Embedding:
    """x = weight[token] * scale.

    Args:
        name: of the tensor in the checkpoint, less ".weight"; [vocab_size, size].
        scale: rounded to the model's dtype before it is applied.
    """

    name: str
    vocab_size: int
    size: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LmHead:
    """logits = cap(linear(norm(x))).

    Args:
        tied: its weight is the embedding's: the checkpoint has no tensor of its own for it, or a copy.
        softcap: logits become softcap * tanh(logit / softcap); None: they stay.
    """

    norm: Norm
    linear: Linear
    tied: bool
    softcap: float | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.linear,)
