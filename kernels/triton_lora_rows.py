"""What an adapter (LoRA) adds to a projection, for kernels that read the projection row by row: `rms_norm` and `rope_write`.

A kernel of its own costs a decode step more than the product itself: see docs/measurements/gpu-lora.md.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PARTS = 3
MAX_ROWS = 128
"""Of a step whose readers add what adapters add: each row reads its adapter's B, which many rows had better share."""


@triton.jit
def known_t(t_ptr, row, at, known, stride_split, stride_row, SPLITS: tl.constexpr):
    """Of rows and places in them: the sum over the splits, in order, fp32. Zeros where not `known`."""
    from_here = t_ptr + row * stride_row + at
    t = tl.load(from_here, mask=known, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        t += tl.load(from_here + split * stride_split, mask=known, other=0.0)
    return t


@triton.jit
def ranks_of_b(b_ptr, slot, first, rank, column, real_column, columns, RANK: tl.constexpr, RANKS: tl.constexpr):
    """[RANKS, columns] of a slot from rank `first` on; zeros behind `rank`."""
    r = first + tl.arange(0, RANKS)
    at = b_ptr + (r[:, None].to(tl.int64) + slot * RANK) * columns + column[None, :]
    return tl.load(at, mask=(r < rank)[:, None] & real_column[None, :], other=0.0)


@triton.jit
def added_to_row(
    b, t_ptr, row, slot, part, first, rank, stride_split, stride_row, stride_slot,
    RANK: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """fp32, [columns of b]: t @ b of one row. b: what ranks_of_b returned."""
    r = first + tl.arange(0, RANKS)
    t = known_t(t_ptr, row, slot * stride_slot + part * RANK + r, r < rank, stride_split, stride_row, SPLITS)
    return tl.sum(t.to(b.dtype).to(tl.float32)[:, None] * b.to(tl.float32), 0)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Of one layer; see engine.exec.lora.LoraSlots.

    Args:
        a: [slots, parts, max_rank, inputs], contiguous. b: [slots, outputs, max_rank], whose outputs follow each other in memory.
        ranks: [slots, parts] int32: what of the ranks is looked at.
        part_outputs: of each part.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    part_outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        num_slots, parts, max_rank, _ = self.a.shape
        outputs = sum(self.part_outputs)
        if parts != len(self.part_outputs) or parts > MAX_PARTS or self.b.shape != (num_slots, outputs, max_rank):
            raise ValueError(f"a {tuple(self.a.shape)} does not fit b {tuple(self.b.shape)} of {self.part_outputs}")
        if not (self.a.is_contiguous() and self.b.transpose(1, 2).is_contiguous() and self.ranks.is_contiguous()):
            raise ValueError("rows of a and b.transpose(1, 2) must follow each other in memory")
        if self.ranks.shape != (num_slots, parts) or self.ranks.dtype != torch.int32:
            raise ValueError(f"ranks {tuple(self.ranks.shape)} {self.ranks.dtype} are not {num_slots} x {parts} int32")

    @property
    def num_slots(self) -> int:
        return self.a.shape[0]

    @property
    def max_rank(self) -> int:
        return self.a.shape[2]

    @property
    def inputs(self) -> int:
        return self.a.shape[3]

    @property
    def outputs(self) -> int:
        return self.b.shape[1]


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """What is to be added to the rows of a projection: t @ b[slot].T of each row with an adapter.

    Args:
        t: x @ a.T: [splits, rows, width], whose sum is meant, contiguous in the last dim. width: parts * max_rank, of each row's
            own slot; or slots * parts * max_rank, of all slots. What no adapter of the row fills may hold anything.
        adapters: [rows] int32: the slot of each row, -1: none.
    Raises: ValueError on a shape or dtype mismatch.
    """

    t: Tensor
    weights: LoraWeights
    adapters: Tensor

    def __post_init__(self) -> None:
        own = len(self.weights.part_outputs) * self.weights.max_rank
        _, rows, width = self.t.shape
        if width not in (own, own * self.weights.num_slots) or self.t.stride(2) != 1:
            raise ValueError(f"t {tuple(self.t.shape)} does not fit a {tuple(self.weights.a.shape)}")
        check_adapters(rows, self.adapters)

    @property
    def rows(self) -> int:
        return self.t.shape[1]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of t: from split to split, from row to row, from slot to slot."""
        own = len(self.weights.part_outputs) * self.weights.max_rank
        return self.t.stride(0), self.t.stride(1), own if self.t.shape[2] > own else 0

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """t, b, ranks, adapters."""
        return self.t, self.weights.b, self.weights.ranks, self.adapters

    def check_fit(self, rows: int, columns: int, *, parts: int | None = None) -> None:
        """Raises: ValueError unless it is of a projection of this shape. Args: parts: None: any number."""
        found = len(self.weights.part_outputs)
        if (self.rows, self.weights.outputs) != (rows, columns) or parts not in (None, found):
            raise ValueError(f"{rows} rows of {columns}, t {tuple(self.t.shape)}, b {tuple(self.weights.b.shape)}")


def check_adapters(rows: int, adapters: Tensor) -> None:
    """Raises: ValueError."""
    if adapters.shape != (rows,) or adapters.dtype != torch.int32 or not adapters.is_contiguous():
        raise ValueError(f"{rows} rows, adapters {tuple(adapters.shape)} {adapters.dtype}")


def ranks_in_dots(max_rank: int) -> int:
    """Whole dots."""
    return max(16, int(triton.next_power_of_2(max_rank)))


_ELEMENTS = 128
"""Of B, that a thread holds in registers."""
_MOST_RANKS = 16


def row_constants(delta: LoraDelta | None, columns: int, num_warps: int) -> dict[str, int]:
    """Of a kernel that takes a row in one program. Args: columns: of the program, padded."""
    if delta is None:
        return {"RANK": 0, "RANKS": 0, "T_SPLITS": 1}
    room = _ELEMENTS * 32 * num_warps // columns
    ranks = min(triton.next_power_of_2(delta.weights.max_rank), _MOST_RANKS, max(1, room))
    return {"RANK": delta.weights.max_rank, "RANKS": ranks, "T_SPLITS": delta.t.shape[0]}
