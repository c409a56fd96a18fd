"""The tiers of KV blocks, nearest to the computation first. They are defined only here.

A block in the first tier is used in place. A block in a later tier is copied to the first before use, at a rate
measured by its worker. Events, sequence numbers, dumps and the router's index have one entry for each tier, in this
order. A tier of another version, which is not in the list, is passed over by readers and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier.

    Args:
        name: in events, leases and metrics.
        eviction: which block leaves a full tier first.
    """

    name: str
    eviction: str = "lru"


TIER_EVICTIONS = ("lru", "value")
"""Of the tiers below the first one: what was used longest ago leaves first, or what has the least predicted value (engine's
eviction.py)."""
TIERS = (TierSpec("device"), TierSpec("host"), TierSpec("disk", "lru, last blocks first"))
TIER_NAMES = tuple(tier.name for tier in TIERS)
DEVICE = TIER_NAMES[0]
HOST = TIER_NAMES[1]
DISK = TIER_NAMES[2]
LOWER_TIERS = TIERS[1:]
"""All but the first: their blocks are copied before use."""


def tier_index(name: str) -> int:
    """Raises: ValueError when there is no such tier."""
    return TIER_NAMES.index(name)


class TierState(msgspec.Struct, frozen=True):
    """A tier of one worker, in its lease.

    Args:
        event_sequence: of its last event in this epoch; a reader that is behind it has missed events.
        num_bytes: its size; 0: the worker has no such tier.
        bytes_per_s: measured rate of copies to the first tier; 0.0: not measured, and its blocks count as computed anew.
    """

    name: str
    event_sequence: int = 0
    num_bytes: int = 0
    bytes_per_s: float = 0.0
    eviction: str = "lru"


def in_order(by_name: Mapping[str, T], missing: T) -> tuple[T, ...]:
    """A value for each tier, in the order of TIERS. `missing`: of tiers that are not in `by_name`. Raises: ValueError for
    a name that is no tier's."""
    for name in by_name:
        tier_index(name)
    return tuple(by_name.get(name, missing) for name in TIER_NAMES)


def tier_states(
    sizes: Mapping[str, int], bytes_per_s: Mapping[str, float], eviction: str = "lru"
) -> tuple[TierState, ...]:
    """The tiers that a worker has, nearest first. By name: their sizes in bytes (0, or missing: it has no such tier), and
    the measured rates of copies to the first tier. `eviction`: one of TIER_EVICTIONS. Raises: ValueError for a name that is no
    tier's."""
    return tuple(
        TierState(
            tier.name,
            num_bytes=size,
            bytes_per_s=rate,
            eviction=tier.eviction if eviction == "lru" or tier.name == DEVICE else eviction,
        )
        for tier, size, rate in zip(TIERS, in_order(sizes, 0), in_order(bytes_per_s, 0.0), strict=True)
        if size
    )


def sequences_of(tiers: Iterable[TierState]) -> tuple[int, ...]:
    """The last event of each tier, in the order of TIERS; 0 for a tier missing in the lease."""
    found = {tier.name: tier.event_sequence for tier in tiers}
    return tuple(found.get(name, 0) for name in TIER_NAMES)


def with_sequences(tiers: Iterable[TierState], sequences: Mapping[str, int]) -> tuple[TierState, ...]:
    """All tiers, each with its sequence number. `tiers`: those with known sizes and rates."""
    known = {tier.name: tier for tier in tiers}
    return tuple(
        msgspec.structs.replace(known.get(name) or TierState(name), event_sequence=sequences.get(name, 0))
        for name in TIER_NAMES
    )


@dataclass(frozen=True, slots=True)
class TierDump:
    """A tier's content after event `sequence`."""

    sequence: int = 0
    keys: tuple[bytes, ...] | list[bytes] = ()
