"""LoRA adapters on the device: slots in every linear layer of the blocks, and what is copied into them.

    y[:, part] += (x @ a[slot, part].T) @ b[slot, rows of part].T          for rows with slot >= 0

`b` holds the adapter's B times its scale: multiplied in fp32, then rounded to the dtype of the computation. Ranks that an adapter
does not use, parts that it leaves alone and slots without one are zeros, so that every row may be computed alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from diptych.common.adapters.peft import Adapter, AdapterFacts, AdapterModule, RawTensor, load_adapter
from diptych.common.errors import AdapterError
from diptych.common.kv_format import Shard
from diptych.engine.exec.layers.linear import Linear, Part
from diptych.engine.exec.methods.base import WHOLE, LoadedLinear, StepRows
from diptych.engine.exec.models.description import ModelDescription
from diptych.kernels.native.api import HugePages, Memory

_PIECE_BYTES = 8 << 20
"""Of an adapter's memory."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoraSizes:
    """slots: adapters that are on the device at one time; 0: none are served. max_rank: of any of them."""

    slots: int = 0
    max_rank: int = 16

    def num_bytes(self, layer: Linear, shard: Shard, itemsize: int) -> int:
        """Device memory of the slots of one layer, which is a rank's part."""
        outputs, inputs = local_sizes(layer, shard)
        return self.slots * self.max_rank * (len(layer.parts) * inputs + sum(outputs)) * itemsize


NO_LORAS = LoraSizes()


def local_sizes(layer: Linear, shard: Shard) -> tuple[tuple[int, ...], int]:
    """Outputs of each part, and inputs, that a rank has."""
    outputs, inputs = [], layer.inputs
    for part in layer.parts:
        rows, columns = layer.share(part, shard)
        outputs.append(len(range(*rows.indices(part.outputs))))
        inputs = len(range(*columns.indices(layer.inputs)))
    return tuple(outputs), inputs


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """What an adapter puts into the slots of one layer, in the dtype of the computation, on the host.

    Args:
        a: [parts, rank, inputs]; b: [outputs, rank], with the scale. rank: the largest of the parts.
        ranks: of each part; 0: it is left alone.
    """

    a: Tensor
    b: Tensor
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class KeptAdapter(Protocol):
    """What an adapter has in one layer, as the layer's slots take it."""

    @property
    def num_bytes(self) -> int: ...


_Kept = TypeVar("_Kept", bound=KeptAdapter)


class LayerSlots(Protocol[_Kept]):
    """Of one linear layer, for one back end.

    part_outputs: of each part, in the order of the outputs. dtype: of the computation.
    """

    part_outputs: tuple[int, ...]
    inputs: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int: ...

    def pack(self, adapter: LayerAdapter, memory: Memory) -> _Kept:
        """What `install` takes, on any thread. Args: memory: of the adapter, for its parts that lie on the host."""
        ...

    def install(self, slot: int, adapter: _Kept | None) -> None:
        """Args: adapter: at most of max_rank; None: the layer is left alone."""
        ...


class LoraSlots:
    """Of one linear layer; written in place, so that kernels and CUDA graphs may keep the addresses. Implements LayerSlots.

    Args:
        part_outputs: of each part, in the order of the outputs.
    """

    __slots__ = ("a", "b", "dtype", "inputs", "part_outputs", "ranks", "_ranks")

    def __init__(self, part_outputs: tuple[int, ...], inputs: int, sizes: LoraSizes, like: Tensor) -> None:
        """Args: like: of the dtype and on the device of the computation."""
        parts, outputs = len(part_outputs), sum(part_outputs)
        self.part_outputs, self.inputs, self.dtype = part_outputs, inputs, like.dtype
        self.a = like.new_zeros((sizes.slots, parts, sizes.max_rank, inputs))
        """[slots, parts, max_rank, inputs]"""
        self.b = like.new_zeros((sizes.slots, sizes.max_rank, outputs)).transpose(1, 2)
        """[slots, outputs, max_rank]; in memory the outputs of a rank follow each other, as kernels read them."""
        self.ranks = torch.zeros((sizes.slots, parts), dtype=torch.int32, device=like.device)
        """[slots, parts]: how many kernels look at; 0: the part is left alone."""
        self._ranks = [(0,) * parts] * sizes.slots

    @property
    def num_slots(self) -> int:
        return self.a.shape[0]

    @property
    def max_rank(self) -> int:
        return self.a.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def pack(self, adapter: LayerAdapter, memory: Memory) -> LayerAdapter:
        """See LayerSlots.pack. For a GPU in page-locked memory, from which it copies while the host goes on."""
        if not self.a.is_cuda:
            return adapter
        return LayerAdapter(adapter.a.pin_memory(), adapter.b.pin_memory(), adapter.ranks)

    def install(self, slot: int, adapter: LayerAdapter | None) -> None:
        """See LayerSlots.install."""
        ranks = (0,) * len(self.part_outputs) if adapter is None else adapter.ranks
        rank = max(ranks)
        if max(self._ranks[slot]) > rank:
            self.a[slot, :, rank:].zero_()
            self.b[slot, :, rank:].zero_()
        if adapter is not None:
            self.a[slot, :, :rank].copy_(adapter.a, non_blocking=True)
            self.b[slot, :, :rank].copy_(adapter.b, non_blocking=True)
        if self._ranks[slot] != ranks:
            self.ranks[slot].copy_(torch.tensor(ranks, dtype=torch.int32), non_blocking=True)
            self._ranks[slot] = ranks


class LoraLinear:
    """The reference: any loaded layer, and what the adapters of its rows add. In fp32 up to the sum."""

    __slots__ = ("_inner", "slots")

    def __init__(self, inner: LoadedLinear, slots: LoraSlots) -> None:
        self._inner, self.slots = inner, slots

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes

    def __call__(self, x: Tensor, step: StepRows) -> Tensor:
        """See LoadedLinear."""
        out = self._inner(x, step)
        if step.adapters is None:
            return out
        for slot in set(step.adapters.tolist()):
            if slot < 0:
                continue
            rows = (step.adapters == slot).nonzero()[:, 0]
            out[rows] = (out[rows].float() + lora_delta(x[rows], self.slots, slot)).to(out.dtype)
        return out


def lora_delta(x: Tensor, slots: LoraSlots, slot: int) -> Tensor:
    """What one slot adds to rows of a layer. x: [rows, inputs]. Returns: [rows, outputs], float32."""
    x, b = x.float(), slots.b[slot].float()
    parts = torch.split(b, list(slots.part_outputs))
    return torch.cat([(x @ a.T) @ rows.T for a, rows in zip(slots.a[slot].float(), parts, strict=True)], dim=1)


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """Implements engine.step_messages.LoadedAdapter. layers: by place among the model's linear layers; None:
    left alone, or on another pipeline stage."""

    id: str
    rank: int
    num_bytes: int
    layers: tuple[KeptAdapter | None, ...]

    @property
    def num_parts(self) -> int:
        return len(self.layers)


