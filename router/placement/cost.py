"""Placement: the (prefill, decode) pair with the least cost in milliseconds. Pure; all pairs at once.

    cost(P, D) = queue(P) + uncached tokens on P / prefill rate(P) + bytes to move / link(P, D) + decode load(D)
    cost(D)    = queue(D) + uncached tokens on D / prefill rate(D) + stall of D's sequences     + decode load(D)

Before a prompt the worker finishes its step and computes at most as many tokens of every other waiting prompt, and of
each other tenant as of this one (common/equal_shares.py), so the queue of a short prompt is short. A hit on P saves
compute, a hit on D saves bytes; a hit in a host tier is charged the copy back. Where D lacks blocks for the prompt, its
load has the time until sequences end. Of a request with an adapter both workers must take it, and loading it costs (see
adapters.py). Local prefill on D is a candidate only when few tokens are uncached there, or when no
prefill worker is usable: an idle cluster still disaggregates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from diptych.router.placement.adapters import adapter_ms, why_not
from diptych.router.placement.pulls import LeavingHolders, PlannedPull, Pulls, plan_pulls
from diptych.router.placement.types import (
    Placement,
    PlacementRequest,
    Rejected,
    Terms,
)
from diptych.router.placement.worker_arrays import Bools, ClusterSnapshot, Floats, Ints

LOCAL_BIAS_MS = 1.0
COLOCATED_SLACK_MS = 1000.0
TIE_FRACTION, TIE_MS = 0.02, 0.5
TOKENS_LEFT = 128
"""That a running sequence is taken to have left: the router knows their limits only."""
MAX_SPARES = 8
"""Most prefill workers of a placement; decode tries them in turn."""

Choice = tuple[int | None, int]
"""(index of the prefill worker, or None for local prefill; index of the decode worker, 0 to D - 1)"""


@dataclass(slots=True, eq=False)
class Costs:
    """Every candidate's cost in milliseconds.

    Args:
        remote: [P, D], infinite where not a candidate.
        local: [D], the same; None: local prefill is never a candidate.
        queue, compute: [P + D].
        sequences, decode_load: [D].
        kv_wait: [D], of the decode load, the wait for KV blocks; None: nowhere.
        adapter: [P + D], see adapters.py; None: the request has none.
        pulls: what each worker would take from another one's cache; `compute` has it; None: nothing.
        colocated: the decode worker that became a candidate by the colocated margin.
    """

    request: PlacementRequest
    snapshot: ClusterSnapshot
    remote: Floats
    local: Floats | None
    queue: Floats
    compute: Floats
    sequences: Floats
    decode_load: Floats
    pulls: Pulls | None = None
    kv_wait: Floats | None = None
    adapter: Floats | None = None
    colocated: bool = False
    least_remote: float = field(init=False)

    def __post_init__(self) -> None:
        self.least_remote = float(np.minimum.reduce(self.remote, axis=None)) if self.remote.size else np.inf

    @property
    def any(self) -> bool:
        """Whether there is a candidate."""
        return self.least_remote < np.inf or self.least_local < np.inf

    @property
    def least_local(self) -> float:
        return float(self.local.min(initial=np.inf)) if self.local is not None else np.inf

    def draw(self, rng: random.Random) -> Choice:
        """The cheapest candidate; near-equal ones are chosen by power of two choices over pending placements."""
        remote, local = self.remote, self.local
        pending = self.snapshot.loads.pending_requests
        num_prefill = self.snapshot.fleet.num_prefill
        least_remote = self.least_remote
        if local is not None and (full := _holds_all(self.request, self.snapshot)) is not None:
            remote = np.where(full, np.inf, remote)
            least_remote = float(remote.min()) if remote.size else np.inf
        least_local = self.least_local
        least = min(least_local, least_remote)
        limit = least + max(TIE_MS, least * TIE_FRACTION)
        if local is not None and least_local <= least_remote:
            (ties,) = (local <= limit).nonzero()
            d = min((int(ties[i]) for i in _two(len(ties), rng)), key=lambda d: (pending[num_prefill + d], local[d]))
            return None, d
        (ties,) = (remote.ravel() <= limit).nonzero()
        first, second = _two(len(ties), rng)
        width = remote.shape[1]
        p, d = divmod(int(ties[first]), width)
        if first != second:
            other_p, other_d = divmod(int(ties[second]), width)
            mine, others = pending[p] + pending[num_prefill + d], pending[other_p] + pending[num_prefill + other_d]
            if (others, remote[other_p, other_d]) < (mine, remote[p, d]):
                return other_p, other_d
        return p, d

    def order(self, d: int) -> Sequence[int]:
        """The prefill workers compatible with decode worker `d`, cheapest first, at most MAX_SPARES."""
        column = self.remote[:, d]
        cheapest = column.argsort(kind="stable")[:MAX_SPARES].tolist()
        all_fit = self.snapshot.fleet.all_fit and self.adapter is None
        return cheapest if all_fit else [i for i in cheapest if np.isfinite(column[i])]

    def terms(self, choice: Choice) -> Terms:
        p, d = choice
        at = self.snapshot.fleet.num_prefill + d
        decode = self.snapshot.view(at)
        load = float(self.decode_load[d])
        if p is None:
            compute = float(self.compute[at])
            stall = compute * float(self.sequences[d]) + LOCAL_BIAS_MS
            adapter_ms = 0.0 if self.adapter is None else float(self.adapter[at])
            queue = float(self.queue[at])
            return Terms(None, decode, queue, compute, 0.0, load, stall, self._pull(at), adapter_ms)
        queue, compute = float(self.queue[p]), float(self.compute[p])
        adapter_ms = 0.0 if self.adapter is None else float(self.adapter[p] + self.adapter[at])
        transfer = float(self.remote[p, d]) - queue - compute - load - adapter_ms
        return Terms(self.snapshot.view(p), decode, queue, compute, transfer, load, 0.0, self._pull(p), adapter_ms)

    def _pull(self, at: int) -> PlannedPull | None:
        return None if self.pulls is None else self.pulls.of(at)

    def best(self, limit: int | None) -> list[Terms]:
        """The cheapest candidates, cheapest first."""
        num_local = 0 if self.local is None else len(self.local)
        flat = self.remote.ravel()
        if self.local is not None:
            flat = np.concatenate((self.local, flat))  # local first: it wins a tie
        choices: list[Choice] = [
            (None, int(i)) if i < num_local else divmod(int(i) - num_local, self.snapshot.fleet.num_decode)
            for i in np.argsort(flat, kind="stable")[:limit]
            if np.isfinite(flat[i])
        ]
        return [self.terms(choice) for choice in choices]


class PlacementPolicy(Protocol):
    """A policy that picks one of the candidates. At least one cost is finite."""

    @property
    def name(self) -> str: ...

    def pick(self, costs: Costs, rng: random.Random) -> Choice: ...


class CheapestPair:
    """The cheapest candidate; near-equal ones are chosen by power of two choices over pending placements."""

    name = "cost"

    def pick(self, costs: Costs, rng: random.Random) -> Choice:
        return costs.draw(rng)


def _two(count: int, rng: random.Random) -> tuple[int, int]:
    """Two different indexes below `count`; the same twice if there is only one."""
    first, second = int(rng.random() * count), int(rng.random() * (count - 1))
    return (first, second + (second >= first)) if count > 1 else (0, 0)


CHEAPEST = CheapestPair()


def choose_placement(
    request: PlacementRequest,
    snapshot: ClusterSnapshot,
    now: float,
    rng: random.Random,
    policy: PlacementPolicy = CHEAPEST,
) -> Placement | Rejected:
    """Compute all candidates' costs and let the policy pick one."""
    costs = candidate_costs(request, snapshot, now)
    if not costs.any:
        return Rejected((*_rejection_reasons(snapshot), *_without_adapter(request, snapshot)))
    p, d = policy.pick(costs, rng)
    notes: tuple[str, ...] = ()
    alone = colocated(costs) if p is not None else None
    if alone is not None:
        p, d = None, alone
        notes = (f"colocated: cheaper than any prefill worker by more than {request.colocated_margin:.0%}",)
    order = costs.order(d)
    if p is not None and order[:1] != [p]:
        order = [p, *(i for i in order if i != p)]
    elif not order and not notes:
        notes = ("no usable prefill worker: local prefill",)
    elif p is None and alone is None:
        notes = (_why_local(costs, d),)
    if costs.kv_wait is not None and costs.kv_wait[d]:
        notes = (*notes, f"decode lacks KV blocks for the prompt: expected to wait {costs.kv_wait[d]:.0f} ms for them")
    chosen = costs.terms((p, d))
    if chosen.pull is not None and chosen.pull.holder >= len(snapshot.fleet.records):
        notes = (*notes, f"KV is taken from {snapshot.record(chosen.pull.holder).worker_id}, which drains")
    return Placement(chosen, costs.snapshot, tuple(order), costs.best, notes, policy.name, alone is not None)


