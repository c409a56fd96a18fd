"""Linear layers with slots for adapters as the CUDA decoder keeps and applies them."""

from __future__ import annotations

from torch import Tensor

from diptych.engine.exec.cuda.parted import own_part
from diptych.engine.exec.cuda.quantized import QuantizedLinear
from diptych.engine.exec.lora import LoraSlots
from diptych.engine.exec.methods.base import LoadedLinear, StepRows
from diptych.kernels.triton_lora import LoraWeights, lora_expand, lora_gate_mul, lora_room, lora_shrink

ROWS_OF_LORA_LAUNCHES = (1, 17, 65, 129)
"""Numbers of rows that take every kernel which a layer with adapters may need."""


class AdaptedLinear:
    """A loaded layer, and what the adapters of its rows add."""

    __slots__ = ("base", "weights")

    def __init__(self, base: LoadedLinear, slots: LoraSlots) -> None:
        self.base = base
        self.weights = LoraWeights(slots.a, slots.b, slots.ranks, slots.part_outputs)

    @property
    def num_bytes(self) -> int:
        """Without the slots, which are counted apart."""
        return self.base.num_bytes

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        """See LoadedLinear."""
        if step.adapters is None:
            return self.base(x, step)
        room = self.room(x, invariant=False)
        out = self.base(x, step)
        self.add(out, x, room, step.adapters, invariant=False)
        return out

    def room(self, x: Tensor, *, invariant: bool) -> Tensor:
        """For `add` and `gated`, taken before the base is applied to x: see lora_room."""
        return lora_room(x, self.weights, invariant=invariant)

    def add(self, out: Tensor, x: Tensor, room: Tensor, adapters: Tensor, *, invariant: bool) -> None:
        """Right behind the base. Args: out: what it made of x: [rows, outputs], or [splits, rows, outputs] fp32; overwritten."""
        t = lora_shrink(x, self.weights, adapters, room=room, invariant=invariant)
        lora_expand(out, t, self.weights, adapters, invariant=invariant)

    def gated(
        self, out: Tensor, x: Tensor, room: Tensor, adapters: Tensor, activation: str, *, invariant: bool
    ) -> Tensor:
        """activation(gate) * up of a layer that holds both. Args: see add."""
        t = lora_shrink(x, self.weights, adapters, room=room, invariant=invariant)
        return lora_gate_mul(out, t, self.weights, adapters, activation, dtype=x.dtype, invariant=invariant)


def wanted_by(layer: LoadedLinear, rows: StepRows) -> str | None:
    """The kind of quantized rows that a layer reads; None: plain ones. Adapters read plain ones."""
    layer = own_part(layer)
    if isinstance(layer, AdaptedLinear):
        if rows.adapters is not None:
            return None
        layer = layer.base
    return layer.activations if isinstance(layer, QuantizedLinear) else None
