"""What others may know of a scheduler."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from diptych.engine.messages import EngineAudit, EngineStats, KvMode
from diptych.engine.sched.request import State

if TYPE_CHECKING:
    from diptych.engine.sched.scheduler import Scheduler


def stats(scheduler: Scheduler, *, steps: int, steps_ahead: int, busy_since: float | None) -> EngineStats:
    kv, pace = scheduler.kv, scheduler.pace
    counts = kv.pool.counts
    load = _load(scheduler)
    return EngineStats(
        num_running=load["num_running"],
        num_waiting=load["num_waiting"],
        num_waiting_remote=load["num_waiting_remote"],
        kv_usage=(counts.running + counts.reserved) / counts.total,
        steps=steps,
        steps_ahead=steps_ahead,
        not_ahead=tuple(sorted(scheduler.not_ahead.items())),
        busy_since=busy_since,
        prefill_tokens_per_s=pace.prefill_tokens_per_s,
        decode_step_s=pace.decode_step_s,
        prompt_step_s=pace.prompt_step_s,
        waiting_prompt_tokens=load["waiting_prompt_tokens"],
        prompt_tokens_total=scheduler.prompt_tokens,
        cached_tokens_total=scheduler.cached_tokens,
        computed_tokens_total=scheduler.computed,
        generation_tokens_total=scheduler.generated,
        preemptions_total=scheduler.preemptions,
        swaps_total=scheduler.swaps,
        refetches_total=scheduler.refetches,
        restored_tokens_total=kv.restored_tokens,
        tier_usage=((kv.host.name, kv.host.usage),),
        block_ages=kv.pool.ages.stats(),
        copy_bytes_per_s=pace.copy_bytes_per_s if kv.host.num_slots else 0.0,
    )


def audit(scheduler: Scheduler, full: bool) -> EngineAudit:
    """Counters; with `full` a walk of every block and request."""
    attempts: dict[str, int] = {}
    for request in scheduler.requests.values():
        attempts[request.state.value] = attempts.get(request.state.value, 0) + 1
    violations = scheduler.check() if full else scheduler.kv.pool.violations()
    return EngineAudit(scheduler.kv.pool.counts, attempts, scheduler.packing.slabs_held, tuple(violations))


def prompt_tokens_left(scheduler: Scheduler) -> int:
    """To be computed here, of prompts that wait (before any cache hit) and of those that have begun."""
    computing = sum(len(request.token_ids) - request.num_computed for request in scheduler.prefilling.values())
    return scheduler.waiting.num_tokens_to_compute + computing


def _load(scheduler: Scheduler) -> dict[str, int]:
    """What routers place by, from the queues; read at every step, so nothing here walks those that wait."""
    return {
        "num_running": len(scheduler.decoding) + len(scheduler.prefilling) + len(scheduler.held),
        "num_waiting": len(scheduler.waiting),
        "num_waiting_remote": len(scheduler.remote),
        "waiting_prompt_tokens": prompt_tokens_left(scheduler),
    }


def load_violations(scheduler: Scheduler) -> list[str]:
    """Full walk: each request is in the one queue of its state, and the load is what the requests themselves add up to."""
    out: list[str] = []
    load: Counter[str] = Counter()
    queues = {
        "waiting": {request.attempt for request in scheduler.waiting},
        "remote": scheduler.remote.keys(),
        "prefilling": scheduler.prefilling.keys(),
        "decoding": scheduler.decoding.keys(),
        "held": scheduler.held.keys(),
    }
    for name, attempts in queues.items():
        if gone := attempts - scheduler.requests.keys():
            out.append(f"queue {name} holds attempts that have ended: {sorted(gone)}")
    for attempt, request in scheduler.requests.items():
        figure, legal = _PLACES[request.state]
        places = [name for name, attempts in queues.items() if attempt in attempts]
        if (len(places) != 1 or places[0] not in legal) if legal else places:
            out.append(f"attempt {attempt} is {request.state.value}, and in the queues {places}")
        load[figure] += 1
        waits = request.state in (State.WAITING, State.PREEMPTED)
        comes_remote = request.mode is KvMode.REMOTE and request.state is State.WAITING
        if (waits and not comes_remote) or attempt in scheduler.prefilling:
            load["waiting_prompt_tokens"] += request.num_tokens - request.num_computed
    for name, value in _load(scheduler).items():
        if value != load[name]:
            out.append(f"load: {name} is {value}, by the requests' account {load[name]}")
    return out


_PLACES: dict[State, tuple[str, tuple[str, ...]]] = {
    State.WAITING: ("num_waiting", ("waiting",)),
    State.PREEMPTED: ("num_waiting", ("waiting",)),
    State.WAITING_FOR_REMOTE_KV: ("num_waiting_remote", ("remote",)),
    State.RUNNING: ("num_running", ("prefilling", "decoding", "held")),
    State.PACKING: ("packing", ()),
}
"""Where a request of each state counts, and the queues that it may be in."""