def _why_local(costs: Costs, d: int) -> str:
    """The note of a prompt that decode worker `d` computes though there are prefill workers."""
    request, snapshot = costs.request, costs.snapshot
    assert costs.local is not None
    fresh = request.num_prompt_tokens - costs.terms((None, d)).computed_from
    full = _holds_all(request, snapshot)
    if full is not None and full[d]:
        return (
            f"local prefill: decode holds all but the last {fresh} tokens (at most a block), no prefill worker is asked"
        )
    # A policy other than `cost` compares no costs.
    why = "cheaper" if float(costs.local[d]) <= costs.least_remote else "allowed"
    most = request.local_prefill_max_tokens
    return f"local prefill: {fresh} tokens of at most {most} (local_prefill_max_tokens), {why} on decode"


def colocated(costs: Costs) -> int | None:
    """The decode worker that is cheaper than the cheapest pair by more than the margin, or None.

    It bounds the cost of disaggregation. The costs are unchanged; the worker only becomes a candidate.
    """
    request, snapshot = costs.request, costs.snapshot
    allowed = request.allow_local_fallback and request.local_prefill_max_tokens > 0
    if not allowed or costs.least_remote <= COLOCATED_SLACK_MS or not np.isfinite(request.colocated_margin):
        return None
    first = snapshot.fleet.num_prefill
    local: Floats = (
        costs.queue[first:] + costs.decode_load + costs.compute[first:] * (1.0 + costs.sequences) + LOCAL_BIAS_MS
    )
    if costs.adapter is not None:
        local += costs.adapter[first:]
    local[list(snapshot.barred)] = np.inf
    d = int(local.argmin())
    if costs.least_remote <= (1.0 + request.colocated_margin) * float(local[d]) + COLOCATED_SLACK_MS:
        return None
    costs.colocated = True
    if costs.local is None:
        costs.local = np.full(len(local), np.inf)
    costs.local[d] = local[d]
    return d


def candidate_costs(request: PlacementRequest, snapshot: ClusterSnapshot, now: float) -> Costs:
    fleet, loads = snapshot.fleet, snapshot.loads
    first_decode = fleet.num_prefill
    # Waiting tokens: the reported ones less those computed since, or those placed by routers, whichever is more. (A
    # report younger than a placement includes it.)
    queue = loads.pending_tokens * fleet.token_ms
    np.maximum(queue, fleet.idle_at_ms - 1000.0 * now, out=queue)
    if loads.later_tokens is not None:
        queue -= loads.later_tokens * fleet.token_ms
    hits = loads.hit_tokens
    uncached: Ints | int = request.num_prompt_tokens if hits is None else request.num_prompt_tokens - hits
    compute = uncached * fleet.token_ms
    pulls: Pulls | None = None
    if hits is not None and fleet.pulls is not None:
        # A worker that must not decode this request may hold its KV: an operator moves it, or it is full.
        leaving = None
        if loads.leaving_hits is not None:
            left_ms = fleet.gone_at_ms - 1000.0 * now
            leaving = LeavingHolders(loads.leaving_hits, loads.leaving_lower, fleet.leaving_copy_token_ms, left_ms)
        pulls = plan_pulls(fleet.pulls, fleet.token_ms, hits, loads.lower_tokens, fleet.copy_token_ms, leaving)
        if pulls is not None:
            compute -= pulls.saved_ms
    # A worker computes at most as many tokens of each other prompt before this one as this one has
    # (common/equal_shares.py), after the current step.
    before = np.maximum(loads.pending_requests, fleet.requests) * compute
    before += fleet.prompt_step_ms
    np.minimum(queue, before, out=queue)
    row: Floats = np.maximum(fleet.sequences, loads.pending_requests[first_decode:])
    sequences = row
    decode_load = fleet.step_ms * sequences
    kv_wait = _kv_wait_ms(request, snapshot, sequences)
    if kv_wait is not None:
        decode_load += kv_wait
    row = decode_load
    if loads.lower_tokens is not None:
        copy_back: Floats = np.add.reduce(loads.lower_tokens * fleet.copy_token_ms)
        compute += copy_back
        if request.needs_kv:
            row = row + copy_back[first_decode:]
    to_first_token = queue + compute
    column = to_first_token[:first_decode, None]
    if request.needs_kv:
        moved = uncached if isinstance(uncached, int) else uncached[first_decode:]
        remote: Floats = fleet.move_ms * moved
        for window, move_ms in fleet.window_move_ms:
            remote += move_ms * np.minimum(moved, window - 1)
        remote += column
        remote += row
        remote += fleet.handoff_ms
    else:
        remote = fleet.handoff_ms + column
        remote += row
    adapter: Floats | None = None
    if request.adapter is not None:
        adapter = adapter_ms(fleet.records, request.adapter, snapshot.running)
        remote += adapter[:first_decode, None]
        remote += adapter[first_decode:]
    local = _local_costs(request, snapshot, queue, compute, sequences, decode_load, pulls, adapter)
    if snapshot.barred:
        remote[:, list(snapshot.barred)] = np.inf
        if local is not None:
            local[list(snapshot.barred)] = np.inf
    return Costs(request, snapshot, remote, local, queue, compute, sequences, decode_load, pulls, kv_wait, adapter)


