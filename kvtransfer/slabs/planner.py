"""Which part of one worker's KV goes where in another's whose layout differs. Pure.

A side is a `KvFormat`: how its blocks lie in memory and, with tensor parallelism, which heads each rank holds. With more ranks
than KV heads a head lies on several ranks; any one of them will do as a source.

    rank of the source:   |  0: heads 0 1  |  1: heads 2 3  |          TP 2
    rank of the target:   | 0: 0 | 1: 1 | 2: 2 | 3: 3 |                TP 4: ranks 0 and 1 read from rank 0, 2 and 3 from rank 1
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.common.errors import IncompatibleWorkersError
from diptych.common.kv_format import (
    COMPUTE_DTYPES,
    KV_SCALE_DTYPE,
    ORDERS,
    QUANTIZED_KV,
    KvFormat,
    KvGroup,
    Shard,
)


def convertible_group(kv: KvFormat) -> KvGroup:
    """The one group of a format that can be converted. Raises: IncompatibleWorkersError."""
    if not kv.has_one_full_group:
        raise IncompatibleWorkersError(f"KV of groups {', '.join(g.name for g in kv.groups)} cannot be converted")
    group = kv.only_group
    if group.quantized:
        if group.dtype not in QUANTIZED_KV.values() or group.scale_dtype != KV_SCALE_DTYPE:
            raise IncompatibleWorkersError(f"kv_dtype {group.dtype!r} with such scales cannot be converted")
        if ORDERS[kv.order] != "NHD":
            raise IncompatibleWorkersError(f"kv_layout {kv.order!r} of quantized KV cannot be converted")
    elif group.dtype not in COMPUTE_DTYPES:
        raise IncompatibleWorkersError(f"kv_dtype {group.dtype!r} cannot be converted")
    return group


@dataclass(frozen=True, slots=True)
class HeadPiece:
    """Heads [first, first + count) of what source rank `rank` holds are heads [at, at + count) of the target."""

    rank: int
    first: int
    at: int
    count: int


def plan_heads(source: KvFormat, target: KvFormat) -> tuple[HeadPiece, ...]:
    """From which source ranks the target's rank reads which heads; each of its heads once, in order.

    Raises: IncompatibleWorkersError: the two are of different models, or one of them cannot be converted.
    """
    mine, theirs = convertible_group(target), convertible_group(source)
    for name, a, b in (
        ("num_layers", theirs.num_layers, mine.num_layers),
        ("num_kv_heads", theirs.heads, mine.heads),
        ("head_dim", theirs.dims, mine.dims),
    ):
        if a != b:
            raise IncompatibleWorkersError(f"{name}: {a} and {b}")
    if theirs.quantized and mine.quantized and theirs.dtype != mine.dtype:
        rule = "KV is quantized once, and this would be twice"
        raise IncompatibleWorkersError(f"kv_dtype: {theirs.dtype} and {mine.dtype}: {rule}")
    degree = source.shard.degree
    pieces: list[HeadPiece] = []
    for at, head in enumerate(target.shard.heads(mine.heads)):
        rank = head * degree // mine.heads
        first = head - Shard(rank, degree).heads(mine.heads).start
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
