"""Slots for adapters on the compiled kernels: a slot is two addresses, and an adapter stays where it was read.

read, on a thread that loads -> packed as the kernels go through it -> a slot points to it -> it leaves when no slot does
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from diptych.engine.exec.lora import LayerAdapter, LoraSizes
from diptych.engine.exec.native.narrow import as_bfloat16
from diptych.kernels.native.api import FLOAT_BYTES, LORA_PARTS, LORA_ROWS, Adapter, Lora, Memory


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """Of one layer, see struct adapter in lora.h. a, b: flat; bfloat16 or float32. ranks: of each part."""

    a: Tensor
    b: Tensor
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class PackedSlots:
    """Implements engine.exec.lora.LayerSlots.

    Args:
        lanes: of the library.
        part_outputs: of each part, multiples of it.
    Attributes:
        lora: what the kernels are given. They read it in every step, so what is installed is seen by the next one.
    """

    __slots__ = ("dtype", "inputs", "lora", "part_outputs", "_adapters", "_lanes", "_table")

    def __init__(
        self, lanes: int, part_outputs: tuple[int, ...], inputs: int, sizes: LoraSizes, dtype: torch.dtype
    ) -> None:
        assert all(outputs % lanes == 0 for outputs in part_outputs), "kernels step over whole vectors of a part"
        assert len(part_outputs) <= LORA_PARTS
        self.part_outputs, self.inputs, self.dtype = part_outputs, inputs, dtype
        self._lanes = lanes
        self._adapters: list[PackedAdapter | None] = [None] * sizes.slots
        self._table = (Adapter * sizes.slots)()
        width = -(-len(part_outputs) * sizes.max_rank // lanes) * lanes
        self.lora = Lora(self._table, len(part_outputs), width)
        self.lora.ends[: len(part_outputs)] = list(accumulate(part_outputs))

    @property
    def num_bytes(self) -> int:
        """None of their own."""
        return 0

    def pack(self, adapter: LayerAdapter, memory: Memory) -> PackedAdapter:
        """See LayerSlots.pack."""
        lanes = self._lanes
        rows = torch.cat([part[:rank] for part, rank in zip(adapter.a, adapter.ranks, strict=True)])
        whole = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % lanes))
        a = _keep([whole.view(-1, lanes, self.inputs)], memory)
        columns = zip(torch.split(adapter.b, list(self.part_outputs)), adapter.ranks, strict=True)
        b = _keep([part[:, :rank].reshape(-1, lanes, rank) for part, rank in columns if rank], memory)
        return PackedAdapter(a, b, adapter.ranks)

    def install(self, slot: int, adapter: PackedAdapter | None) -> None:
        """See LayerSlots.install. The former adapter's memory may go after this."""
        at = self._table[slot]
        if adapter is None:
            at.ranks[:] = [0] * LORA_PARTS
        else:
            at.a, at.b = adapter.a.data_ptr(), adapter.b.data_ptr()
            at.a_bfloats, at.b_bfloats = (part.dtype == torch.bfloat16 for part in (adapter.a, adapter.b))
            at.ranks[: len(adapter.ranks)] = adapter.ranks
        self._adapters[slot] = adapter


def _keep(parts: list[Tensor], memory: Memory) -> Tensor:
    """Flat, one part after the other, each transposed. parts: [vectors, lanes, ...] each, bfloat16 or float32."""
    flat = torch.cat([part.transpose(1, 2).flatten() for part in parts])
    if flat.dtype == torch.float32 and (narrow := as_bfloat16(flat[:, None])) is not None:
        flat = narrow[:, 0]
    return memory.take(-(-flat.nbytes // FLOAT_BYTES)).view(flat.dtype)[: len(flat)].copy_(flat)


def teams_of(adapters: np.ndarray) -> np.ndarray | None:
    """The rows that have an adapter, in teams of Team: by slot, then in their order. None: there are none.

    adapters: [rows] int32, the slot of each row's adapter, -1: none. Returns: [num_teams, 2 + LORA_ROWS] int32.
    """
    rows = np.argsort(adapters, kind="stable")
    rows = rows[np.searchsorted(adapters[rows], 0) :]
    if not len(rows):
        return None
    slots = adapters[rows]
    begins = np.flatnonzero(np.diff(slots, prepend=-1))
    counts = np.diff(begins, append=len(rows))
    places = np.arange(len(rows)) - np.repeat(begins, counts)  # within the rows of its slot
    teams = np.cumsum(places % LORA_ROWS == 0) - 1
    made = np.zeros((teams[-1] + 1, 2 + LORA_ROWS), dtype=np.int32)
    made[teams, 0] = slots
    made[:, 1] = np.bincount(teams)
    made[teams, 2 + places % LORA_ROWS] = rows
    return made
