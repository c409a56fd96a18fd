"""The next step, planned while the last one is on the device: the place of its input tokens is known, the tokens are
not.

    step n      |== on the device =====|
    step n + 1            plan, launch |== on the device =====|
    host                               | ids of n, apply      | ids of n + 1, apply

Such a plan holds decoding sequences only. A sequence that draws its token in step n takes part with that token's place:
the device reads the id there. The host sees a stop one step late: step n + 1 then computes the sequence once more, its
token there is dropped, and its blocks are not freed until that step has landed (`Lifecycle.free_landed`). A plan ahead
preempts nothing and computes no prompt. Where one of these is due, there is no plan: the step is planned once the last
one has landed. `Lifecycle.not_ahead` counts the reasons.

A draw under a grammar, a penalty or another constraint needs the last token on the host; computing the step does not.
So the step is launched, and its draws are sent once the last one's tokens are known, while it runs
(`StepInFlight.draw`)."""

from __future__ import annotations

from diptych.engine.sched.lifecycle import Lifecycle
from diptych.engine.sched.scheduler import Scheduler
from diptych.engine.sched.step import SchedulerOutput
from diptych.engine.step_messages import UNKNOWN_TOKEN, ScheduledSeq


def host_reason(seq: ScheduledSeq) -> str:
    """Why the host must know what a sequence draws before its next step can be planned; empty: it need not."""
    if seq.num_candidates:
        return "beam search"
    if seq.num_drafts:
        return "drafts"
    return "choices" if seq.num_draws != 1 else ""


def can_run_ahead(live: Lifecycle, out: SchedulerOutput) -> bool:
    """Can the step be launched, and another one behind it, before its tokens are read?"""
    if out.num_decode < len(out.seqs):
        live.not_ahead["prompt"] += 1
        return False
    for seq in out.seqs:
        reason = host_reason(seq)
        if reason:
            live.not_ahead[reason] += 1
            return False
    return True


def plan(scheduler: Scheduler, now: float) -> SchedulerOutput | None:
    """The step behind the one on the device; None where it cannot be planned yet. `sources` of the plan name the
    sequences of the step before. Remote requests are admitted as in any step: they compute nothing."""
    scheduler.kv.set_time(now)
    out = SchedulerOutput()
    reason = _obstacle(scheduler, out) or _fill(scheduler, out)
    if reason:
        scheduler.live.not_ahead[reason] += 1
        return None
    return out if out.seqs else None


def _obstacle(scheduler: Scheduler, out: SchedulerOutput) -> str:
    running = scheduler.running
    if scheduler.has_drafts():
        return "drafts"
    if running.prefilling:
        return "prompt"
    if running.paused or scheduler.live.free_slots() < 0:
        return "choices"
    if len(running.decoding) > scheduler.config.max_num_batched_tokens:
        return "token budget"
    if len(scheduler.waiting):
        scheduler.admit(out, 0)  # remote ones: they compute nothing
        if scheduler.policy.preempts or scheduler.passing.any_fits():
            return "admission"
    return ""


def _fill(scheduler: Scheduler, out: SchedulerOutput) -> str:
    size, kv = scheduler.config.block_size, scheduler.kv
    for request in scheduler.running.decoding.values():
        seq = request.seq
        reason = host_reason(seq)
        if reason:
            return reason
        tokens, row = request.token_ids, request.device_row
        assert request.output is not None
        if row < 0:
            at, token = len(tokens) - 1, tokens[-1]
        elif request.output.num_outputs + 1 >= request.output.max_outputs:
            continue  # its last token is on its way
        else:
            at, token = len(tokens), UNKNOWN_TOKEN
        if request.shares_tail:
            return "choices"
        if request.block_end * size <= at and not kv.grow(request):
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
            request.device_row = -1
    for row, request in enumerate(out.requests):
        request.steps_on_device += 1
        request.device_row = row


def ended(out: SchedulerOutput) -> set[int]:
    """Of a step on the device, the sequences that have ended since it was launched."""
    return {i for i, request in enumerate(out.requests) if request.ended}


def landed(live: Lifecycle, out: SchedulerOutput, behind: SchedulerOutput | None) -> None:
    """`out` has left the device and was applied; `behind`: the step that is on the device now."""
    for request in out.requests:
        request.steps_on_device -= 1
        if behind is None:
            request.device_row = -1
    live.free_landed()
