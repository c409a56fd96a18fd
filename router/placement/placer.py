"""From a prompt to a placement: joins the index, the reservations and the usable workers' records. No I/O, no waiting."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from diptych.common.block_identity import IdentityHeader, block_keys, header_of_request
from diptych.common.request import Prompt
from diptych.common.store.worker_record import WorkerRecord
from diptych.router.fairness.prompt_speeds import PromptSpeeds
from diptych.router.placement.block_table import NUM_TIERS, Keys, as_keys
from diptych.router.placement.cost import CHEAPEST, PlacementPolicy, choose_placement
from diptych.router.placement.index import BlockIndex, IndexMode
from diptych.router.placement.native.library import MAX_COLUMNS, Library, address
from diptych.router.placement.native.lookup import Found, NativeLookup
from diptych.router.placement.policies import policy_by_name
from diptych.router.placement.prefixes_in_flight import PrefixesInFlight
from diptych.router.placement.replication import LEAST_TOKENS, ExcludeHolders, Replication
from diptych.router.placement.reservations import Reservations
from diptych.router.placement.types import Placement, PlacementRequest, Rejected
from diptych.router.placement.worker_arrays import ClusterSnapshot, Floats, Ints, RequestLoads, WorkerArrays

_AFFINITY_BLOCKS = 16
_PREFIX_TOKENS = 512
"""Most tokens that requests must share to count as one hot prefix."""
_ALL = slice(None)

Incarnation = tuple[str, str]
"""(worker id, incarnation)"""


@dataclass(slots=True)
class PromptBlocks:
    """A prompt and the identities of its blocks, cached for each identity header."""

    prompt: Prompt
    _keys: dict[IdentityHeader, Keys] = field(default_factory=dict)

    def keys(self, header: IdentityHeader, library: Library | None = None) -> Keys:
        """[blocks, 2]. `library`: hashes in C."""
        keys = self._keys.get(header)
        if keys is None:
            own = header_of_request(header, self.prompt)
            if library is None:
                keys = as_keys(block_keys(own, self.prompt.token_ids))
            else:
                keys = library.block_keys(own, self.prompt.token_ids)
            self._keys[header] = keys
        return keys

    def know(self, header: IdentityHeader, keys: Keys) -> None:
        """Set identities that are already known."""
        self._keys[header] = keys


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable worker. `header`: how it names blocks; None: unknown, so it never has a hit."""

    record: WorkerRecord
    read_at: float
    header: IdentityHeader | None


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Workers with equal identity headers: their positions in the arrays (None: all) and columns in the index."""

    header: IdentityHeader
    at: Ints | None
    columns: Ints
    lookup: NativeLookup | None


class Placer:
    """Places requests on the usable workers.

    Args:
        policy: picks among the candidates.
        replication: creates copies of hot prefixes, under the policy "cost"; None: copies arise only from long queues.
        library: looks prompts up in C; None: in numpy.
        pulls: workers take blocks from each other's caches where that is cheaper than computing.
    """

    def __init__(
        self,
        index: BlockIndex,
        reservations: Reservations,
        rng: random.Random,
        policy: PlacementPolicy = CHEAPEST,
        replication: Replication | None = None,
        library: Library | None = None,
        *,
        pulls: bool = True,
    ) -> None:
        self._pulls = pulls
        self._replication = replication if policy.name == CHEAPEST.name else None
        self._library = library
        self._found: Ints | None = None
        """[2, workers]: a lookup in C writes hits and host-tier hits here; None: lookups use numpy."""
        self._index = index
        self._reservations = reservations
        self._rng = rng
        self.policy = policy
        self._uses_affinity = policy.name == "session-affinity"
        self._fleet = WorkerArrays.of((), ())
        self._num_holders = 0
        """Workers in `_fleet`, and those that leave."""
        self._speeds: dict[str, float] = {}
        self._reserved = np.empty(0, np.int64)
        self._groups: list[_Group] = []
        self._is_parted = False
        """One lookup does not cover all workers."""
        self._incarnations: dict[Incarnation, int] = {}
        self.speeds = PromptSpeeds()
        self._in_flight = PrefixesInFlight()

    @staticmethod
    def of(
        index: BlockIndex,
        reservations: Reservations,
        rng: random.Random,
        *,
        policy: str = CHEAPEST.name,
        hot_prefix_copies: bool = False,
        kv_pulls: bool = True,
        library: Library | None = None,
    ) -> Placer:
        """A placer by the router's settings; benchmarks use it, too. Raises: ConfigError."""
        replication = Replication() if hot_prefix_copies else None
        return Placer(index, reservations, rng, policy_by_name(policy), replication, library, pulls=kv_pulls)

    def set_workers(
        self,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        incompatible: Mapping[tuple[str, str], Sequence[str]],
        unusable: Mapping[str, str],
        leaving: Sequence[Candidate] = (),
    ) -> None:
        """Set the usable workers, and those that drain, whose KV may be taken. Call it whenever a record, a worker's usability or
        the index's workers change."""
        leaving = [c for c in leaving if c.header is not None and self._index.column(c.record.worker_id) is not None]
        one, other, gone = ([(c.record, c.read_at) for c in side] for side in (prefill, decode, leaving))
        self._fleet = WorkerArrays.of(one, other, incompatible, unusable, pulls=self._pulls, leaving=gone)
        self._speeds = self._fleet.prompt_tokens_per_s()
        self._reservations.backlog.set_rates(self._speeds)
        self.speeds.set_rates(
            self._speeds,
            {r.worker_id: rate for r in self._fleet.records if (rate := r.load.prefill_tokens_per_s) > 0},
        )
        candidates = [*prefill, *decode]
        self._reserved = self._reservations.columns([candidate.record.worker_id for candidate in candidates])
        candidates += leaving
        self._num_holders = len(candidates)
        members: dict[IdentityHeader, list[tuple[int, int]]] = {}
        for i, candidate in enumerate(candidates):
            column = self._index.column(candidate.record.worker_id)
            if candidate.header is not None and column is not None:
                members.setdefault(candidate.header, []).append((i, column))
        self._groups = []
        library = self._library if self._index.num_columns <= MAX_COLUMNS else None
        for header, pairs in members.items():
            at, columns = np.array(pairs, np.int64).T
            lookup = None if library is None else NativeLookup(library, at, columns, header.block_size)
            self._groups.append(_Group(header, None if len(at) == len(candidates) else at, columns, lookup))
        self._is_parted = len(self._groups) > 1 or any(group.at is not None for group in self._groups)
        self._found = None if library is None else np.zeros((NUM_TIERS, len(candidates)), np.int64)
        self._incarnations = {(c.record.worker_id, c.record.incarnation): i for i, c in enumerate(decode)}

    @property
    def num_copies(self) -> int:
        """Copies of hot prefixes created by replication."""
        return self._replication.num_copies if self._replication is not None else 0

    @property
    def fleet(self) -> WorkerArrays:
        return self._fleet

    def has_room(
        self, window_s: float, tenant: str, tokens: int, beside: float = 0.0, *, doubtful: bool = False
    ) -> bool:
        """See capacity_gate.RoomCheck. `doubtful`: count doubtful reservations (see Reservations)."""
        before = self._reservations.backlog.before
        return not self._speeds or any(
            before(worker_id, tenant, tokens, doubtful=doubtful) + beside < window_s * speed
            for worker_id, speed in self._speeds.items()
        )

    def wait_s(self, tenant: str, tokens: int, beside: float = 0.0) -> float:
        """See capacity_gate.WaitEstimate."""
        before = self._reservations.backlog.before
        return min(
            ((before(name, tenant, tokens) + beside + tokens) / speed for name, speed in self._speeds.items()),
            default=0.0,
        )

    # ---- prompts in flight ---------------------------------------------------------------------------------------

    def begin(self, name: str, prompt: PromptBlocks, max_answer: int) -> None:
        """A request waits or is placed; call `end` once it has ended. `name`: of the request."""
        if header := self._header():
            keys = prompt.keys(header, self._library)
            self._in_flight.add(name, keys, header.block_size, len(prompt.prompt.token_ids), max_answer)

    def end(self, name: str, now: float) -> None:
        self._in_flight.end(name, now)

    def certain_tokens(self, prompt: PromptBlocks) -> int:
        """Tokens of a prompt that a worker has to compute in any case: what no worker has cached, no request in flight
        computes, and other routers have not placed. 0 while the cache of some worker is not known. Call it before
        `begin`."""
        header = self._header()
        if header is None or not all(self._index.mode(r.worker_id) is IndexMode.EXACT for r in self._fleet.records):
            return 0
        shared = self._in_flight.shared_tokens(prompt.keys(header, self._library), header.block_size)
        fresh = min(self.uncached_tokens(prompt), len(prompt.prompt.token_ids) - shared)
        return max(0, fresh - self._reservations.others_tokens)

    def _header(self) -> IdentityHeader | None:
        """How all usable workers name blocks; None: there are none, or they differ."""
        return self._groups[0].header if self._groups and not self._is_parted else None

    def name_blocks(self, prompt: PromptBlocks) -> None:
        """Compute the identities for every header of a usable worker."""
        for group in self._groups:
            prompt.keys(group.header, self._library)

    def uncached_tokens(self, prompt: PromptBlocks) -> int:
        """Tokens to compute on the worker with the most cached tokens."""
        hits = self.snapshot(prompt).loads.hit_tokens
        return max(1, len(prompt.prompt.token_ids) - (0 if hits is None else int(hits.max(initial=0))))

    def snapshot(
        self,
        prompt: PromptBlocks | None = None,
        exclude: frozenset[Incarnation] = frozenset(),
        tenant: str | None = None,
    ) -> ClusterSnapshot:
        """The usable workers with this prompt's hits. `exclude`: incarnations that must not be chosen as decode.
        `tenant`: count its share of each worker; None: count all that is pending."""
        barred = (
            tuple(self._incarnations[incarnation] for incarnation in exclude if incarnation in self._incarnations)
            if exclude
            else ()
        )
        tokens, requests = self._reservations.at(self._reserved)
        hit, lower = self._hits(prompt)
        leaving_hit = leaving_lower = None
        if self._fleet.leaving:
            count = len(self._fleet.records)
            if hit is not None:
                hit, leaving_hit = hit[:count], hit[count:]
            if lower is not None:
                lower, leaving_lower = lower[:, :count], lower[:, count:]
        later = None if prompt is None or tenant is None else self._later(prompt, hit, tenant)
        held = self._reservations.kv_at(self._reserved[self._fleet.num_prefill :])
        loads = RequestLoads(hit, lower, tokens, requests, later, held, leaving_hit, leaving_lower)
        return ClusterSnapshot(self._fleet, loads, barred, self._reservations.adapters.running)

    def _later(self, prompt: PromptBlocks, hit: Ints | None, tenant: str) -> Floats | None:
        """See RequestLoads.later_tokens."""
        backlog = self._reservations.backlog
        if not backlog.has_others(tenant):
            return None
        num_tokens = len(prompt.prompt.token_ids)
        uncached = [num_tokens] * len(self._fleet.records) if hit is None else (num_tokens - hit).tolist()
        return np.array(
            [backlog.later(r.worker_id, tenant, n) for r, n in zip(self._fleet.records, uncached, strict=True)],
            np.float64,
        )

    def _hits(self, prompt: PromptBlocks | None) -> tuple[Ints | None, Ints | None]:
        """(hit tokens by holder, those of them by lower tier and holder); None: nowhere."""
        hit: Ints | None = None
        lower: Ints | None = None
        if prompt is None:
            return hit, lower
        if self._found is not None:
            return self._native_hits(self._found, prompt)
        for group in self._groups:
            runs = self._index.runs(prompt.keys(group.header, self._library))
            if not runs.any:
                continue
            block_size = group.header.block_size
            usable = runs.blocks.take(group.columns)
            # The last prompt token is always computed.
            np.minimum(usable, max(0, len(prompt.prompt.token_ids) - 1) // block_size, out=usable)
            if runs.lower_blocks is not None:
                lower = np.zeros((NUM_TIERS - 1, self._num_holders), np.int64) if lower is None else lower
                left = usable
                for row, blocks in zip(lower, runs.lower_blocks, strict=True):
                    there = np.minimum(blocks.take(group.columns), left)
                    left = left - there
                    row[_ALL if group.at is None else group.at] = block_size * there
            usable *= block_size
            if group.at is None:
                hit = usable
            else:
                hit = np.zeros(self._num_holders, np.int64) if hit is None else hit
                hit[group.at] = usable
        return hit, lower

    def _native_hits(self, into: Ints, prompt: PromptBlocks) -> tuple[Ints | None, Ints | None]:
        """`_hits` in C."""
        most = Found.NOTHING
        if self._is_parted:
            into[:] = 0
        at = address(into)
        for group in self._groups:
            assert group.lookup is not None
            # The last prompt token is always computed.
            blocks = max(0, len(prompt.prompt.token_ids) - 1) // group.header.block_size
            keys = prompt.keys(group.header, self._library)
            most = max(most, self._index.hits_into(group.lookup, keys, blocks, at, into.shape[1]))
        if most is Found.NOTHING:
            return None, None
        found = into.copy()  # the next lookup overwrites them
        return found[0], found[1:] if most is Found.HITS_IN_LOWER_TIERS else None

    def without_fields(self, request_fields: frozenset[str]) -> frozenset[Incarnation]:
        """Decode workers that do not announce all of these sampling parameters."""
        return frozenset(
            (record.worker_id, record.incarnation)
            for record in (self._fleet.records[self._fleet.num_prefill :] if request_fields else ())
            if not request_fields.issubset(record.request_fields)
        )

    def place(
        self, request: PlacementRequest, prompt: PromptBlocks, now: float, exclude: frozenset[Incarnation] = frozenset()
    ) -> Placement | Rejected:
        snapshot = self.snapshot(prompt, exclude, request.tenant)
        if self._uses_affinity and not request.affinity and self._groups:
            keys = prompt.keys(self._groups[0].header, self._library)[:_AFFINITY_BLOCKS]
            request = replace(request, affinity=keys[-1].tobytes() if len(keys) else b"")
        placement = choose_placement(request, snapshot, now, self._rng, self.policy)
        if self._replication is not None and snapshot.loads.hit_tokens is not None and isinstance(placement, Placement):
            return self._copied(self._replication, placement, request, prompt, snapshot, now)
        return placement

    def _copied(
        self,
        replication: Replication,
        placement: Placement,
        request: PlacementRequest,
        prompt: PromptBlocks,
        snapshot: ClusterSnapshot,
        now: float,
    ) -> Placement | Rejected:
        """The placement; or, if the prefix is too hot for its holders, one that creates a copy."""
        prefill = placement.chosen.prefill
        if prefill is None or prefill.hit_tokens < LEAST_TOKENS or snapshot.loads.hit_tokens is None:
            return placement
        hits = snapshot.loads.hit_tokens[: self._fleet.num_prefill]
        holders = hits >= min(prefill.hit_tokens, _PREFIX_TOKENS)
        num_holders = int(holders.sum())
        if num_holders in (0, len(holders)):
            return placement
        group = self._groups[0]
        blocks = min(prefill.hit_tokens, _PREFIX_TOKENS) // group.header.block_size
        prefix = prompt.keys(group.header, self._library)[max(0, blocks - 1)].tobytes()
        load = replication.on_placed(prefix, placement.chosen.prefill_ms / 1000.0, num_holders, now)
        if not load:
            return placement
        copy = choose_placement(request, snapshot, now, self._rng, ExcludeHolders(holders))
        if not isinstance(copy, Placement) or copy.chosen.prefill is None or copy.chosen.pull is None:
            return placement  # this request would pay for the others by computing the prefix
        replication.num_copies += 1
        note = f"hot prefix: a copy on {copy.chosen.prefill.worker_id}, its {num_holders} holders are at {load:.0%}"
        copy.notes = (*copy.notes, note)
        return copy
