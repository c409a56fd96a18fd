"""The next step, planned while the last one is on the device: where its tokens go is known, which they are is not.

    step n      |== on the device =====|
    step n + 1            plan, launch |== on the device =====|
    host                               | ids of n, update     | ids of n + 1, update

Such a plan holds decoding sequences only. One that draws its token in step n takes part with that token's place: the device
puts the id in. A stop is seen one step late: the sequence is then in step n + 1 for nothing, its token there is dropped, and
its blocks stay its own until that step has landed (`Scheduler.lingering`). A plan ahead preempts nobody and computes no prompt;
where something of the kind is due, there is none: the step is planned once the last one has landed, as if there were no device.
Why is counted in `Scheduler.not_ahead`.

A draw under a grammar, a penalty or another constraint needs the host to have seen the last token; computing the step does not.
So the step is launched, and its draws are sent once the last one's tokens are in, while it runs (`StepInFlight.draw`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.engine.sched.step import SchedulerOutput
from diptych.engine.step_messages import UNKNOWN_TOKEN, ScheduledSeq

if TYPE_CHECKING:
    from diptych.engine.sched.scheduler import Scheduler

__all__ = ["UNKNOWN_TOKEN", "ended", "host_reason", "landed", "launched", "can_run_ahead", "plan"]


def host_reason(seq: ScheduledSeq) -> str:
    """Why the host must have seen what a sequence draws before its next step can be planned; empty: it need not."""
    if seq.num_candidates:
        return "beam search"
    return "choices" if seq.num_draws != 1 else ""


def can_run_ahead(scheduler: Scheduler, out: SchedulerOutput) -> bool:
    """Can the step be launched, and another one behind it, before its tokens are read?"""
    if out.num_decode < len(out.seqs):
        scheduler.not_ahead["prompt"] += 1
        return False
    for seq in out.seqs:
        reason = host_reason(seq)
        if reason:
            scheduler.not_ahead[reason] += 1
            return False
    return True


def plan(scheduler: Scheduler, now: float) -> SchedulerOutput | None:
    """The step behind the one on the device; None when there is none to be had. `sources` of the plan name the sequences of the
    step before. Remote requests are admitted as in any step: they compute nothing."""
    scheduler.kv.pool.ages.now = now
    out = SchedulerOutput()
    reason = _obstacle(scheduler, out) or _fill(scheduler, out)
    if reason:
        scheduler.not_ahead[reason] += 1
        return None
    return out if out.seqs else None


def _obstacle(scheduler: Scheduler, out: SchedulerOutput) -> str:
    if scheduler.prefilling:
        return "prompt"
    if scheduler.held or scheduler.free_slots() < 0:
        return "choices"
    if len(scheduler.decoding) > scheduler.config.max_num_batched_tokens:
        return "token budget"
    if len(scheduler.waiting):
        scheduler.admit(out, 0)  # remote ones: they compute nothing
        if scheduler.policy.preempts or scheduler.passing.any_fits(scheduler):
            return "admission"
    return ""


def _fill(scheduler: Scheduler, out: SchedulerOutput) -> str:
    size, kv = scheduler.config.block_size, scheduler.kv
    for request in scheduler.decoding.values():
        seq = request.seq
        reason = host_reason(seq)
        if reason:
            return reason
        tokens, row = request.token_ids, request.flight_row
        assert request.output is not None
        if row < 0:
            at, token = len(tokens) - 1, tokens[-1]
        elif request.output.num_outputs + 1 >= request.output.max_outputs:
            continue  # its last token is on its way
        else:
            at, token = len(tokens), UNKNOWN_TOKEN
        if request.shares_tail:
            return "choices"
        if len(request.block_ids) * size <= at and not kv.grow(request):
            return "no free block"
        seq.token_ids = [token]
        seq.start = at
        seq.sample = True
        seq.output_index = at + 1 - request.num_prompt
        out.seqs.append(seq)
        out.requests.append(request)
        out.sources.append(row)
    out.num_decode = len(out.seqs)
    return ""


def launched(out: SchedulerOutput, before: SchedulerOutput | None) -> None:
    """`out` is on the device, behind `before`."""
    if before is not None:
        for request in before.requests:
            request.flight_row = -1
    for row, request in enumerate(out.requests):
        request.flights += 1
        request.flight_row = row


def ended(scheduler: Scheduler, out: SchedulerOutput) -> set[int]:
    """Of a step on the device, the sequences that have ended since it was launched."""
    live = scheduler.requests
    return {i for i, request in enumerate(out.requests) if live.get(request.attempt) is not request}


def landed(scheduler: Scheduler, out: SchedulerOutput, behind: SchedulerOutput | None) -> None:
    """`out` has left the device, and is accounted for; `behind`: the step that is on it now."""
    for request in out.requests:
        request.flights -= 1
        if behind is None:
            request.flight_row = -1
    if scheduler.deferred_free:
        staying = []
        for request in scheduler.deferred_free:
            if request.flights:
                staying.append(request)
            else:
                scheduler.kv.free(request)
        scheduler.deferred_free = staying
