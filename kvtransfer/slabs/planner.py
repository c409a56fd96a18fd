"""Which part of one worker's KV goes where in another's whose layout or ranks differ. Pure.

A side is a tuple of `KvFormat`s, one for each rank: how its blocks lie in memory, and which layers and heads the rank holds
(common/kv_parts.py). What several ranks of the source hold, more ranks than KV heads or a group that is on all of them, is taken
from one of them, and given to every rank of the target that holds it. So each head of each layer crosses once.

    rank of the source:   |  0: heads 0 1  |  1: heads 2 3  |          TP 2
    rank of the target:   | 0: 0 | 1: 1 | 2: 2 | 3: 3 |                TP 4: ranks 0 and 1 take from rank 0, 2 and 3 from rank 1
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from diptych.common.errors import IncompatibleWorkersError
from diptych.common.kv_format import (
    COMPUTE_DTYPES,
    KV_SCALE_DTYPE,
    ORDERS,
    QUANTIZED_KV,
    KvFormat,
    KvGroup,
    KvKind,
)
from diptych.common.kv_parts import degrees


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


def check_convertible(source: KvFormat, target: KvFormat) -> None:
    """Raises: IncompatibleWorkersError where elements or blocks of `source` cannot become those of `target`."""
    theirs, mine = convertible_group(source), convertible_group(target)
    for name, a, b in (("num_kv_heads", theirs.heads, mine.heads), ("head_dim", theirs.dims, mine.dims)):
        if a != b:
            raise IncompatibleWorkersError(f"{name}: {a} and {b}")
    if theirs.quantized and mine.quantized and theirs.dtype != mine.dtype:
        rule = "KV is quantized once, and this would be twice"
        raise IncompatibleWorkersError(f"kv_dtype: {theirs.dtype} and {mine.dtype}: {rule}")


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank of the target takes of one KV group of a rank of the source.

    Args:
        rank, group: of the source, and the index of its KV group.
        layers, heads: of these, counted within the source's group and within its heads.
        at_group, at_layer, at_head: where they begin in the target's rank.
    """

    rank: int
    group: int
    layers: range
    heads: range
    at_group: int
    at_layer: int
    at_head: int


Plan = tuple[tuple[Piece, ...], ...]
"""By rank of the target."""


def _heads(kv: KvFormat, group: KvGroup) -> range:
    """Of the whole model, those that this rank holds."""
    return range(group.heads) if group.replicated else kv.shard.heads(group.heads)


def plan_parts(source: tuple[KvFormat, ...], target: tuple[KvFormat, ...], turn: int = 0) -> Plan:
    """From which source ranks each target rank takes which layers and heads; each of its own once.

    Args:
        turn: of the ranks that hold the same head, number `turn` modulo their number is taken, so that requests can be spread
            over them.
    Raises: IncompatibleWorkersError: the two are of different models.
    """
    return _plan(source, target, turn % max(kv.shard.degree for kv in source))


@lru_cache(256)
def _plan(source: tuple[KvFormat, ...], target: tuple[KvFormat, ...], turn: int) -> Plan:
    places: dict[tuple[str, int], tuple[_Place, ...]] = {}
    for rank, kv in enumerate(source):
        for index, group in enumerate(kv.groups):
            for place, layer in enumerate(group.layers):
                key = group.name, layer
                places[key] = (*places.get(key, ()), (rank, index, place))
    return tuple(tuple(_plan_rank(source, places, kv, turn)) for kv in target)


_Place = tuple[int, int, int]
"""A rank of the source, a KV group of it, and a layer of that."""


def _plan_rank(
    source: tuple[KvFormat, ...], places: Mapping[tuple[str, int], tuple[_Place, ...]], target: KvFormat, turn: int
) -> Iterator[Piece]:
    for at_group, mine in enumerate(target.groups):
        at = 0
        while at < mine.num_layers:
            here = places.get((mine.name, mine.layers[at]))
            if here is None:
                raise IncompatibleWorkersError(
                    f"num_layers: layer {mine.layers[at]} of KV group {mine.name} is in no rank of the source"
                )
            count = 1  # layers that the same ranks hold, one after the other
            while at + count < mine.num_layers and places.get((mine.name, mine.layers[at + count])) == tuple(
                (rank, index, place + count) for rank, index, place in here
            ):
                count += 1
            for rank, index, place, heads, at_head in _head_runs(source, here, target, mine, turn):
                yield Piece(rank, index, range(place, place + count), heads, at_group, at, at_head)
            at += count


