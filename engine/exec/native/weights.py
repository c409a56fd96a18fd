"""Linear layers packed for the compiled kernels: one copy of every weight, in panels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from diptych.engine.exec.methods.base import LinearWeights, StepRows
from diptych.engine.exec.methods.gguf_blocks import decoded, half_at, q4_k_bytes
from diptych.engine.exec.methods.gguf_kinds import KINDS
from diptych.engine.exec.methods.plain import PlainWeights
from diptych.engine.exec.methods.quantized import GgufParts, GgufWeights, Int4Weights, Int8Weights, unpacked
from diptych.engine.exec.native.lora import PackedSlots, teams_of
from diptych.engine.exec.native.narrow import as_bfloat16
from diptych.engine.exec.parallel.communicator import Communicator
from diptych.kernels.native.api import HugePages, Library, Memory, WeightFormat, Weights

_BIT_7 = 0x80
"""Flipped, it adds 128 to a signed byte."""
_SIGN_BITS = {"Q8_0": 0x80, "Q5_0": 0x10, "Q6_K": 0x20, "Q4_1": 0, "Q4_K": 0}
"""Of codes that have a sign: flipped, all are above 0."""
_MIDDLE_OF_FOUR_BITS = 8


class PackedLinear:
    """y = x @ weight.T + bias on torch's number of threads. weights: what the kernels are given. communicator: to ranks that
    have the other inputs, whose sums are added; None: there are none."""

    __slots__ = ("weights", "slots", "communicator", "_library", "_kept", "_next")
    weights: Weights
    slots: PackedSlots | None
    communicator: Communicator | None

    def __init__(
        self, library: Library, kind: WeightFormat, packed: Tensor, bias: Tensor | None, outputs: int,
        *, group: int = 0, order: Tensor | None = None, then: PackedLinear | None = None,
    ) -> None:  # fmt: skip
        """Args: then: of the outputs that follow."""
        self._library, self._next = library, then
        self.slots, self.communicator = None, None
        self._kept = [tensor for tensor in (packed, bias, order) if tensor is not None]
        bias_at, order_at = (None if tensor is None else tensor.data_ptr() for tensor in (bias, order))
        next_at = None if then is None else ctypes.addressof(then.weights)
        self.weights = Weights(packed.data_ptr(), bias_at, order_at, next_at, None, kind, group, outputs)

    def with_lora(self, slots: PackedSlots) -> PackedLinear:
        """The same layer, to whose rows the adapters in these slots add."""
        linear = copy(self)
        linear.slots = slots
        linear.weights = Weights.from_buffer_copy(self.weights)
        linear.weights.lora = ctypes.addressof(slots.lora)
        return linear

    def reduced(self, communicator: Communicator) -> PackedLinear:
        """The same layer, of a rank that has a part of the inputs."""
        linear = copy(self)
        linear.communicator = communicator
        return linear

    @property
    def shrunk_floats(self) -> int:
        """Of a row with an adapter: what Step.shrunk holds for this layer."""
        return 0 if self.slots is None else int(self.slots.lora.width)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept) + (0 if self._next is None else self._next.num_bytes)

    @property
    def outputs(self) -> int:
        own: int = self.weights.outputs
        return own + (0 if self._next is None else self._next.outputs)

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        """See LoadedLinear."""
        teams = None if self.slots is None or step.adapters is None else teams_of(step.adapters.numpy())
        out = self._library.linear(
            x.contiguous(), self.weights, self.outputs, torch.get_num_threads(), teams, self.shrunk_floats
        )
        return out if self.communicator is None else self.communicator.all_reduce(out)


class Packer:
    """Makes the linear layers of one model. memory: for the packed weights."""

    def __init__(self, library: Library, memory: Memory | None = None) -> None:
        self._library, self._memory = library, memory or HugePages()

    def __call__(self, weights: LinearWeights) -> PackedLinear:
        """Raises: TypeError for weights that are not of one of the classes here."""
        match weights:
            case PlainWeights():
                return self._plain(weights)
            case Int8Weights(weight=codes, scales=scales, bias=bias):
                return self._packed(WeightFormat.INT8, codes, bias, planes=[scales], flip=_BIT_7)
            case Int4Weights():
                return self._int4(weights)
            case GgufWeights():
                return self._gguf(weights)
            case GgufParts(parts=parts):
                linear = None
                for part in reversed(parts):
                    linear = self._gguf(part, linear)
                assert linear is not None, "there are parts"
                return linear
        raise TypeError(f"{type(weights).__name__} cannot be packed")

    def _packed(
        self, kind: WeightFormat, codes: Tensor, bias: Tensor | None, *, planes: Sequence[Tensor] = (), group: int = 0,
        flip: int = 0, order: Tensor | None = None, then: PackedLinear | None = None,
    ) -> PackedLinear:  # fmt: skip
        packed = self._library.pack(kind, codes, self._memory, planes=planes, group=group, flip=flip)
        return PackedLinear(self._library, kind, packed, bias, len(codes), group=group, order=order, then=then)

    def _plain(self, weights: PlainWeights) -> PackedLinear:
        """Of a model in bfloat16 rows are rounded to it, too. In float32, values that bfloat16 has are kept in it: half the
        memory, the same results."""
        inputs, weight = weights.weight.shape[1], weights.weight
        if weight.dtype == torch.bfloat16:
            return self._packed(WeightFormat.BF16, weight, None if weights.bias is None else weights.bias.float())
        narrow = None if inputs % 2 else as_bfloat16(weight)
        if narrow is None:
            return self._packed(WeightFormat.PLAIN, weight, weights.bias)
        return self._packed(WeightFormat.BFLOAT16, narrow, weights.bias, group=inputs)

    def _int4(self, weights: Int4Weights) -> PackedLinear:
        planes = [weights.scales, _MIDDLE_OF_FOUR_BITS - weights.zeros.to(torch.int8)]
        order = None if weights.order is None else weights.order.contiguous()
        return self._packed(
            WeightFormat.INT4, unpacked(weights.codes), weights.bias, planes=planes, group=weights.group_size,
            order=order,
        )  # fmt: skip

    def _gguf(self, weights: GgufWeights, then: PackedLinear | None = None) -> PackedLinear:
        kind, blocks = KINDS[weights.kind], weights.blocks
        codes, *_ = decoded(weights.kind, blocks)
        planes = _planes(weights.kind, torch.unflatten(blocks, 1, (-1, kind.size_bytes)))
        return self._packed(
            WeightFormat[weights.kind], codes, weights.bias, planes=planes, group=kind.group,
            flip=_SIGN_BITS[weights.kind], then=then,
        )  # fmt: skip


def _planes(kind: str, blocks: Tensor) -> list[Tensor]:
    """Scales and the like, as the kernels keep them. blocks: [outputs, blocks, bytes]."""
    match kind:
        case "Q4_1":
            return [half_at(blocks, 0), half_at(blocks, 2)]
        case "Q4_K":
            scales, least = q4_k_bytes(blocks)
            return [half_at(blocks, 0), half_at(blocks, 2), scales.flatten(1), least.flatten(1)]
        case "Q6_K":
            return [half_at(blocks, 208), blocks[..., 192:208].flatten(1)]
        case _:
            return [half_at(blocks, 0)]
