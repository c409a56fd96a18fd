"""KV of one layout into another: block size, order of heads and slots, dtype, and heads from several tensor-parallel ranks.

A payload is what pack wrote: whole blocks of the sender, then the slots that are used of its last one. It is taken apart into
[num_layers * 2, tokens, heads, head_dim] and put together again in blocks of the receiver. Bits change only where the dtype does:
to a wider one exactly, to a narrower one rounded to the nearest, ties to even, as torch does.

Of quantized KV an element of that array is a byte of a head's record (kv_codes.py): codes and their scale stay together. KV is
decoded for a receiver that keeps elements, and quantized for one that keeps codes: once, since two quantized dtypes that differ
are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from diptych.common.errors import TransferError
from diptych.common.kv_format import ORDERS, KvFormat, dtype_bytes
from diptych.kvtransfer.slabs import kv_codes
from diptych.kvtransfer.slabs.kv_codes import SCALE_BYTES
from diptych.kvtransfer.slabs.planner import convertible_group, plan_heads

_WIDE = "float32"


@dataclass(frozen=True, slots=True)
class _Side:
    """One side's sizes, of one rank."""

    layers: int
    heads: int
    dim: int
    block_size: int
    dtype: str
    quantized: bool
    heads_first: bool
    bytes_per_token: int

    @classmethod
    def of(cls, kv: KvFormat) -> _Side:
        """Raises: IncompatibleWorkersError."""
        group = convertible_group(kv)
        return cls(
            group.num_layers, group.heads_per_rank(kv.shard), group.dims[0], group.block_size, group.dtype, group.quantized,
            ORDERS[kv.order] == "HND", kv.bytes_per_token,
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


def unpack_tokens(payload: memoryview, shape: _Side, num_tokens: int) -> np.ndarray:
    """[num_layers * 2, num_tokens, heads of a rank, width] of raw bits. Raises: TransferError."""
    if payload.nbytes != num_tokens * shape.bytes_per_token:
        raise TransferError(
            f"{num_tokens} tokens take {num_tokens * shape.bytes_per_token} bytes, not {payload.nbytes}"
        )
    if shape.quantized:  # a slot is like one head
        slots = replace(shape, heads=1, dim=shape.heads * shape.width, quantized=False)
        return kv_codes.records_of(unpack_tokens(payload, slots, num_tokens)[:, :, 0], shape.heads, shape.dim)
    rows, heads, dim, size = shape.layers * 2, shape.heads, shape.dim, shape.block_size
    flat = np.frombuffer(payload, dtype=shape.raw)
    full, tail = divmod(num_tokens, size)
    border = full * size * rows * heads * dim
    out = np.empty((rows, num_tokens, heads, dim), dtype=flat.dtype)
    if full:
        body = _slots_first(flat[:border], (full, rows), size, shape)
        out[:, : full * size].reshape(rows, full, size, heads, dim)[...] = body.transpose(1, 0, 2, 3, 4)
    if tail:
        out[:, full * size :] = _slots_first(flat[border:], (rows,), tail, shape)
    return out


def _slots_first(flat: np.ndarray, outer: tuple[int, ...], slots: int, shape: _Side) -> np.ndarray:
    """[*outer, slots, heads, head_dim], a view."""
    if shape.heads_first:
        return flat.reshape(*outer, shape.heads, slots, shape.dim).swapaxes(-3, -2)
    return flat.reshape(*outer, slots, shape.heads, shape.dim)


@dataclass(frozen=True, slots=True)
class ConvertedRange:
    """As pack would have written it here: starts at a block and ends at one, or at the end of what is wanted."""

    first_token: int
    num_tokens: int
    payload: memoryview


@dataclass(slots=True)
class _Block:
    """One block of ours while it fills. `left`: tokens times heads that have not come."""

    data: np.ndarray
    left: int
    """[num_layers * 2, tokens, heads, width]"""
    seen: set[tuple[int, int]] = field(default_factory=set)


class RangeConverter:
    """Takes the ranges of one leg in any order and gives out whole blocks of ours as they become complete.

    Args:
        first_token: wanted from here on: a multiple of our block size, or `end`. What comes of earlier tokens is dropped.
        end: one past the last token that is wanted.
        target: ours; its shard says which heads we hold.
    Raises: IncompatibleWorkersError.
    """

    def __init__(self, source: KvFormat, target: KvFormat, first_token: int, end: int) -> None:
        self._source, self._target = _Side.of(source), _Side.of(target)
        self._first, self._end = first_token, end
        self._pieces = plan_heads(source, target)
        self._blocks: dict[int, _Block] = {}

    @property
    def changes_values(self) -> bool:
        """Not only where elements lie, but what they are."""
        return self._source.dtype != self._target.dtype

    @property
    def ranks(self) -> tuple[int, ...]:
        """Source ranks whose payloads are needed."""
        return tuple(sorted({piece.rank for piece in self._pieces}))

    @property
    def num_open(self) -> int:
        return len(self._blocks)

    def feed(self, first_token: int, num_tokens: int, payload: memoryview, *, rank: int = 0) -> list[ConvertedRange]:
        """A verified payload of source rank `rank`; it is not kept. Raises: TransferError: size, bounds, or the same twice."""
        if first_token < 0 or first_token + num_tokens > self._end:
            raise TransferError(f"range [{first_token}, {first_token + num_tokens}) ends behind {self._end}")
        pieces = [piece for piece in self._pieces if piece.rank == rank]
        if not pieces:
            raise TransferError(f"nothing is wanted of rank {rank}")
        tokens = unpack_tokens(payload, self._source, num_tokens)
        skip = max(0, self._first - first_token)
        done: list[int] = []
        size = self._target.block_size
        at = first_token + skip
        while at < first_token + num_tokens:
            index = at // size
            until = min((index + 1) * size, first_token + num_tokens)
            block = self._block(index)
            inside, part = at - index * size, tokens[:, at - first_token : until - first_token]
            if (inside, rank) in block.seen:
                raise TransferError(f"tokens from {at} on came twice")
            block.seen.add((inside, rank))
            for piece in pieces:
                block.data[:, inside : inside + until - at, piece.at : piece.at + piece.count] = _recoded(
                    part[:, :, piece.first : piece.first + piece.count], self._source, self._target
                )
                block.left -= (until - at) * piece.count
            if block.left < 0:
                raise TransferError(f"tokens of block {index} came twice")
            if not block.left:
                done.append(index)
            at = until
        return [self._range(run) for run in _runs(done)]

    def _block(self, index: int) -> _Block:
        block = self._blocks.get(index)
        if block is None:
            shape = self._target
            tokens = min(shape.block_size, self._end - index * shape.block_size)
            data = np.empty((shape.layers * 2, tokens, shape.heads, shape.width), shape.raw)
            block = self._blocks[index] = _Block(data, tokens * shape.heads)
        return block

    def _range(self, indices: list[int]) -> ConvertedRange:
        parts = [self._blocks.pop(index).data for index in indices]
        num_tokens = sum(part.shape[1] for part in parts)
        if self._target.quantized:
            parts = [kv_codes.slots_of(part) for part in parts]
        elif self._target.heads_first:
            parts = [part.swapaxes(1, 2) for part in parts]
        flat = np.concatenate([part.reshape(-1) for part in parts])
        return ConvertedRange(indices[0] * self._target.block_size, num_tokens, memoryview(flat).cast("B"))


def _runs(indices: list[int]) -> list[list[int]]:
    """Neighbours together: few large copies instead of many small ones."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] + 1 == index:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs
