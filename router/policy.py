"""Where a request runs: the (prefill, decode) pair with the least cost in milliseconds. Pure; all pairs at once.

    cost(P, D) = queue(P) + uncached tokens on P / prefill rate(P) + bytes to move / link(P, D) + decode load(D)
    cost(D)    = queue(D) + uncached tokens on D / prefill rate(D) + stall of D's sequences     + decode load(D)

P's hit saves compute, D's hit saves bytes; a hit in a host tier is charged the copy back. Local prefill on D is a candidate
only when few tokens are uncached there, or when no prefill worker is usable: an idle cluster still disaggregates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from diptych.router.fleet import Bools, ClusterSnapshot, Floats, Loads, Pool
from diptych.router.placement import (
    Placement,
    PlacementRequest,
    Rejected,
    Terms,
    WorkerView,
    usable_hit_tokens,
)

__all__ = [
    "ClusterSnapshot",
    "Placement",
    "PlacementRequest",
    "Rejected",
    "Terms",
    "WorkerView",
    "choose_placement",
    "usable_hit_tokens",
]

HANDOFF_MS = 5.0
"""Fixed price of a hand-off: a call to prefill, the announcements, the acknowledgements."""
LOCAL_BIAS_MS = 1.0
_TIE_FRACTION, _TIE_MS = 0.02, 0.5
_MAX_SPARES = 8

Choice = tuple[int | None, int]
"""(index of the prefill worker, or None for local prefill; index of the decode worker)"""


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Every candidate's charge in milliseconds: `remote` [P, D] and `local` [D], infinite where not a candidate."""

    request: PlacementRequest
    snapshot: ClusterSnapshot
    remote: Floats
    local: Floats
    prefill_queue: Floats
    prefill_compute: Floats
    transfer: Floats
    decode_load: Floats
    decode_queue: Floats
    decode_compute: Floats

    def terms(self, choice: Choice) -> Terms:
        p, d = choice
        decode = self.snapshot.decode_view(d)
        load = float(self.decode_load[d])
        if p is None:
            compute = float(self.decode_compute[d])
            stall = compute * _sequences(self.snapshot.fleet.decode, self.snapshot.decode_loads, d) + LOCAL_BIAS_MS
            return Terms(None, decode, float(self.decode_queue[d]), compute, 0.0, load, stall)
        return Terms(
            self.snapshot.prefill_view(p),
            decode,
            queue_ms=float(self.prefill_queue[p]),
            prefill_ms=float(self.prefill_compute[p]),
            transfer_ms=float(self.transfer[p, d]),
            decode_load_ms=load,
            stall_ms=0.0,
        )

    def best(self, limit: int | None) -> list[Terms]:
        """The cheapest candidates, cheapest first."""
        flat = np.concatenate((self.local, self.remote.ravel()))  # local first: it wins a tie
        num_decode = len(self.local)
        order = np.argsort(flat, kind="stable")[:limit]
        choices: list[Choice] = [
            (None, int(i)) if i < num_decode else divmod(int(i) - num_decode, num_decode)
            for i in order
            if np.isfinite(flat[i])
        ]
        return [self.terms(choice) for choice in choices]


class Picker(Protocol):
    """A policy: which of the candidates is taken. At least one cost is finite."""

    name: str

    def pick(self, costs: Costs, rng: random.Random) -> Choice: ...


class CheapestPair:
    """The cheapest candidate; near-equal ones are drawn by power of two choices over pending placements."""

    name = "cost"

    def pick(self, costs: Costs, rng: random.Random) -> Choice:
        remote = costs.remote
        full = _holds_all(costs.request, costs.snapshot)
        if full.any():
            remote = np.where(full, np.inf, remote)
        best_local = float(costs.local.min())
        best_remote = float(remote.min()) if remote.size else np.inf
        best = min(best_local, best_remote)
        limit = best + max(_TIE_MS, best * _TIE_FRACTION)
        decode_pending = costs.snapshot.decode_loads.pending_requests
        if best_local <= best_remote:
            ties = np.flatnonzero(costs.local <= limit)
            first, second = _two(len(ties), rng)
            d = min((int(ties[first]), int(ties[second])), key=lambda d: (decode_pending[d], costs.local[d]))
            return None, d
        flat = remote.ravel()
        ties = np.flatnonzero(flat <= limit)
        first, second = _two(len(ties), rng)
        pairs = [divmod(int(ties[i]), remote.shape[1]) for i in (first, second)]
        prefill_pending = costs.snapshot.prefill_loads.pending_requests
        return min(pairs, key=lambda pair: (prefill_pending[pair[0]] + decode_pending[pair[1]], remote[pair]))


def _two(count: int, rng: random.Random) -> tuple[int, int]:
    """Two different indexes below `count`; the same twice when there is only one."""
    if count == 1:
        return 0, 0
    first = rng.randrange(count)
    second = rng.randrange(count - 1)
    return first, second + (second >= first)


