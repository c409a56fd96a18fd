"""What adapters (LoRA) add to a linear layer, in Triton, for any mixture of adapters and rows without one.

    t = x @ a[slot].T          lora_shrink: of all parts of a merged layer in one launch
    y += t @ b[slot].T         lora_expand, in place; or lora_gate_mul, which applies the activation of gate and up, too

A program has a tile of rows and one slot (or a range of them) and ends at once where no row of the tile has it, so that
nothing is sorted and a CUDA graph serves every mixture. Rows of a prompt have one adapter, so in a large step nearly all
programs end so; rows that decode have several, and each slot's weights are read once for all of its rows.

What a row gets depends on its x, its slot's weights and the launch's shape alone. With `invariant` this shape is one for any
number of rows, so that no bit depends on the rest of the step either. Rows without an adapter keep their bits.

The inputs are cut into shares; who reads them adds up their sums in order. Where A lies behind the layer's own weight, as
engine.exec.cuda.adapted keeps it, the projection computes x @ a.T of all slots itself, and `lora_shrink` is not needed. In
a step of few rows `rms_norm` and `rope_write` add what `lora_expand` does.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.pdl import begin, use_pdl
from diptych.kernels.triton_lora_rows import LoraDelta, LoraWeights, check_adapters, known_t, ranks_in_dots, ranks_of_b
from diptych.kernels.triton_norm import ACTIVATIONS, gated, summed


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    adapters_ptr,
    out_ptr,
    num_rows,
    size,
    share,
    stride_x,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
    BEHIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """EARLY: a share is one block. BEHIND: the launch before is a projection of the same x, see lora_room: it has waited for what
    made x, so nothing is waited for but its end."""
    slot, split = tl.program_id(2), tl.program_id(1)
    part = tl.program_id(0) % PARTS
    row = tl.program_id(0) // PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    # What no kernel of the step writes is read before the wait.
    mine = tl.load(adapters_ptr + row, mask=row < num_rows, other=-1) == slot
    rank = tl.load(ranks_ptr + slot * PARTS + part)
    needed = (tl.sum(mine.to(tl.int32), 0) != 0) & (rank != 0)
    r, k = tl.arange(0, RANKS), tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None].to(tl.int64) * stride_x + k[None, :]
    a_at = a_ptr + ((slot.to(tl.int64) * PARTS + part) * RANK + r[:, None]) * size + k[None, :]
    low = split * share
    high = tl.minimum(low + share, size)
    acc = tl.zeros([BLOCK_M, RANKS], tl.float32)
    if not BEHIND:
        begin(PDL)
    if needed:
        if EARLY:
            inside = (low + k < high)[None, :]
            a = tl.load(a_at + low, mask=(r < RANK)[:, None] & inside, other=0.0)
            x = tl.load(x_at + low, mask=mine[:, None] & inside, other=0.0)
            acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
        else:
            for start in tl.range(low, high, BLOCK_K):
                inside = (start + k < high)[None, :]
                x = tl.load(x_at + start, mask=mine[:, None] & inside, other=0.0)
                a = tl.load(a_at + start, mask=(r < RANK)[:, None] & inside, other=0.0)
                acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    if BEHIND:
        begin(PDL)
    if needed == 0:
        return
    width = PARTS * RANK
    out_at = (
        out_ptr + split.to(tl.int64) * num_rows * width + row[:, None].to(tl.int64) * width + part * RANK + r[None, :]
    )
    tl.store(out_at, acc, mask=mine[:, None] & (r < RANK)[None, :])


@triton.jit
def _expanded(
    acc, b, t_ptr, row, mine, slot, part, rank, stride_split, stride_row, stride_slot,
    RANK: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """acc, with what the slot of b adds to a part where rows are `mine`."""
    r = tl.arange(0, RANKS)
    known = mine[:, None] & (r < rank)[None, :]
    at = slot * stride_slot + part * RANK + r[None, :]
    t = known_t(t_ptr, row[:, None].to(tl.int64), at, known, stride_split, stride_row, SPLITS)
    some = tl.dot(t.to(b.dtype), b, input_precision="ieee")
    return tl.where(mine[:, None], some, acc)


@triton.jit(do_not_specialize=["num_rows", "stride_t_split"])
def _expand_kernel(
    out_ptr,
    t_ptr,
    b_ptr,
    ranks_ptr,
    adapters_ptr,
    num_rows,
    columns,
    stride_out,
    stride_t_split,
    stride_t_row,
    stride_t_slot,
    slots,
    end_0,
    end_1,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """SPLITS: of t. SLOTS: of one program; the weights of a single one are read before the wait. Tiles of columns do not cross
    from one part to the next."""
    tile, first_slot = tl.program_id(0), tl.program_id(2) * SLOTS
    tiles_0 = tl.cdiv(end_0, BLOCK_N)
    tiles_1 = tiles_0 + tl.cdiv(end_1 - end_0, BLOCK_N)
    part = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_1).to(tl.int32)
    first_tile = tl.where(part == 0, 0, tl.where(part == 1, tiles_0, tiles_1))
    first_column = tl.where(part == 0, 0, tl.where(part == 1, end_0, end_1))
    last_column = tl.where(part == 0, end_0, tl.where(part == 1, end_1, columns))
    column = first_column + (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    adapter = tl.load(adapters_ptr + row, mask=row < num_rows, other=-1)
    mine = (adapter >= first_slot) & (adapter < first_slot + SLOTS)
    needed = tl.sum(mine.to(tl.int32), 0) != 0
    real_column = column < last_column
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SLOTS == 1:
        rank = tl.load(ranks_ptr + first_slot * PARTS + part, mask=needed, other=0)
        b = ranks_of_b(b_ptr, first_slot, 0, rank, column, real_column, columns, RANK, RANKS)
        begin(PDL)
        if rank == 0:
            return
        acc = _expanded(
            acc,
            b,
            t_ptr,
            row,
            mine,
            first_slot,
            part,
            rank,
            stride_t_split,
            stride_t_row,
            stride_t_slot,
            RANK,
            RANKS,
            SPLITS,
        )
    else:
        begin(PDL)
        if needed == 0:
            return
        for slot in tl.range(first_slot, tl.minimum(first_slot + SLOTS, slots)):
            its = adapter == slot
            rank = tl.load(ranks_ptr + slot * PARTS + part)
            if (tl.sum(its.to(tl.int32), 0) != 0) & (rank != 0):
                b = ranks_of_b(b_ptr, slot, 0, rank, column, real_column, columns, RANK, RANKS)
                acc = _expanded(
                    acc,
                    b,
                    t_ptr,
                    row,
                    its,
                    slot,
                    part,
                    rank,
                    stride_t_split,
                    stride_t_row,
                    stride_t_slot,
                    RANK,
                    RANKS,
                    SPLITS,
                )
    out_at = out_ptr + row[:, None].to(tl.int64) * stride_out + column[None, :]
    mask = mine[:, None] & real_column[None, :]
    y = tl.load(out_at, mask=mask, other=0.0).to(tl.float32) + acc
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "stride_split", "stride_t_split"])
def _gate_mul_kernel(
    x_ptr,
    out_ptr,
    t_ptr,
    b_ptr,
    ranks_ptr,
    adapters_ptr,
    num_rows,
    size,
    stride_x,
    stride_split,
    stride_t_split,
    stride_t_row,
    stride_t_slot,
    slots,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SLOTS: tl.constexpr,
    BASE_SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """See _expand_kernel. Slots begin with -1: rows without an adapter pass, too."""
    first_slot = tl.program_id(2) * SLOTS - 1
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    adapter = tl.load(adapters_ptr + row, mask=row < num_rows, other=-2)
    mine = (adapter >= first_slot) & (adapter < first_slot + SLOTS)
    needed = tl.sum(mine.to(tl.int32), 0) != 0
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    real_column = column < size
    gate_more = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_more = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SLOTS == 1:
        adds = needed & (first_slot >= 0)
        gate_rank = tl.load(ranks_ptr + first_slot * 2, mask=adds, other=0)
        up_rank = tl.load(ranks_ptr + first_slot * 2 + 1, mask=adds, other=0)
        gate_b = ranks_of_b(b_ptr, first_slot, 0, gate_rank, column, real_column, 2 * size, RANK, RANKS)
        up_b = ranks_of_b(b_ptr, first_slot, 0, up_rank, size + column, real_column, 2 * size, RANK, RANKS)
        begin(PDL)
        if needed == 0:
            return
        if gate_rank != 0:
            gate_more = _expanded(
                gate_more, gate_b, t_ptr, row, mine, first_slot, 0, gate_rank,
                stride_t_split, stride_t_row, stride_t_slot, RANK, RANKS, SPLITS,
            )  # fmt: skip
        if up_rank != 0:
            up_more = _expanded(
                up_more, up_b, t_ptr, row, mine, first_slot, 1, up_rank,
                stride_t_split, stride_t_row, stride_t_slot, RANK, RANKS, SPLITS,
            )  # fmt: skip
    else:
        begin(PDL)
        if needed == 0:
            return
        for slot in tl.range(tl.maximum(first_slot, 0), tl.minimum(first_slot + SLOTS, slots)):
            its = adapter == slot
            present = tl.sum(its.to(tl.int32), 0) != 0
            gate_rank, up_rank = tl.load(ranks_ptr + slot * 2), tl.load(ranks_ptr + slot * 2 + 1)
            if present & (gate_rank != 0):
                b = ranks_of_b(b_ptr, slot, 0, gate_rank, column, real_column, 2 * size, RANK, RANKS)
                gate_more = _expanded(
                    gate_more, b, t_ptr, row, its, slot, 0, gate_rank,
                    stride_t_split, stride_t_row, stride_t_slot, RANK, RANKS, SPLITS,
                )  # fmt: skip
            if present & (up_rank != 0):
                b = ranks_of_b(b_ptr, slot, 0, up_rank, size + column, real_column, 2 * size, RANK, RANKS)
                up_more = _expanded(
                    up_more, b, t_ptr, row, its, slot, 1, up_rank,
                    stride_t_split, stride_t_row, stride_t_slot, RANK, RANKS, SPLITS,
                )  # fmt: skip
    mask = mine[:, None] & real_column[None, :]
    at = x_ptr + row[:, None].to(tl.int64) * stride_x + column[None, :]
    gate = summed(at, mask, stride_split, BASE_SPLITS, dtype)
    up = summed(at + size, mask, stride_split, BASE_SPLITS, dtype)
    with_one = (adapter >= 0)[:, None]
    # Rounded to the model's dtype before the activation, as the unfused projection is.
    gate = tl.where(with_one, (gate + gate_more).to(dtype).to(tl.float32), gate)
    up = tl.where(with_one, (up + up_more).to(dtype).to(tl.float32), up)
    out_at = out_ptr + row[:, None].to(tl.int64) * size + column[None, :]
    tl.store(out_at, gated(gate, up, ACTIVATION).to(dtype), mask=mask)


@dataclass(frozen=True, slots=True)
class LoraShape:
    """How launches are cut.

    Args:
        block_m, block_n: rows and columns of a tile. slots: of one program of the second launch.
    """

    block_m: int
    block_n: int
    slots: int


_BLOCK_K = 128
_SHARE = 512
"""Inputs of one program."""
_FEW_INPUTS = 4096
"""Of more, a program takes twice as many: else there would be more sums to add up than programs are worth."""
_EARLY_ELEMENTS = 8 << 10
"""Of a share's weights, of 2 bytes each, that a program holds in registers."""
_DECODE = 64
"""Rows that are likely to have many adapters: a program of the second launch has one slot then, else all of them. They are
sorted by adapter (see engine.exec.cuda.batch), so that of few rows most programs end at once."""


def lora_shape(num_rows: int, num_slots: int, *, invariant: bool) -> LoraShape:
    """Args: num_slots: of the weights. invariant: a row's bits depend on no other row."""
    slots = 1 if num_rows <= _DECODE else num_slots + 1
    if invariant or num_rows > _DECODE:  # how slots are shared out changes no bit
        return LoraShape(64, 64, slots)
    return LoraShape(16, 128, slots)


def share_of(inputs: int, num_rows: int, *, invariant: bool) -> int:
    """Inputs of one program of the first launch. Many rows are programs enough, and then there are fewer sums to add up."""
    share = _SHARE if inputs <= _FEW_INPUTS else 2 * _SHARE
    return share if invariant or num_rows <= _DECODE else 4 * share


def lora_room(x: Tensor, weights: LoraWeights, *, invariant: bool = False) -> Tensor:
    """For what lora_shrink returns: taken before the layer's own projection of x is launched, beside which it is computed then.
    Room that is taken later may be memory that this projection still uses."""
    shares = triton.cdiv(x.shape[1], share_of(x.shape[1], x.shape[0], invariant=invariant))
    return torch.empty(
        (shares, x.shape[0], weights.a.shape[1] * weights.max_rank), dtype=torch.float32, device=x.device
    )


def lora_shrink(
    x: Tensor, weights: LoraWeights, adapters: Tensor, *, room: Tensor | None = None, invariant: bool = False
) -> LoraDelta:
    """x @ a[slot].T of each row, in shares of the inputs.

    Args:
        x: [rows, inputs], weights' dtype, contiguous in the last dim. adapters: [rows] int32: the slot of each row, -1: none.
        room: of lora_room, where a projection of the same x, and nothing else, was launched since; None: anything may have been.
        invariant: see lora_shape.
    Returns: t: [shares, rows, parts * max_rank] fp32.
    Raises: ValueError on a shape or dtype mismatch.
    """
    num_rows, size = x.shape
    num_slots, parts, max_rank, inputs = weights.a.shape
    if size != inputs or x.dtype != weights.a.dtype or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit a {tuple(weights.a.shape)} {weights.a.dtype}")
    check_adapters(num_rows, adapters)
    shape, share, pdl = (
        lora_shape(num_rows, num_slots, invariant=invariant),
        share_of(size, num_rows, invariant=invariant),
        use_pdl(x.device, num_rows),
    )
    shares, ranks = triton.cdiv(size, share), ranks_in_dots(max_rank)
    half = x.element_size() == 2
    early = half and num_rows <= _DECODE and not invariant and ranks * share <= _EARLY_ELEMENTS
    out = lora_room(x, weights, invariant=invariant) if room is None else room
    if out.shape != (shares, num_rows, parts * max_rank):
        raise ValueError(f"room {tuple(out.shape)} is not that of x {tuple(x.shape)}")
    _shrink_kernel[(triton.cdiv(num_rows, shape.block_m) * parts, shares, num_slots)](
        x,
        weights.a,
        weights.ranks,
        adapters,
        out,
        num_rows,
        size,
        share,
        x.stride(0),
        PARTS=parts,
        RANK=max_rank,
        RANKS=ranks,
        BLOCK_M=shape.block_m,
        BLOCK_K=share if early else _BLOCK_K,
        EARLY=early,
        BEHIND=room is not None,
        PDL=pdl,
        num_warps=4,
        num_stages=3,
        launch_pdl=pdl,
    )
    return LoraDelta(out, weights, adapters)


