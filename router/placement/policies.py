"""Placement policies by name. All use the same candidates and costs as `cost`, so that answers can be explained and
compared. They differ only in their choice. Local prefill is used where it is allowed on the chosen decode worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import numpy as np

from diptych.common.errors import ConfigError
from diptych.router.placement.cost import CheapestPair, Choice, Costs, PlacementPolicy

_RANDOM_SESSION_BYTES = 8


class _ByWorker:
    """Picks a decode worker, then a compatible prefill worker; subclasses only rank workers."""

    name = ""

    def pick(self, costs: Costs, rng: random.Random) -> Choice:
        remote, local = costs.remote, costs.local
        usable = np.isfinite(remote).any(axis=0)
        if local is not None:
            usable |= np.isfinite(local)
        d = self._one(np.flatnonzero(usable).tolist(), "decode", costs, rng)
        if local is not None and np.isfinite(local[d]):
            return None, d
        return self._one(np.flatnonzero(np.isfinite(remote[:, d])).tolist(), "prefill", costs, rng), d

    def _one(self, indexes: Sequence[int], role: str, costs: Costs, rng: random.Random) -> int:
        raise NotImplementedError


class RandomChoice(_ByWorker):
    name = "random"

    def _one(self, indexes: Sequence[int], role: str, costs: Costs, rng: random.Random) -> int:
        return indexes[rng.randrange(len(indexes))]


class RoundRobin(_ByWorker):
    name = "round-robin"

    def __init__(self) -> None:
        self._turn = {"prefill": 0, "decode": 0}

    def _one(self, indexes: Sequence[int], role: str, costs: Costs, rng: random.Random) -> int:
        turn = self._turn[role]
        self._turn[role] = turn + 1
        return indexes[turn % len(indexes)]


def load_of(costs: Costs, role: str, index: int) -> float:
    """Milliseconds of prompts waiting at a prefill worker; sequences of a decode worker."""
    if role == "prefill":
        return float(costs.queue[index])
    return float(costs.decode_load[index])


class LeastLoaded(_ByWorker):
    name = "least-loaded"

    def _one(self, indexes: Sequence[int], role: str, costs: Costs, rng: random.Random) -> int:
        least = min(load_of(costs, role, i) for i in indexes)
        ties = [i for i in indexes if load_of(costs, role, i) <= least]
        return ties[rng.randrange(len(ties))]


class PowerOfTwo(_ByWorker):
    name = "power-of-two"

    def _one(self, indexes: Sequence[int], role: str, costs: Costs, rng: random.Random) -> int:
        drawn = rng.sample(indexes, min(2, len(indexes)))
        return min(drawn, key=lambda i: load_of(costs, role, i))


class SessionAffinity(_ByWorker):
    """Rendezvous hashing: a session stays on its worker while the worker exists; a leaving worker moves only its
    sessions."""

    name = "session-affinity"

    def _one(self, indexes: Sequence[int], role: str, costs: Costs, rng: random.Random) -> int:
        fleet = costs.snapshot.fleet
        first = 0 if role == "prefill" else fleet.num_prefill
        session = costs.request.affinity or rng.randbytes(_RANDOM_SESSION_BYTES)
        return max(indexes, key=lambda i: _weight(session, fleet.records[first + i].worker_id))


def _weight(session: bytes, worker_id: str) -> bytes:
    return blake2b(worker_id.encode(), key=session[:64], digest_size=8).digest()


POLICIES: Mapping[str, Callable[[], PlacementPolicy]] = {
    kind.name: kind for kind in (CheapestPair, RoundRobin, RandomChoice, LeastLoaded, PowerOfTwo, SessionAffinity)
}


def policy_by_name(name: str) -> PlacementPolicy:
    """A policy with its own state. Raises: ConfigError."""
    if name not in POLICIES:
        raise ConfigError("placement_policy", name, f"must be one of {', '.join(POLICIES)}")
    return POLICIES[name]()
