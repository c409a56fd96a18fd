"""A computed step counts: sequences advance, tokens come out, choices fork, and whoever is done ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.common.errors import InternalError, InvalidRequestError
from diptych.engine.messages import (
    FirstCandidates,
    KvMode,
    PromptComputed,
    PromptLogprobs,
    StepResult,
    TokenLogprobs,
    TokensOut,
)
from diptych.engine.sched import beams
from diptych.engine.sched import prefill_completion as handover
from diptych.engine.sched.request import Request
from diptych.engine.sched.step import SchedulerOutput

if TYPE_CHECKING:
    from diptych.engine.sched.scheduler import Scheduler

Draws = list[tuple[int, TokenLogprobs | None]]


def update(scheduler: Scheduler, out: SchedulerOutput, result: StepResult, duration_s: float) -> None:
    """The step was computed.

    A bad row fails its request, and what that request read or wrote leaves the prefix cache. A request whose parameters
    leave no token to draw fails too.
    """
    scheduler.pace.observe(duration_s, out.num_prefill_tokens, out.num_decode)
    scheduler.computed += out.num_prefill_tokens
    if out.num_prefill_tokens:
        scheduler.policy.computed(out.num_prefill_tokens)
    size = scheduler.config.block_size
    policy, kv = scheduler.policy, scheduler.kv
    charges = policy.charges
    trouble = bool(result.bad_rows or result.refused_rows)
    token_ids, logprobs = result.token_ids, result.logprobs
    for i, request in enumerate(out.requests):
        if request.ended:
            continue  # a sibling's failure has ended it in this very step, or it ended while the step was on the device
        if trouble and _failed(scheduler, request, i, result):
            continue
        if charges:
            policy.charge(request, len(request.seq.token_ids) if i >= out.num_decode else 0, int(request.seq.sample))
        if i >= out.num_decode:
            _advance_chunk(scheduler, request, i, result, duration_s)
            continue
        # One of hundreds of decoding sequences, every step: nothing here that is not needed.
        computed = request.num_computed + 1
        request.num_computed = computed
        if not computed % size:
            kv.publish(request)
        if request.beams is not None:
            beams.offer(scheduler, request, result.candidates.get(i))
            continue
        token = token_ids[i]
        if token is None:
            scheduler.fail(request, InternalError(f"the runner drew no token for attempt {request.public}"))
            continue
        take_token(scheduler, request, token, logprobs.get(i) if logprobs else None)


def _advance_chunk(scheduler: Scheduler, request: Request, i: int, result: StepResult, duration_s: float) -> None:
    seq = request.seq
    request.num_computed += len(seq.token_ids)
    scheduler.kv.publish(request)
    if i in result.prompt_logprobs:
        _give_prompt_logprobs(scheduler, request, result.prompt_logprobs[i])
    if request.mode is KvMode.PREFILL:
        _advance_prefill(scheduler, request, i, result, duration_s)
        return
    if not seq.sample:
        return
    if request.beams is not None:
        scheduler.start_decoding(request)
        beams.offer(scheduler, request, result.candidates.get(i))
        return
    token = result.token_ids[i]
    if token is None:
        scheduler.fail(request, InternalError(f"the runner drew no token for attempt {request.public}"))
        return
    scheduler.start_decoding(request)
    if seq.num_draws > 1:
        spread(scheduler, request, _draws(i, token, result))
    else:
        take_token(scheduler, request, token, result.logprobs.get(i))


def spread(scheduler: Scheduler, request: Request, draws: Draws) -> None:
    """First tokens of all choices: siblings are forked, then each takes its own."""
    everyone = [request, *scheduler.fork(request)]
    if len(draws) != len(everyone):
        scheduler.fail(request, InternalError(f"{len(draws)} first tokens for {len(everyone)} choices"))
        return
    for one, (token, logprobs) in zip(everyone, draws, strict=True):
        if one.attempt in scheduler.requests:  # a sibling's failure ends them all
            take_token(scheduler, one, token, logprobs)


def take_token(scheduler: Scheduler, request: Request, token: int, logprobs: TokenLogprobs | None = None) -> None:
    """One more output token: drawn here, or by prefill for a REMOTE request."""
    output = request.output
    assert output is not None
    tokens = request.token_ids
    offset = len(tokens) - request.num_prompt
    tokens.append(token)
    if len(request.block_ids) * scheduler.config.block_size < len(tokens):
        scheduler.growing.append(request)
    try:
        text = output.push(token)
    except Exception as error:  # one request's text must not end the engine
        scheduler.fail(request, InternalError(f"making text of the tokens failed: {type(error).__name__}: {error}"))
        return
    scheduler.generated += 1
    if request.choices is not None and request.choices.withholds:
        request.choices.hold(request.choice, token, text, logprobs)
    else:
        known = (logprobs,) if logprobs is not None else ()
        scheduler.events.append(TokensOut(request.public, offset, (token,), text, request.choice, known))
    if output.finish is not None:
        scheduler.finish(request)


def _failed(scheduler: Scheduler, request: Request, i: int, result: StepResult) -> bool:
    if i in result.bad_rows:
        scheduler.kv.invalidate(request)
        why = f"the model gave unusable logits for attempt {request.public}: {result.bad_rows[i]}"
        scheduler.fail(request, InternalError(why))
        return True
    if i in result.refused_rows:
        param = "allowed_token_ids" if request.source.grammar is None else "grammar"
        scheduler.fail(request, InvalidRequestError(result.refused_rows[i], param=param))
        return True
    return False


def _draws(i: int, token: int, result: StepResult) -> Draws:
    return [(token, result.logprobs.get(i)), *result.more_draws.get(i, ())]


def _give_prompt_logprobs(scheduler: Scheduler, request: Request, entries: list[TokenLogprobs]) -> None:
    """Entries of the chunk that was just computed; what was given out before a preemption is not given out again."""
    wanted = request.prompt_logprobs_from
    assert wanted is not None
    first = request.num_computed - len(request.seq.token_ids) + 1
    fresh = entries[max(0, wanted - first) :]
    if fresh:
        scheduler.events.append(PromptLogprobs(request.public, max(first, wanted), tuple(fresh)))
    until = max(wanted, first + len(entries))
    request.prompt_logprobs_from = until if until < request.num_prompt else None


def _advance_prefill(scheduler: Scheduler, request: Request, i: int, result: StepResult, duration_s: float) -> None:
    request.compute_s += duration_s
    if request.want_kv:
        scheduler.packing.offer(request)
    if request.num_computed < len(request.token_ids):
        return
    computed_from = result.computed_from.get(i)
    if computed_from is None:
        scheduler.fail(request, InternalError(f"nothing tells what attempt {request.public} was computed from"))
        return
    scheduler.events.append(PromptComputed(request.public, computed_from))
    if request.samples and request.beams is not None:
        candidates = result.candidates.get(i)
        if candidates is None:
            scheduler.fail(request, InternalError(f"the runner gave no candidates for attempt {request.public}"))
            return
        scheduler.events.append(FirstCandidates(request.public, tuple(candidates)))
    elif request.samples:
        token = result.token_ids[i]
        if token is None:
            scheduler.fail(request, InternalError(f"the runner drew no token for attempt {request.public}"))
            return
        for choice, (drawn, logprobs) in enumerate(_draws(i, token, result), request.choice):
            known = (logprobs,) if logprobs is not None else ()
            scheduler.generated += 1
            scheduler.events.append(TokensOut(request.public, 0, (drawn,), "", choice, known))
    handover.computed(scheduler, request)
