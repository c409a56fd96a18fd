"""The next step, planned while the last one is on the device: the place of its input tokens is known, the tokens are
not.

    step n      |== on the device =====|
    step n + 1            plan, launch |== on the device =====|
    host                               | ids of n, apply      | ids of n + 1, apply

A sequence that draws its token in step n takes part with that token's place: the device reads the id there. That holds
for a prompt that step n ends, too. Of a longer prompt the next chunk is planned; where it begins does not depend on what
is drawn. The host sees a stop one step late: step n + 1 then computes the sequence once more, its token there is dropped,
and its blocks are not freed until that step has landed (`Lifecycle.free_landed`). A plan ahead preempts nothing. Where
that is due, or a prompt that is more than a chunk to compute (`prompt_reason`), there is no plan: the step is planned once
the last one has landed. `Lifecycle.not_ahead` counts the reasons.

A draw under a grammar, a penalty or another constraint needs the last token on the host; computing the step does not.
So the step is launched, and its draws are sent once the last one's tokens are known, while it runs
(`StepInFlight.draw`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from diptych.engine.messages import KvMode
from diptych.engine.sched.batching.step import SchedulerOutput
from diptych.engine.sched.lifecycle.lifecycle import Lifecycle
from diptych.engine.sched.requests.request import Request, State
from diptych.engine.sched.scheduler import Scheduler
from diptych.engine.step_messages import UNKNOWN_TOKEN, ScheduledSeq


def host_reason(seq: ScheduledSeq) -> str:
    """Why the host must know what a sequence draws before its next step can be planned; empty: it need not."""
    if seq.num_candidates:
        return "beam search"
    if seq.num_drafts:
        return "drafts"
    return "choices" if seq.num_draws != 1 else ""


def prompt_reason(scheduler: Scheduler, request: Request) -> str:
    """Why a step with a chunk of the request must be planned and read by itself; empty: it need not."""
    if request.mode is KvMode.PREFILL or request.prompt_logprobs_from is not None or scheduler.kv.slides:
        return "prompt"
    return host_reason(request.seq)


def can_run_ahead(scheduler: Scheduler, out: SchedulerOutput) -> bool:
    """Can the step be launched, and another one behind it, before its tokens are read?"""
    for i, (seq, request) in enumerate(zip(out.seqs, out.requests, strict=True)):
        reason = host_reason(seq) if i < out.num_decode else prompt_reason(scheduler, request)
        if reason:
            scheduler.live.not_ahead[reason] += 1
            return False
    return True


def plan(scheduler: Scheduler, now: float) -> SchedulerOutput | None:
    """The step behind the one on the device; None where it cannot be planned yet. `sources` of the plan name the
    sequences of the step before."""
    scheduler.kv.set_time(now)
    scheduler.begin_adapters()
    out = SchedulerOutput()
    reason = _obstacle(scheduler) or _fill(scheduler, out) or _add_prompts(scheduler, out)
    if reason:
        scheduler.live.not_ahead[reason] += 1
        return None
    return out if out.seqs else None


def _obstacle(scheduler: Scheduler) -> str:
    running = scheduler.running
    if scheduler.has_drafts():
        return "drafts"
    for request in running.prefilling.values():
        if reason := prompt_reason(scheduler, request):
            return reason
    if running.paused or scheduler.live.free_slots() < 0:
        return "choices"
    if len(running) > scheduler.config.max_num_batched_tokens:
        return "token budget"
    return ""


def _add_prompts(scheduler: Scheduler, out: SchedulerOutput) -> str:
    """Chunks of prompts, and admissions. REMOTE requests compute nothing."""
    waiting, passing = scheduler.waiting, scheduler.passing
    plain = not scheduler.policy.preempts and not passing.is_busy
    if plain and not (
        scheduler.live.free_slots() and any(_waits_for_itself(scheduler, request) for request in waiting)
    ):
        if len(waiting) or scheduler.running.prefilling:
            scheduler.add_prompts(out)
        out.sources += [-1] * (len(out.seqs) - out.num_decode)
        return ""
    if any(request.num_left for request in scheduler.running.prefilling.values()):
        return "prompt"
    scheduler.admit(out, 0)
    return "admission" if scheduler.policy.preempts or passing.any_fits() else ""


def _waits_for_itself(scheduler: Scheduler, request: Request) -> bool:
    """It may be admitted to a step only that is planned and read by itself."""
    remote = request.mode is KvMode.REMOTE and request.state is State.WAITING
    return not remote and not scheduler.adapters.is_stuck(request) and bool(prompt_reason(scheduler, request))


def _fill(scheduler: Scheduler, out: SchedulerOutput) -> str:
    size, kv = scheduler.config.block_size, scheduler.kv
    ends = (request for request in scheduler.running.prefilling.values() if not request.num_left)
    for request in chain(scheduler.running.decoding.values(), ends):
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
        if request.tokens_on_device:
            request.seq = seq = replace(seq)  # the numbers of its chunk are still wanted
            seq.prompt_targets = ()
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
        if row >= out.num_decode:
            request.tokens_on_device += len(out.seqs[row].token_ids)


def ended(out: SchedulerOutput) -> set[int]:
    """Of a step on the device, the sequences that have ended since it was launched."""
    return {i for i, request in enumerate(out.requests) if request.ended}


def landed(live: Lifecycle, out: SchedulerOutput, behind: SchedulerOutput | None) -> None:
    """`out` has left the device and was applied; `behind`: the step that is on the device now."""
    for row, request in enumerate(out.requests):
        request.steps_on_device -= 1
        if row >= out.num_decode:
            request.tokens_on_device -= len(out.seqs[row].token_ids)
        if behind is None:
            request.device_row = -1
    live.free_landed()