def _kv_wait_ms(request: PlacementRequest, snapshot: ClusterSnapshot, sequences: Floats) -> Floats | None:
    """[D]: how long the request is expected to wait until decode has blocks for its prompt; None: nowhere.

    Blocks get free when sequences end. In use is what was reported, or what this router's requests need, whichever is
    more. Of n sequences one ends every step_ms * TOKENS_LEFT / n, and frees its part.
    """
    fleet, loads, needed = snapshot.fleet, snapshot.loads, request.num_prompt_tokens
    placed = loads.kv_tokens
    if needed <= fleet.least_free and (placed is None or needed + int(placed.max(initial=0)) <= fleet.least_pool):
        return None
    used = fleet.used_tokens if placed is None else np.maximum(fleet.used_tokens, placed)
    lacking: Floats = used + needed - fleet.pool_tokens
    if loads.hit_tokens is not None:
        lacking -= loads.hit_tokens[fleet.num_prefill :]
    if not request.needs_kv or not (lacking > 0).any():
        return None
    parts = np.maximum(1.0 / np.maximum(sequences, 1.0), lacking / np.maximum(used, 1.0))
    wait: Floats = np.where(lacking > 0, fleet.step_ms * TOKENS_LEFT * parts, 0.0)
    return wait


def _local_costs(
    request: PlacementRequest,
    snapshot: ClusterSnapshot,
    queue: Floats,
    compute: Floats,
    sequences: Floats,
    decode_load: Floats,
    pulls: Pulls | None,
    adapter: Floats | None,
) -> Floats | None:
    fleet = snapshot.fleet
    hits = snapshot.loads.hit_tokens if pulls is None else pulls.hit_tokens
    first_decode = fleet.num_prefill
    alone, any_alone = fleet.alone, fleet.any_alone
    if adapter is not None and not np.isfinite(adapter[:first_decode]).all():
        alone = ~np.logical_or.reduce(fleet.fits & np.isfinite(adapter[:first_decode, None]), axis=0)
        any_alone = bool(alone.any())
    fallback = request.allow_local_fallback and any_alone
    least = request.num_prompt_tokens - request.local_prefill_max_tokens
    if not fallback and least > 0 and (hits is None or int(hits[first_decode:].max(initial=0)) < least):
        return None
    may: Bools = np.full(fleet.num_decode, least <= 0) if hits is None else hits[first_decode:] >= least
    if fallback:
        may |= alone
    if not may.any():
        return None
    local: Floats = queue[first_decode:] + decode_load + compute[first_decode:] * (1.0 + sequences) + LOCAL_BIAS_MS
    if adapter is not None:
        local += adapter[first_decode:]
    local[~may] = np.inf
    return local


def _holds_all(request: PlacementRequest, snapshot: ClusterSnapshot) -> Bools | None:
    """[D]: the decode worker holds the whole cacheable prompt and may compute the rest (less than a block). Then no
    prefill worker is needed; rates measured on other lengths say nothing about so few tokens."""
    if snapshot.loads.hit_tokens is None:
        return None
    hits = snapshot.loads.hit_tokens[snapshot.fleet.num_prefill :]
    left = request.num_prompt_tokens - hits
    few: Bools = left <= np.minimum(snapshot.fleet.block_size, request.local_prefill_max_tokens)
    full: Bools = few & (left > 0) & (hits > 0)
    return full if full.any() else None


def _without_adapter(request: PlacementRequest, snapshot: ClusterSnapshot) -> list[str]:
    """Why usable workers cannot serve the request's adapter."""
    need = request.adapter
    if need is None:
        return []
    records = {record.worker_id: record for record in snapshot.fleet.records}
    return [f"{name} {why}" for name, record in sorted(records.items()) if (why := why_not(record, need))]


def _rejection_reasons(snapshot: ClusterSnapshot) -> Sequence[str]:
    reasons = [f"{worker_id}: {why}" for worker_id, why in sorted(snapshot.unusable.items())]
    for (prefill, decode), differences in sorted(snapshot.incompatible.items()):
        if differences:
            reasons.append(f"{prefill} and {decode} are incompatible: {'; '.join(differences)}")
    if snapshot.fleet.num_decode == len(snapshot.barred):
        reasons.insert(0, "no usable decode worker")
    elif not snapshot.fleet.num_prefill:
        reasons.insert(0, "no usable prefill worker")
    return reasons
