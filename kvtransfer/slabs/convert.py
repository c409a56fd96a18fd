"""KV of one layout into another: block size, order of heads and slots, dtype, and layers and heads of other ranks.

A payload is what pack wrote: whole blocks of the sender, then the slots that are used of its last one. It is taken apart into
[num_layers * parts, tokens, heads, head_dim] and put together again in blocks of the receiver. Bits change only where the dtype
does: to a wider one exactly, to a narrower one rounded to the nearest, ties to even, as torch does.

Of quantized KV an element of that array is a byte of a head's record (kv_codes.py): codes and their scale stay together. KV is
decoded for a receiver that keeps elements, and quantized for one that keeps codes: once, since two quantized dtypes that differ
are refused.

What a rank of the receiver takes as a rank of the sender holds it (planner.straight_pieces) is not taken apart: the payload is
given out as it came.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from diptych.common.errors import TransferError
from diptych.common.kv_format import ORDERS, KvFormat, KvGroup, dtype_bytes
from diptych.common.kv_groups import expected_ranges
from diptych.engine.messages import DeviceRange, Payload
from diptych.kvtransfer.slabs import kv_codes
from diptych.kvtransfer.slabs.kv_codes import SCALE_BYTES
from diptych.kvtransfer.slabs.planner import Piece, plan_parts, same_layout, straight_pieces, wanted_ranks

_WIDE = "float32"


@dataclass(frozen=True, slots=True)
class _Side:
    """Sizes of one KV group of one rank. `rows`: layers times the parts of a token's KV, K and V."""

    rows: int
    heads: int
    dim: int
    block_size: int
    dtype: str
    quantized: bool
    heads_first: bool

    @classmethod
    def of(cls, kv: KvFormat, group: KvGroup, num_layers: int) -> _Side:
        return cls(
            num_layers * len(group.dims), group.heads_per_rank(kv.shard), group.dims[0], group.block_size, group.dtype,
            group.quantized, ORDERS[kv.order] == "HND",
        )  # fmt: skip

    @property
    def raw(self) -> np.dtype:
        """Elements are carried as bits: numpy has no bfloat16."""
        return np.dtype(f"u{dtype_bytes(self.dtype)}")

    @property
    def width(self) -> int:
        """Of a head: elements, or bytes of a record."""
        return self.dim + SCALE_BYTES if self.quantized else self.dim


def cast(bits: np.ndarray, source: str, target: str) -> np.ndarray:
    """Elements of dtype `source` as those of `target`, both as raw bits."""
    if source == target:
        return bits
    if source == "bfloat16":
        wide = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        wide = bits.view(np.dtype(source)).astype(np.float32)
    if target == "float32":
        return wide.view(np.uint32)
    if target == "float16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).view(np.uint16)
    raw = wide.view(np.uint32)
    rounded = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(wide), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _recoded(heads: np.ndarray, source: _Side, target: _Side) -> np.ndarray:
    """[..., width of source] as [..., width of target]."""
    if source.quantized == target.quantized:
        return cast(heads, source.dtype, target.dtype)
    if source.quantized:
        return cast(kv_codes.decode(heads, source.dtype).view(np.uint32), _WIDE, target.dtype)
    return kv_codes.encode(cast(heads, source.dtype, _WIDE).view(np.float32), target.dtype)


