"""Linear layers with slots for adapters as the CUDA decoder keeps and applies them.

Behind a plain layer's weight lies A of all slots, so that the projection computes x @ a.T, too: a few columns more instead
of a launch, and a row takes those of its own slot.

    weight   [outputs]  [slot 0: part 0, part 1 ..]  [slot 1 ..]  ..  [zeros]
                        max_rank rows of each part
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.engine.exec.cuda.parted import own_part
from diptych.engine.exec.cuda.quantized import QuantizedLinear
from diptych.engine.exec.linear import DenseLinear
from diptych.engine.exec.lora import LoraSlots
from diptych.engine.exec.methods.base import LoadedLinear, StepRows
from diptych.kernels.triton_lora import lora_expand, lora_gate_mul, lora_room, lora_shrink
from diptych.kernels.triton_lora_rows import LoraDelta, LoraWeights

ROWS_OF_LORA_LAUNCHES = (1, 17, 65, 129)
"""Numbers of rows that take every kernel which a layer with adapters may need."""
JOINED_BYTES = 8 << 20
"""Of A, that every step with an adapter may read for all slots: two microseconds on an H200. A launch takes longer."""
_GRAIN = 128
"""Columns of a projection are multiples of it: whole tiles."""


class AdaptedLinear:
    """A loaded layer, and what the adapters of its rows add.

    Args:
        join: a plain layer computes x @ a.T itself, where A is small enough.
    """

    __slots__ = ("base", "joined", "weights")

    def __init__(self, base: LoadedLinear, slots: LoraSlots, *, join: bool = True) -> None:
        self.base = base
        self.joined: DenseLinear | None = None
        """The base with A of all slots behind it."""
        if join and isinstance(base, DenseLinear) and slots.a.nbytes <= JOINED_BYTES:
            self.base, self.joined = _join(base, slots)
        self.weights = LoraWeights(slots.a, slots.b, slots.ranks, slots.part_outputs)

    @property
    def num_bytes(self) -> int:
        """Without the slots, which are counted apart."""
        return self.base.num_bytes

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        """See LoadedLinear."""
        if step.adapters is None:
            return self.base(x, step)
        if self.joined is not None:
            out, delta = self.parted(self.joined(x, step), step.adapters)
        else:
            room = self.room(x, invariant=False)
            out = self.base(x, step)
            delta = self.shrink(x, room, step.adapters, invariant=False)
        lora_expand(out, delta)
        return out

    def parted(self, out: Tensor, adapters: Tensor) -> tuple[Tensor, LoraDelta]:
        """Args: out: of `joined`: [rows, columns], or [splits, rows, columns] fp32. Returns: what the base makes of the rows, and
        what adapters add: views of it."""
        weights = self.weights
        first, width = weights.outputs, weights.num_slots * len(weights.part_outputs) * weights.max_rank
        t = (out if out.dim() == 3 else out[None])[..., first : first + width]
        return out[..., :first], LoraDelta(t, weights, adapters)

    def room(self, x: Tensor, *, invariant: bool) -> Tensor:
        """For `shrink`, taken before the base is applied to x: see lora_room."""
        return lora_room(x, self.weights, invariant=invariant)

    def shrink(self, x: Tensor, room: Tensor, adapters: Tensor, *, invariant: bool) -> LoraDelta:
        """Right behind the base."""
        return lora_shrink(x, self.weights, adapters, room=room, invariant=invariant)

    def gated(self, out: Tensor, delta: LoraDelta, activation: str, dtype: torch.dtype, *, invariant: bool) -> Tensor:
        """activation(gate) * up of a layer that holds both. Args: out: what the base made of the rows."""
        return lora_gate_mul(out, delta, activation, dtype=dtype, invariant=invariant)


def _join(base: DenseLinear, slots: LoraSlots) -> tuple[DenseLinear, DenseLinear]:
    """Moves the weight, and A of the slots, into one tensor. Returns: the base as before, and with A behind it."""
    outputs, inputs = base.weight.shape
    a = slots.a.reshape(-1, inputs)
    columns = -(-(outputs + a.shape[0]) // _GRAIN) * _GRAIN
    weight = base.weight.new_zeros((columns, inputs))
    weight[:outputs] = base.weight
    weight[outputs : outputs + a.shape[0]] = a
    slots.a = weight[outputs : outputs + a.shape[0]].view(slots.a.shape)
    bias = base.bias
    if bias is not None:
        bias = torch.cat((bias, bias.new_zeros(columns - outputs)))
    return DenseLinear(weight[:outputs], base.bias), DenseLinear(weight, bias)


def wanted_by(layer: LoadedLinear, rows: StepRows) -> str | None:
    """The kind of quantized rows that a layer reads; None: plain ones. Adapters read plain ones."""
    layer = own_part(layer)
    if isinstance(layer, AdaptedLinear):
        if rows.adapters is not None:
            return None
        layer = layer.base
    return layer.activations if isinstance(layer, QuantizedLinear) else None
