"""Which part of one worker's KV goes where in another's that lays it out otherwise. Pure.

A side is a `KvShape`: how its blocks lie in memory and, with tensor parallelism, which heads each rank holds. With more ranks
than KV heads a head lies on several ranks; any one of them will do as a source.

    rank of the source:   |  0: heads 0 1  |  1: heads 2 3  |          TP 2
    rank of the target:   | 0: 0 | 1: 1 | 2: 2 | 3: 3 |                TP 4: ranks 0 and 1 read from rank 0, 2 and 3 from rank 1
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.compat import Compat
from diptych.common.errors import IncompatibleWorkersError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
HEAD_LAYOUTS = {"block-major": "NHD", "block-major-hnd": "HND"}
"""Compat.kv_layout -> how a block's slots (N) and heads (H) lie: [num_layers, 2, slots, heads, head_dim], or heads first."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """`num_kv_heads` is the model's. Raises: IncompatibleWorkersError."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str = "float32"
    head_layout: str = "NHD"
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise IncompatibleWorkersError(f"kv_dtype {self.dtype!r} cannot be converted")
        if self.head_layout not in HEAD_LAYOUTS.values():
            raise IncompatibleWorkersError(f"head layout {self.head_layout!r} is unknown")
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.tp_size) < 1:
            raise IncompatibleWorkersError(f"{self} has a size below 1")
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise IncompatibleWorkersError(f"{self.num_kv_heads} KV heads do not spread over {self.tp_size} ranks")

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def bytes_per_token(self) -> int:
        """Of one rank."""
        return self.num_layers * 2 * self.heads_per_rank * self.head_dim * ITEM_BYTES[self.dtype]

    def heads(self, rank: int) -> range:
        if not 0 <= rank < self.tp_size:
            raise ValueError(f"rank {rank} is not in [0, {self.tp_size})")
        first = rank * self.num_kv_heads // self.tp_size
        return range(first, first + self.heads_per_rank)


def shape_of(compat: Compat) -> KvShape:
    """Raises: IncompatibleWorkersError for a layout that cannot be converted."""
    layout = HEAD_LAYOUTS.get(compat.kv_layout)
    if layout is None:
        raise IncompatibleWorkersError(f"kv_layout {compat.kv_layout!r} cannot be converted")
    return KvShape(
        compat.num_layers, compat.num_kv_heads, compat.head_dim, compat.block_size, compat.kv_dtype, layout,
        compat.tensor_parallel_size,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadPiece:
    """Heads [first, first + count) of what source rank `rank` holds are heads [at, at + count) of the target."""

    rank: int
    first: int
    at: int
    count: int


def plan_heads(source: KvShape, target: KvShape, target_rank: int) -> tuple[HeadPiece, ...]:
    """From which source ranks the target rank reads which heads; each of its heads once, in order.

    Raises: IncompatibleWorkersError: the two are of different models.
    """
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        if getattr(source, name) != getattr(target, name):
            raise IncompatibleWorkersError(f"{name}: {getattr(source, name)} and {getattr(target, name)}")
    pieces: list[HeadPiece] = []
    for at, head in enumerate(target.heads(target_rank)):
        rank = head * source.tp_size // source.num_kv_heads
        first = head - source.heads(rank).start
        last = pieces[-1] if pieces else None
        if last is not None and last.rank == rank and last.first + last.count == first:
            pieces[-1] = HeadPiece(rank, last.first, last.at, last.count + 1)
        else:
            pieces.append(HeadPiece(rank, first, at, 1))
    return tuple(pieces)


def first_token_to_ask(cached_tokens: int, source_block_size: int) -> int:
    """Where a transfer must begin so that the source sends whole blocks of its own. Tokens before `cached_tokens` that come
    with it are thrown away."""
    return cached_tokens // source_block_size * source_block_size
