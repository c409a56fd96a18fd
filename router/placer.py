"""From a prompt to a placement: joins the index, the reservations and the usable workers' records. No I/O, no waiting."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from diptych.common.block_identity import IdentityHeader, block_keys
from diptych.common.worker_record import WorkerRecord
from diptych.router.block_table import Keys, as_keys
from diptych.router.fleet import ClusterSnapshot, Fleet, Ints, Loads, Pool
from diptych.router.index import BlockIndex
from diptych.router.placement import Placement, PlacementRequest, Rejected
from diptych.router.policy import CHEAPEST, Picker, choose_placement
from diptych.router.reservations import Reservations

_AFFINITY_BLOCKS = 16

Life = tuple[str, str]
"""(worker id, incarnation)"""


@dataclass(slots=True)
class Prompt:
    """A prompt and, once for each way of naming blocks, the identities of its blocks."""

    token_ids: Sequence[int]
    salt: bytes = b""
    _keys: dict[IdentityHeader, Keys] = field(default_factory=dict)

    def keys(self, header: IdentityHeader) -> Keys:
        """[blocks, 2]"""
        if header not in self._keys:
            self._keys[header] = as_keys(block_keys(header.with_salt(self.salt), self.token_ids))
        return self._keys[header]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable worker. `header`: how it names blocks; None: unknown, so no hit is ever found."""

    record: WorkerRecord
    read_at: float
    header: IdentityHeader | None


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One pool's way into index and reservations. `by_header`: (header, indexes in the pool, columns of the index)."""

    pool: Pool
    reserved: Ints
    by_header: list[tuple[IdentityHeader, Ints, Ints]]


class Placer:
    """Args:
    policy: who is taken among the candidates.
    """

    def __init__(
        self, index: BlockIndex, reservations: Reservations, rng: random.Random, policy: Picker = CHEAPEST
    ) -> None:
        self._index = index
        self._reservations = reservations
        self._rng = rng
        self.policy = policy
        self._fleet = Fleet.of((), ())
        self._sides = [_Side(pool, np.empty(0, np.int64), []) for pool in (self._fleet.prefill, self._fleet.decode)]
        self._lives: dict[Life, int] = {}

    def set_fleet(
        self,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        incompatible: Mapping[tuple[str, str], Sequence[str]],
        unusable: Mapping[str, str],
    ) -> None:
        """Who is there, until the next call. To be called whenever a record, a worker's usability or the index's workers
        changed."""
        one, other = ([(candidate.record, candidate.read_at) for candidate in side] for side in (prefill, decode))
        self._fleet = Fleet.of(one, other, incompatible, unusable)
        names = [candidate.record.worker_id for candidate in (*prefill, *decode)]
        columns = self._reservations.columns(names)
        self._sides = [
            _Side(self._fleet.prefill, columns[: len(prefill)], self._by_header(prefill)),
            _Side(self._fleet.decode, columns[len(prefill) :], self._by_header(decode)),
        ]
        self._lives = {(c.record.worker_id, c.record.incarnation): i for i, c in enumerate(decode)}

    def _by_header(self, candidates: Sequence[Candidate]) -> list[tuple[IdentityHeader, Ints, Ints]]:
        groups: dict[IdentityHeader, list[tuple[int, int]]] = {}
        for i, candidate in enumerate(candidates):
            column = self._index.column(candidate.record.worker_id)
            if candidate.header is not None and column is not None:
                groups.setdefault(candidate.header, []).append((i, column))
        found = []
        for header, members in groups.items():
            at = np.array(members, np.int64)
            found.append((header, at[:, 0], at[:, 1]))
        return found

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    def snapshot(self, prompt: Prompt | None = None, exclude: frozenset[Life] = frozenset()) -> ClusterSnapshot:
        """The usable workers with this prompt's hits. `exclude`: lives that must not be chosen as decode."""
        runs: dict[IdentityHeader, tuple[Ints, Ints]] = {}
        if prompt is not None:
            for header in {header for side in self._sides for header, _, _ in side.by_header}:
                found = self._index.runs(prompt.keys(header))
                runs[header] = (found.blocks, found.host_blocks)
        num_tokens = len(prompt.token_ids) if prompt is not None else 0
        loads = [self._loads(side, runs, num_tokens) for side in self._sides]
        barred = tuple(self._lives[life] for life in exclude if life in self._lives) if exclude else ()
        return ClusterSnapshot(self._fleet, loads[0], loads[1], barred)

    def _loads(self, side: _Side, runs: Mapping[IdentityHeader, tuple[Ints, Ints]], num_tokens: int) -> Loads:
        tokens, requests = self._reservations.at(side.reserved)
        hit = np.zeros(len(side.pool), np.int64)
        host = np.zeros(len(side.pool), np.int64)
        for header, at, columns in side.by_header:
            if header in runs:
                blocks, host_blocks = runs[header]
                size = header.block_size
                # The last prompt token is always computed.
                usable = np.minimum(blocks.take(columns), max(0, num_tokens - 1) // size)
                hit[at] = size * usable
                host[at] = size * np.minimum(host_blocks.take(columns), usable)
        return Loads(hit, host, tokens, requests)

    def place(
        self, request: PlacementRequest, prompt: Prompt, now: float, exclude: frozenset[Life] = frozenset()
    ) -> Placement | Rejected:
        snapshot = self.snapshot(prompt, exclude)
        if not request.affinity and (headers := self._sides[1].by_header):
            keys = prompt.keys(headers[0][0])[:_AFFINITY_BLOCKS]
            request = replace(request, affinity=keys[-1].tobytes() if len(keys) else b"")
        return choose_placement(request, snapshot, now, self._rng, self.policy)