class LoraModel:
    """The linear layers of a model's blocks, with their slots.

    Args:
        shard: of this rank.
        before, behind: linear layers of the model on other pipeline stages: adapters may have them, too, and every rank counts
            the same parts.
    """

    def __init__(
        self, sizes: LoraSizes, shard: Shard = WHOLE, *, before: Sequence[Linear] = (), behind: Sequence[Linear] = ()
    ) -> None:
        self.sizes = sizes
        self._shard, self._before, self._behind = shard, before, behind
        self._layers: list[tuple[Linear, LayerSlots[Any]]] = []

    def add(self, layer: Linear, like: Tensor, make: Callable[..., LayerSlots[Any]] = LoraSlots) -> LayerSlots[Any]:
        """Make the slots of the next layer. Args: like: see LoraSlots. make: see Backend.lora_slots."""
        outputs, inputs = local_sizes(layer, self._shard)
        slots = make(outputs, inputs, self.sizes, like)
        self._layers.append((layer, slots))
        return slots

    @property
    def num_bytes(self) -> int:
        return sum(slots.num_bytes for _, slots in self._layers)

    def install(self, slot: int, adapter: HostAdapter, parts: range | None = None) -> None:
        """A part is one linear layer. See ModelRunner.install_adapter."""
        first = len(self._before)
        for i in range(adapter.num_parts) if parts is None else parts:
            if first <= i < first + len(self._layers):
                self._layers[i - first][1].install(slot, adapter.layers[i])

    def read(self, folder: Path, facts: AdapterFacts) -> HostAdapter:
        """See ModelRunner.read_adapter. A rank keeps its part.

        Raises: AdapterError for what does not fit the model, or is infinite in the dtype of the computation.
        """
        adapter = load_adapter(folder, self.sizes.max_rank)
        if adapter.facts.id != facts.id:
            raise AdapterError(f"{folder} holds the adapter {adapter.facts.id}, not {facts.id}", param="adapter")
        modules = {module.name: module for module in adapter.facts.modules}
        own = (layer for layer, _ in self._layers)
        known = {part.name: (layer, part) for layer in (*self._before, *own, *self._behind) for part in layer.parts}
        for name, module in modules.items():
            _check_fit(module, known.get(name))
        memory = HugePages(_PIECE_BYTES)
        with torch.inference_mode():
            here = [self._layer(layer, slots, modules, adapter, memory) for layer, slots in self._layers]
        layers = (*[None] * len(self._before), *here, *[None] * len(self._behind))
        num_bytes = sum(one.num_bytes for one in here if one is not None)
        return HostAdapter(facts.id, adapter.facts.rank, num_bytes, layers)

    def _layer(
        self,
        layer: Linear,
        slots: LayerSlots[Any],
        modules: Mapping[str, AdapterModule],
        adapter: Adapter,
        memory: Memory,
    ) -> KeptAdapter | None:
        ranks = tuple(modules[part.name].rank if part.name in modules else 0 for part in layer.parts)
        rank = max(ranks)
        if not rank:
            return None
        a = torch.zeros((len(layer.parts), rank, slots.inputs), dtype=slots.dtype)
        b = torch.zeros((sum(slots.part_outputs), rank), dtype=slots.dtype)
        first = 0
        for i, (part, outputs) in enumerate(zip(layer.parts, slots.part_outputs, strict=True)):
            if module := modules.get(part.name):
                rows, columns = layer.share(part, self._shard)
                raw_a, raw_b = adapter.tensors[part.name]
                a[i, : module.rank] = _tensor(raw_a)[:, columns]
                b[first : first + outputs, : module.rank] = _tensor(raw_b)[rows].float() * module.scale
                _check_finite(a[i], b[first : first + outputs], module, raw_a.name)
            first += outputs
        kept: KeptAdapter = slots.pack(LayerAdapter(a, b, ranks), memory)
        return kept


def _check_fit(module: AdapterModule, place: tuple[Linear, Part] | None) -> None:
    """Raises: AdapterError where the model has no such layer, or one of another shape."""
    if place is None:
        raise AdapterError(f"the model has no linear layer {module.name} in its blocks", param="target_modules")
    layer, part = place
    if (module.inputs, module.outputs) != (layer.inputs, part.outputs):
        raise AdapterError(
            f"{module.name} has {module.inputs} inputs and {module.outputs} outputs in the adapter, {layer.inputs} and "
            f"{part.outputs} in the model",
            param=module.name,
        )


def _check_finite(a: Tensor, b: Tensor, module: AdapterModule, name: str) -> None:
    """Raises: AdapterError where numbers that are finite in the files are not so as they are computed with."""
    if not torch.isfinite(a).all():
        raise AdapterError(
            f"{name} holds numbers that {a.dtype} does not: its largest is {torch.finfo(a.dtype).max:g}", param=name
        )
    if not torch.isfinite(b).all():
        raise AdapterError(
            f"lora_alpha: B of {module.name} times its scale, {module.scale:g}, is not finite in {b.dtype}, whose largest number "
            f"is {torch.finfo(b.dtype).max:g}",
            param="lora_alpha",
        )


def _tensor(raw: RawTensor) -> Tensor:
    return torch.frombuffer(bytearray(raw.data), dtype=_DTYPES[raw.dtype]).view(raw.shape)


def slot_bytes(description: ModelDescription, sizes: LoraSizes, itemsize: int, shard: Shard = WHOLE) -> int:
    """Device memory that the slots of a model take."""
    return sum(sizes.num_bytes(layer, shard, itemsize) for block in description.blocks for layer in block.linears)
