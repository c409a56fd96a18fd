"""Figures of the scheduler: statistics, the audit, and the check that the load is what the requests add up to."""

from __future__ import annotations

from collections import Counter

from diptych.common.tiers import DEVICE
from diptych.engine.messages import EngineAudit, EngineStats, KvMode
from diptych.engine.sched.lifecycle.lifecycle import Lifecycle
from diptych.engine.sched.requests.request import State
from diptych.engine.stats import TierStats


def stats(live: Lifecycle, *, steps: int, steps_ahead: int, busy_since: float | None) -> EngineStats:
    kv, throughput, totals = live.kv, live.throughput, live.outbox.totals
    load = _load(live)
    return EngineStats(
        num_running=load["num_running"],
        num_waiting=load["num_waiting"],
        num_waiting_remote=load["num_waiting_remote"],
        kv_usage=kv.usage,
        steps=steps,
        steps_ahead=steps_ahead,
        not_ahead=tuple(sorted(live.not_ahead.items())),
        busy_since=busy_since,
        prefill_tokens_per_s=throughput.prefill_tokens_per_s,
        decode_step_s=throughput.decode_step_s,
        prompt_step_s=throughput.prompt_step_s,
        poll_interval_s=throughput.poll_interval_s,
        waiting_prompt_tokens=load["waiting_prompt_tokens"],
        prompt_tokens_total=totals.prompt_tokens,
        cached_tokens_total=totals.cached_tokens,
        computed_tokens_total=totals.computed,
        pulled_tokens_total=totals.pulled,
        generation_tokens_total=totals.generated,
        preemptions_total=totals.preemptions,
        swaps_total=totals.swaps,
        refetches_total=totals.refetches,
        restored_tokens_total=kv.restored_tokens,
        tier_usage=((kv.host.name, kv.host.usage), (kv.disk.name, kv.disk.usage)),
        tiers=_tiers(live),
        block_ages=kv.pool.ages.stats(),
        claims=kv.pool.claims,
        adapters=live.adapters.stats(),
        copy_bytes_per_s=throughput.copy_bytes_per_s if kv.host.num_slots else 0.0,
        disk_bytes_per_s=throughput.disk_bytes_per_s,
    )


def _tiers(live: Lifecycle) -> tuple[TierStats, ...]:
    kv, totals, first = live.kv, live.outbox.totals, live.kv.pool.counts
    block_bytes = live.block_size * live.limits.kv_bytes_per_token
    below = totals.from_tiers
    out = [
        TierStats(
            DEVICE,
            block_bytes * (first.running + first.cached),
            block_bytes * first.total,
            totals.cached_tokens - sum(below.values()),
            kv.pool.ages.num_evicted,
            served_tokens=totals.served.get(DEVICE, 0),
        )
    ]
    for tier, used, size in (
        (kv.host, kv.host.num_slots - kv.host.num_free, kv.host.num_slots),
        (kv.disk, kv.disk.num_held, kv.disk.num_blocks),
    ):
        if size:
            disk = kv.disk if tier is kv.disk else None
            out.append(
                TierStats(
                    tier.name,
                    block_bytes * used,
                    block_bytes * size,
                    below.get(tier.name, 0),
                    tier.num_evicted,
                    disk.num_dropped if disk else 0,
                    tuple(sorted(disk.errors.items())) if disk else (),
                    totals.served.get(tier.name, 0),
                )
            )
    return tuple(out)


def audit(live: Lifecycle, full: bool) -> EngineAudit:
    """Counters; with `full` a walk of every block and request."""
    attempts: dict[str, int] = {}
    for request in live.requests.values():
        attempts[request.state.value] = attempts.get(request.state.value, 0) + 1
    violations = check(live) if full else live.kv.violations()
    more = tuple(pool.counts for pool in live.kv.pools[1:])
    return EngineAudit(live.kv.pool.counts, attempts, live.packing.slabs_held, tuple(violations), more)


def check(live: Lifecycle) -> list[str]:
    """Laws that do not hold: of blocks, and of the load that routers place by."""
    adapters = live.adapters.violations(live.requests.values(), live.running)
    return live.kv.check(live.with_blocks()) + load_violations(live) + adapters


def prompt_tokens_left(live: Lifecycle) -> int:
    """To be computed here, of prompts that wait (before any cache hit) and of those that have begun."""
    return live.waiting.num_tokens_to_compute + live.running.tokens_to_compute


def _load(live: Lifecycle) -> dict[str, int]:
    """What routers place by, from the queues; read at every step, so nothing here walks those that wait."""
    return {
        "num_running": len(live.running),
        "num_waiting": len(live.waiting),
        "num_waiting_remote": len(live.remote),
        "waiting_prompt_tokens": prompt_tokens_left(live),
    }


def load_violations(live: Lifecycle) -> list[str]:
    """Full walk: each request is in the one queue of its state, and the load is what the requests themselves add up
    to."""
    out: list[str] = []
    load: Counter[str] = Counter()
    queues = {
        "waiting": {request.attempt for request in live.waiting},
        "remote": live.remote.requests.keys(),
        "prefilling": live.running.prefilling.keys(),
        "decoding": live.running.decoding.keys(),
        "paused": live.running.paused.keys(),
    }
    for name, attempts in queues.items():
        if gone := attempts - live.requests.keys():
            out.append(f"queue {name} holds attempts that have ended: {sorted(gone)}")
    for attempt, request in live.requests.items():
        figure, legal = _PLACES[request.state]
        places = [name for name, attempts in queues.items() if attempt in attempts]
        if (len(places) != 1 or places[0] not in legal) if legal else places:
            out.append(f"attempt {attempt} is {request.state.value}, and in the queues {places}")
        load[figure] += 1
        waits = request.state in (State.WAITING, State.PREEMPTED)
        comes_remote = request.mode is KvMode.REMOTE and request.state is State.WAITING
        if (waits and not comes_remote) or attempt in live.running.prefilling:
            load["waiting_prompt_tokens"] += request.num_tokens - request.num_computed
    for name, value in _load(live).items():
        if value != load[name]:
            out.append(f"load: {name} is {value}, by the requests' account {load[name]}")
    return out


_PLACES: dict[State, tuple[str, tuple[str, ...]]] = {
    State.WAITING: ("num_waiting", ("waiting",)),
    State.PREEMPTED: ("num_waiting", ("waiting",)),
    State.WAITING_FOR_REMOTE_KV: ("num_waiting_remote", ("remote",)),
    State.RUNNING: ("num_running", ("prefilling", "decoding", "paused")),
    State.PACKING: ("packing", ()),
}
"""Where a request of each state counts, and the queues that it may be in."""