class _Cells:
    """What a payload holds, by token: views of it, but for records of quantized KV. payload: of `num_tokens`, from a block on."""

    def __init__(self, payload: memoryview, side: _Side, num_tokens: int) -> None:
        self._side, self._num_tokens = side, num_tokens
        self._flat = np.frombuffer(payload, np.uint8 if side.quantized else side.raw)
        self._per_token = self._flat.size // num_tokens

    def block_end(self, token: int) -> int:
        """One past the last token of its block, counted from the payload's first."""
        return min((token // self._side.block_size + 1) * self._side.block_size, self._num_tokens)

    def of(self, start: int, stop: int) -> np.ndarray:
        """[rows, tokens, heads, width]. Args: tokens of one block."""
        side, begin = self._side, start // self._side.block_size * self._side.block_size
        end = self.block_end(start)
        block = self._flat[begin * self._per_token : end * self._per_token]
        if side.quantized:
            slots = block.reshape(side.rows, end - begin, -1)[:, start - begin : stop - begin]
            return kv_codes.records_of(slots, side.heads, side.dim)
        return _slots_first(block, end - begin, side)[:, start - begin : stop - begin]


def _slots_first(flat: np.ndarray, slots: int, side: _Side) -> np.ndarray:
    """[rows, slots, heads, width], a view of the elements of a block."""
    if side.heads_first:
        return flat.reshape(side.rows, side.heads, slots, side.width).swapaxes(1, 2)
    return flat.reshape(side.rows, slots, side.heads, side.width)


def _side(kv: KvFormat, group: int) -> _Side:
    return _Side.of(kv, kv.groups[group], kv.groups[group].num_layers)


@dataclass(frozen=True, slots=True)
class ConvertedRange:
    """For one KV group of one rank of ours, as pack would have written it here: starts at a block and ends at one, or at the end
    of what is wanted.

    Args:
        first_layer, num_layers: of the group: all of them, where it is not straight.
        is_straight: `payload` is the one that was fed, or one of its own.
    """

    first_token: int
    num_tokens: int
    payload: Payload
    part: int = 0
    group: int = 0
    first_layer: int = 0
    num_layers: int = 0
    is_straight: bool = False


@dataclass(slots=True)
class _Block:
    """One block of ours while it fills.

    Args:
        data: [rows, tokens, heads, width], a view of `chunk` from `start` to `stop`.
        chunk: elements of this block and of those that were begun with it, as they are given out; of quantized KV records.
        filled: [layers, tokens, heads]: what has come.
        left: layers times tokens times heads that have not come.
    """

    data: np.ndarray
    chunk: np.ndarray
    start: int
    stop: int
    filled: np.ndarray
    left: int


@dataclass(frozen=True, slots=True)
class _Target:
    """A KV group of a rank of ours. Wanted of it: tokens [first, end)."""

    rank: int
    group: int
    kv: KvFormat
    side: _Side
    first: int
    end: int
    blocks: dict[int, _Block] = field(default_factory=dict)
    """By index, those that are not complete."""

    @property
    def num_layers(self) -> int:
        return self.kv.groups[self.group].num_layers

    def begin(self, first_token: int, end: int) -> None:
        """Memory for the blocks of these tokens that have none yet: what comes in one range is mostly given out in one."""
        size, side = self.side.block_size, self.side
        new = [index for index in range(first_token // size, -(-end // size)) if index not in self.blocks]
        tokens = [min(size, self.end - index * size) for index in new]
        per_token = side.rows * side.heads * side.width
        chunk, at = np.empty(sum(tokens) * per_token, side.raw), 0
        for index, count in zip(new, tokens, strict=True):
            shape, stop = (self.num_layers, count, side.heads), at + count * per_token
            data = _slots_first(chunk[at:stop], count, side)
            self.blocks[index] = _Block(data, chunk, at, stop, np.zeros(shape, np.bool_), int(np.prod(shape)))
            at = stop

    def take(self, indices: list[int]) -> ConvertedRange:
        """Blocks that follow each other, which are complete."""
        blocks = [self.blocks.pop(index) for index in indices]
        num_tokens = sum(block.data.shape[1] for block in blocks)
        first, last = blocks[0], blocks[-1]
        if self.side.quantized:
            flat = np.concatenate([kv_codes.slots_of(block.data).reshape(-1) for block in blocks])
        elif all(block.chunk is first.chunk for block in blocks) and _are_neighbours(blocks):
            flat = first.chunk[first.start : last.stop]
        else:
            flat = np.concatenate([block.chunk[block.start : block.stop] for block in blocks])
        return ConvertedRange(
            indices[0] * self.side.block_size, num_tokens, memoryview(flat).cast("B"), self.rank, self.group,
            num_layers=self.num_layers,
        )  # fmt: skip


def _are_neighbours(blocks: Sequence[_Block]) -> bool:
    return all(a.stop == b.start for a, b in itertools.pairwise(blocks))


@dataclass(frozen=True, slots=True)
class FedRange:
    """A verified payload of a rank of the sender, as its handle names it. `num_layers` None: all of the group."""

    first_token: int
    num_tokens: int
    payload: Payload
    part: int = 0
    group: int = 0
    first_layer: int = 0
    num_layers: int | None = None


class RangeConverter:
    """Takes the ranges of one leg in any order and gives out whole blocks of each of our ranks as they become complete.

    Args:
        source: the sender's ranks.
        target: ours.
        first_token: wanted from here on: a multiple of our block size, or `end`. What comes of earlier tokens is dropped.
        end: one past the last token that is wanted.
        reusable: see expected_ranges.
        turn: see plan_parts.
    Raises: IncompatibleWorkersError.
    """

    def __init__(
        self,
        source: Sequence[KvFormat],
        target: Sequence[KvFormat],
        first_token: int,
        end: int,
        *,
        reusable: bool = False,
        turn: int = 0,
    ) -> None:
        self._source, self._end = tuple(source), end
        plan = plan_parts(self._source, tuple(target), turn)
        self.ranks = wanted_ranks(plan)
        """Of the sender, those whose payloads are needed."""
        self._targets = {
            (rank, one.group): _Target(rank, one.group, kv, _side(kv, one.group), one.first, end)
            for rank, kv in enumerate(target)
            for one in expected_ranges(kv, first_token, end, reusable=reusable)
        }
        self._pieces: dict[tuple[int, int], list[tuple[int, Piece, bool]]] = {}
        for rank, pieces in enumerate(zip(plan, straight_pieces(plan, self._source, target), strict=True)):
            for piece, straight in zip(*pieces, strict=True):
                self._pieces.setdefault((piece.rank, piece.group), []).append((rank, piece, straight))
        self._some_layers = len(target) == 1
        """Ranges of some layers can be given out."""
        self.changes_values = any(
            theirs.dtypes != mine.dtypes and not same_layout(theirs, mine) for theirs in self._source for mine in target
        )
        """Not only where elements lie, but what they are."""

    @property
    def num_open(self) -> int:
        """Blocks of which something has come, and not all."""
        return sum(len(target.blocks) for target in self._targets.values())

    def feed(self, fed: FedRange) -> list[ConvertedRange]:
        """The payload is not kept, but in ranges that go straight. Raises: TransferError: size, bounds, or the same twice; or it
        lies in GPU memory and must be put together anew."""
        first, num = fed.first_token, fed.num_tokens
        if first < 0 or first + num > self._end:
            raise TransferError(f"range [{first}, {first + num}) ends behind {self._end}")
        if fed.part not in self.ranks:
            raise TransferError(f"nothing is wanted of rank {fed.part}")
        # A group that is on all ranks comes from each that is wanted, and is taken from one.
        pieces = self._pieces.get((fed.part, fed.group), ())
        kv = self._source[fed.part]
        group = kv.groups[fed.group]
        num_layers = group.num_layers if fed.num_layers is None else fed.num_layers
        size = num * num_layers * group.layer_bytes_per_token(kv.shard)
        if len(fed.payload) != size:
            raise TransferError(f"{num} tokens take {size} bytes, not {len(fed.payload)}")
        side, layers = _Side.of(kv, group, num_layers), range(fed.first_layer, fed.first_layer + num_layers)
        out: list[ConvertedRange] = []
        cells: _Cells | None = None
        for rank, piece, straight in pieces:
            target = self._targets.get((rank, piece.at_group))
            if target is None:
                continue  # nothing of this group is seen
            if straight and (self._some_layers or layers == piece.layers):
                out.append(_straight(fed, piece, layers, target))
                continue
            if isinstance(fed.payload, DeviceRange):
                raise TransferError("KV in GPU memory is not converted: use another transport for this pair")
            if cells is None:
                cells = _Cells(fed.payload, side, num)
            out += self._put(cells, side, fed, piece, layers, target)
        return out

    def _put(
        self, cells: _Cells, side: _Side, fed: FedRange, piece: Piece, layers: range, target: _Target
    ) -> Iterator[ConvertedRange]:
        """Copy the piece's layers and heads into the target's blocks. Yields: what has become complete."""
        low, high = max(layers.start, piece.layers.start), min(layers.stop, piece.layers.stop)
        at, stop = max(fed.first_token, target.first), fed.first_token + fed.num_tokens
        if low >= high or at >= stop:
            return
        parts = len(target.kv.groups[target.group].dims)
        from_rows = slice((low - layers.start) * parts, (high - layers.start) * parts)
        from_heads = slice(piece.heads.start, piece.heads.stop)
        into = slice(piece.at_layer + low - piece.layers.start, piece.at_layer + high - piece.layers.start)
        rows, heads = (
            slice(into.start * parts, into.stop * parts),
            slice(piece.at_head, piece.at_head + len(piece.heads)),
        )
        size, done = target.side.block_size, list[int]()
        target.begin(at, stop)
        while at < stop:
            index = at // size
            until = min((index + 1) * size, fed.first_token + cells.block_end(at - fed.first_token))
            block, slots = target.blocks[index], slice(at - index * size, until - index * size)
            filled = block.filled[into, slots, heads]
            if filled.any():
                raise TransferError(f"tokens from {at} on came twice")
            filled[...] = True
            some = cells.of(at - fed.first_token, until - fed.first_token)
            block.data[rows, slots, heads] = _recoded(some[from_rows, :, from_heads], side, target.side)
            block.left -= filled.size
            if not block.left:
                done.append(index)
            at = until
        for run in _runs(done):
            yield target.take(run)


def _straight(fed: FedRange, piece: Piece, layers: range, target: _Target) -> ConvertedRange:
    """The fed payload, under the numbers of our rank."""
    return ConvertedRange(
        fed.first_token, fed.num_tokens, fed.payload, target.rank, target.group,
        piece.at_layer + layers.start - piece.layers.start, len(layers), is_straight=True,
    )  # fmt: skip


def _runs(indices: list[int]) -> list[list[int]]:
    """Neighbours together: few large copies instead of many small ones."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] + 1 == index:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs
