"""What others may know of a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.engine.messages import EngineAudit, EngineStats

if TYPE_CHECKING:
    from diptych.engine.sched.scheduler import Scheduler


def stats(scheduler: Scheduler, *, steps: int, steps_ahead: int, busy_since: float | None) -> EngineStats:
    kv, pace = scheduler.kv, scheduler.pace
    counts = kv.pool.counts
    computing = sum(len(r.token_ids) - r.num_computed for r in scheduler.prefilling.values())
    return EngineStats(
        num_running=len(scheduler.decoding) + len(scheduler.prefilling) + len(scheduler.held),
        num_waiting=len(scheduler.waiting),
        num_waiting_remote=len(scheduler.remote),
        kv_usage=(counts.running + counts.reserved) / counts.total,
        steps=steps,
        steps_ahead=steps_ahead,
        not_ahead=tuple(sorted(scheduler.not_ahead.items())),
        busy_since=busy_since,
        prefill_tokens_per_s=pace.prefill_tokens_per_s,
        decode_step_s=pace.decode_step_s,
        waiting_prompt_tokens=scheduler.waiting.num_tokens_to_compute + computing,
        prompt_tokens_total=scheduler.prompt_tokens,
        cached_tokens_total=scheduler.cached_tokens,
        computed_tokens_total=scheduler.computed,
        generation_tokens_total=scheduler.generated,
        preemptions_total=scheduler.preemptions,
        swaps_total=scheduler.swaps,
        refetches_total=scheduler.refetches,
        restored_tokens_total=kv.restored_tokens,
        host_usage=kv.host.usage,
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