CHEAPEST = CheapestPair()


def choose_placement(
    request: PlacementRequest,
    snapshot: ClusterSnapshot,
    now: float,
    rng: random.Random,
    policy: Picker = CHEAPEST,
) -> Placement | Rejected:
    """Charge every candidate and let the policy take one."""
    costs = candidate_costs(request, snapshot, now)
    if not (np.isfinite(costs.local).any() or np.isfinite(costs.remote).any()):
        return Rejected(tuple(_why_nobody(snapshot)))
    p, d = policy.pick(costs, rng)
    column = costs.remote[:, d]
    order = [int(i) for i in np.argsort(column, kind="stable")[: _MAX_SPARES + 1] if np.isfinite(column[i])]
    notes = []
    if p is not None:
        order = [p, *(i for i in order if i != p)]
    elif not order:
        notes.append("no usable prefill worker: local prefill")
    spares = tuple(snapshot.prefill_view(i) for i in order[: _MAX_SPARES + 1])
    return Placement(costs.terms((p, d)), spares, costs.best, tuple(notes), policy.name)


def candidate_costs(request: PlacementRequest, snapshot: ClusterSnapshot, now: float) -> Costs:
    fleet = snapshot.fleet
    prefill, decode = fleet.prefill, fleet.decode
    on_p, on_d = snapshot.prefill_loads, snapshot.decode_loads
    num_tokens = request.num_prompt_tokens
    prefill_queue = _queue_ms(prefill, on_p, now)
    prefill_compute = (num_tokens - on_p.hit_tokens) * prefill.token_ms + on_p.host_tokens * prefill.host_token_ms
    uncached_on_d = num_tokens - on_d.hit_tokens
    if request.wants_kv:
        transfer = fleet.move_ms * uncached_on_d
        transfer += HANDOFF_MS + on_d.host_tokens * decode.host_token_ms
    else:
        transfer = np.full(fleet.move_ms.shape, HANDOFF_MS)
    sequences = np.maximum(decode.sequences, on_d.pending_requests)
    decode_load = decode.step_ms * sequences
    remote = transfer + (prefill_queue + prefill_compute)[:, None]
    remote += decode_load
    remote[~fleet.fits] = np.inf
    decode_queue = _queue_ms(decode, on_d, now)
    decode_compute = uncached_on_d * decode.token_ms + on_d.host_tokens * decode.host_token_ms
    local = decode_queue + decode_load + decode_compute * (1.0 + sequences) + LOCAL_BIAS_MS
    may = uncached_on_d <= request.local_prefill_max_tokens
    if request.allow_local_fallback:
        may |= ~fleet.fits.any(axis=0)
    local[~may] = np.inf
    if snapshot.barred:
        barred = list(snapshot.barred)
        remote[:, barred] = np.inf
        local[barred] = np.inf
    return Costs(
        request,
        snapshot,
        remote,
        local,
        prefill_queue,
        prefill_compute,
        transfer,
        decode_load,
        decode_queue,
        decode_compute,
    )


def _queue_ms(pool: Pool, loads: Loads, now: float) -> Floats:
    """What waits there: reported, less what was computed since, or placed by us, whichever is more (the report includes
    our own placements as soon as it is younger than they are)."""
    reported = pool.waiting_tokens * pool.token_ms - 1000.0 * np.maximum(now - pool.reported_at, 0.0)
    queue: Floats = np.maximum(reported, loads.pending_tokens * pool.token_ms)
    return np.maximum(queue, 0.0)


def _sequences(decode: Pool, loads: Loads, d: int) -> float:
    return max(float(decode.sequences[d]), float(loads.pending_requests[d]))


def _holds_all(request: PlacementRequest, snapshot: ClusterSnapshot) -> Bools:
    """[D]: all of the prompt that a cache can hold lies on this decode worker, which may compute the rest (less than a
    block): no prefill worker is needed, whatever the two rates, measured on other lengths, say about so few tokens."""
    hits = snapshot.decode_loads.hit_tokens
    left = request.num_prompt_tokens - hits
    few: Bools = left <= np.minimum(snapshot.fleet.decode.block_size, request.local_prefill_max_tokens)
    return few & (left > 0) & (hits > 0)


def _why_nobody(snapshot: ClusterSnapshot) -> Sequence[str]:
    reasons = [f"{worker_id}: {why}" for worker_id, why in sorted(snapshot.unusable.items())]
    for (prefill, decode), differences in sorted(snapshot.incompatible.items()):
        if differences:
            reasons.append(f"{prefill} and {decode} do not fit: {'; '.join(differences)}")
    if len(snapshot.fleet.decode) == len(snapshot.barred):
        reasons.insert(0, "no usable decode worker")
    elif not len(snapshot.fleet.prefill):
        reasons.insert(0, "no usable prefill worker")
    return reasons
