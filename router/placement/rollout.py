"""Canary and shadow: the group of workers for a request. Pure.

    stable   every worker that no pattern matches; all traffic except a canary's share
    canary   a share of the requests goes to these workers only (and back to stable while none of them can serve)
    shadow   a share of the requests is sent there *as well*; those answers are discarded

A worker belongs to one group, by its id; prefill and decode of different groups are never paired. The choice depends
only on the request's id, so every router and every retry makes the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b

from diptych.common.errors import ConfigError

STABLE, CANARY, SHADOW = "stable", "canary", "shadow"
OTHER_GROUP = "it belongs to another group of the roll-out"
_SCALE = 2**32


@dataclass(frozen=True, slots=True)
class Rollout:
    """The roll-out's settings.

    Args:
        canary_workers, shadow_workers: patterns of worker ids, with * and ?.
        canary_share, shadow_share: 0 to 1.
    Raises: ConfigError.
    """

    canary_workers: tuple[str, ...] = ()
    canary_share: float = 0.0
    shadow_workers: tuple[str, ...] = ()
    shadow_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("canary", "shadow"):
            share, workers = getattr(self, f"{name}_share"), getattr(self, f"{name}_workers")
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name}_share", share, "must be between 0 and 1")
            if share and not workers:
                raise ConfigError(f"{name}_share", share, f"needs {name}_workers")

    @property
    def on(self) -> bool:
        return bool(self.canary_workers or self.shadow_workers)

    def group_of(self, worker_id: str) -> str:
        """The group of a worker. Shadow is checked first: a shadow worker must never serve."""
        for group, patterns in ((SHADOW, self.shadow_workers), (CANARY, self.canary_workers)):
            if any(fnmatchcase(worker_id, pattern) for pattern in patterns):
                return group
        return STABLE

    def choose(self, request_id: str) -> str:
        """The group that answers a request."""
        return CANARY if self.canary_share and _draw(request_id, b"canary") < self.canary_share else STABLE

    def is_shadowed(self, request_id: str) -> bool:
        """Whether the request is also sent to the shadow group."""
        return bool(self.shadow_share) and _draw(request_id, b"shadow") < self.shadow_share


class Groups:
    """The usable decode workers by group, as of the last `refresh`."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._incarnations: dict[str, set[tuple[str, str]]] = {}

    def apart(self, prefill_id: str, decode_id: str) -> bool:
        rollout = self._rollout
        return rollout.on and rollout.group_of(prefill_id) != rollout.group_of(decode_id)

    def refresh(self, incarnations: Iterable[tuple[str, str]]) -> None:
        """`incarnations`: (worker id, incarnation) of every usable decode worker."""
        self._incarnations = {}
        if self._rollout.on:
            for incarnation in incarnations:
                self._incarnations.setdefault(self._rollout.group_of(incarnation[0]), set()).add(incarnation)

    def others(self, group: str) -> frozenset[tuple[str, str]]:
        """Incarnations that must not serve this group; prefill workers follow from the pairs. Empty without a roll-out."""
        if not self._incarnations:
            return frozenset()
        return frozenset().union(*(incarnations for name, incarnations in self._incarnations.items() if name != group))


def _draw(request_id: str, domain: bytes) -> float:
    """A number in [0, 1), the same for the same id; independent for the two domains."""
    digest = blake2b(request_id.encode(), digest_size=4, person=domain).digest()
    return int.from_bytes(digest, "big") / _SCALE