def lora_expand(out: Tensor, delta: LoraDelta, *, invariant: bool = False) -> None:
    """out += t @ b[slot].T, in place, of rows with an adapter.

    Args:
        out: [rows, outputs], contiguous in the last dim; or [splits, rows, outputs] fp32, whose sum is meant: the first gets it
            all. invariant: see lora_shape.
    Raises: ValueError on a shape mismatch.
    """
    rows, columns = out.shape[-2:]
    weights = delta.weights
    delta.check_fit(rows, columns)
    if out.stride(-1) != 1:
        raise ValueError(f"out {tuple(out.shape)} must be contiguous in the last dim")
    shape, pdl = lora_shape(rows, weights.num_slots, invariant=invariant), use_pdl(out.device, rows)
    tiles = sum(triton.cdiv(n, shape.block_n) for n in weights.part_outputs)
    _expand_kernel[(tiles, triton.cdiv(rows, shape.block_m), triton.cdiv(weights.num_slots, shape.slots))](
        out,
        delta.t,
        weights.b,
        weights.ranks,
        delta.adapters,
        rows,
        columns,
        out.stride(-2),
        *delta.strides,
        weights.num_slots,
        *_ends(weights.part_outputs),
        PARTS=len(weights.part_outputs),
        RANK=weights.max_rank,
        RANKS=ranks_in_dots(weights.max_rank),
        SPLITS=delta.t.shape[0],
        SLOTS=shape.slots,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _ends(part_outputs: Sequence[int]) -> tuple[int, int]:
    """Of the first two parts."""
    first = part_outputs[0]
    return first, first + (part_outputs[1] if len(part_outputs) > 1 else 0)


def lora_gate_mul(
    gate_up: Tensor,
    delta: LoraDelta,
    activation: str,
    *,
    dtype: torch.dtype | None = None,
    invariant: bool = False,
) -> Tensor:
    """activation(gate) * up of all rows, where to gate and up is added t @ b[slot].T of rows with an adapter.

    Args:
        gate_up: [rows, 2 * size], contiguous in the last dim, without what adapters add; or [splits, rows, 2 * size] fp32, whose
            sum, rounded to `dtype`, is meant.
        activation: one of triton_norm.ACTIVATIONS. dtype: of the result; None: gate_up's. invariant: see lora_shape.
    Returns: [rows, size].
    Raises: ValueError on a shape mismatch, or another activation.
    """
    rows, width = gate_up.shape[-2:]
    weights = delta.weights
    if activation not in ACTIVATIONS:
        raise ValueError(f"no activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    if weights.part_outputs != (width // 2, width // 2) or gate_up.stride(-1) != 1:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} is not of parts {weights.part_outputs}")
    delta.check_fit(rows, width)
    shape, pdl = lora_shape(rows, weights.num_slots, invariant=invariant), use_pdl(gate_up.device, rows)
    out = torch.empty((rows, width // 2), dtype=dtype or gate_up.dtype, device=gate_up.device)
    grid = (
        triton.cdiv(width // 2, shape.block_n),
        triton.cdiv(rows, shape.block_m),
        triton.cdiv(weights.num_slots + 1, shape.slots),
    )
    _gate_mul_kernel[grid](
        gate_up,
        out,
        delta.t,
        weights.b,
        weights.ranks,
        delta.adapters,
        rows,
        width // 2,
        gate_up.stride(-2),
        gate_up.stride(0) if gate_up.dim() == 3 else 0,
        *delta.strides,
        weights.num_slots,
        RANK=weights.max_rank,
        RANKS=ranks_in_dots(weights.max_rank),
        SPLITS=delta.t.shape[0],
        SLOTS=shape.slots,
        BASE_SPLITS=gate_up.shape[0] if gate_up.dim() == 3 else 1,
        ACTIVATION=activation,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