def _head_runs(
    source: tuple[KvFormat, ...], here: tuple[_Place, ...], target: KvFormat, mine: KvGroup, turn: int
) -> list[tuple[int, int, int, range, int]]:
    """Of one layer: rank, group and layer of the source, which of its heads, and the first one's number in the target."""
    runs: list[tuple[int, int, int, range, int]] = []
    for rank, index, _ in here:
        theirs = source[rank].groups[index]
        for name, a, b in (("num_kv_heads", theirs.heads, mine.heads), ("head_dim", theirs.dims, mine.dims)):
            if a != b:
                raise IncompatibleWorkersError(f"{name}: {a} and {b}")
    for at_head, head in enumerate(_heads(target, mine)):
        able = [place for place in here if head in _heads(source[place[0]], mine)]
        rank, index, place = able[turn % len(able)]
        first = head - _heads(source[rank], mine).start
        if runs and runs[-1][0] == rank and runs[-1][3].stop == first:
            last = runs[-1]
            runs[-1] = (*last[:3], range(last[3].start, first + 1), last[4])
        else:
            runs.append((rank, index, place, range(first, first + 1), at_head))
    return runs


def wanted_ranks(plan: Plan) -> tuple[int, ...]:
    """Ranks of the source of which anything is taken."""
    return tuple(sorted({piece.rank for pieces in plan for piece in pieces}))


def same_layout(source: KvFormat, target: KvFormat) -> bool:
    """Blocks and elements are the same, whatever layers and heads there are."""
    kinds = [{group.name: _kind(group) for group in kv.groups} for kv in (source, target)]
    return source.order == target.order and all(
        kinds[0][name] == kinds[1][name] for name in kinds[0].keys() & kinds[1].keys()
    )


def _kind(group: KvGroup) -> tuple[object, ...]:
    return group.dtype, group.scale_dtype, group.part_dtypes, group.block_size, group.window


def straight_pieces(plan: Plan, source: Sequence[KvFormat], target: Sequence[KvFormat]) -> tuple[tuple[bool, ...], ...]:
    """Of each piece of the plan, whether the bytes of the source's rank are those of the target's, so that nothing is put
    together anew. Ranges of some layers go straight into one rank only, and only if all of the group do: several ranks take
    whole ranges."""
    return tuple(_straight_of(pieces, source, target[rank], len(target) == 1) for rank, pieces in enumerate(plan))


def _straight_of(
    pieces: Sequence[Piece], source: Sequence[KvFormat], target: KvFormat, some_layers: bool
) -> tuple[bool, ...]:
    same = [_same_bytes(piece, source[piece.rank], target) for piece in pieces]
    return tuple(
        here
        and (
            len(piece.layers) == target.groups[piece.at_group].num_layers
            or (some_layers and all(a for a, b in zip(same, pieces, strict=True) if b.at_group == piece.at_group))
        )
        for here, piece in zip(same, pieces, strict=True)
    )


def _same_bytes(piece: Piece, source: KvFormat, target: KvFormat) -> bool:
    """It is all that the source's rank has of the group, and has all heads of the target's."""
    theirs, mine = source.groups[piece.group], target.groups[piece.at_group]
    return (
        source.order == target.order
        and _kind(theirs) == _kind(mine)
        and piece.layers == range(theirs.num_layers)
        and piece.heads == range(len(_heads(source, theirs)))
        and len(piece.heads) == len(_heads(target, mine))
    )


def is_identity(plan: Plan, source: Sequence[KvFormat], target: Sequence[KvFormat]) -> bool:
    """Each rank takes all of the rank with its number, as it is."""
    return (
        len(source) == len(target)
        and all_straight(plan, source, target)
        and all(piece.rank == rank for rank, pieces in enumerate(plan) for piece in pieces)
    )


def all_straight(plan: Plan, source: Sequence[KvFormat], target: Sequence[KvFormat]) -> bool:
    """Nothing is put together anew."""
    return all(map(all, straight_pieces(plan, source, target)))


def check_parts_fit(source: tuple[KvFormat, ...], target: tuple[KvFormat, ...]) -> Plan:
    """Returns: the plan. Raises: IncompatibleWorkersError, naming what cannot be put together anew."""
    plan = plan_parts(source, target)
    for mine, pieces, straight in zip(target, plan, straight_pieces(plan, source, target), strict=True):
        for piece in itertools.compress(pieces, map(operator.not_, straight)):
            theirs = source[piece.rank]
            if not same_layout(theirs, mine):
                for kv in (*source, *target):
                    convertible_group(kv)
                check_convertible(theirs, mine)
                continue
            group = theirs.groups[piece.group]
            if group.kind is KvKind.RECURRENT or len(set(group.dims)) > 1:
                raise IncompatibleWorkersError(
                    f"kv_parts: KV group {group.name} of {degrees(source)} cannot be cut for {degrees(target)}"
                )
            if group.quantized:
                convertible_group(replace(theirs, groups=(replace(group, kind=KvKind.FULL, window=0),)))
    return plan


def first_token_to_ask(cached_tokens: int, source_block_size: int) -> int:
    """Where a transfer must begin so that the source sends whole blocks of its own. Tokens before `cached_tokens` that come
    with it are thrown away."""
    return cached_tokens // source_block_size * source_block_size
