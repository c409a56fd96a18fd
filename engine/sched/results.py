"""A computed step takes effect: sequences advance, tokens are sent, choices and beams fork, and requests end."""

from __future__ import annotations

from diptych.common.errors import DiptychError, InternalError, InvalidRequestError
from diptych.engine.messages import (
    Candidate,
    FirstCandidates,
    KvMode,
    PromptComputed,
    PromptLogprobs,
    ScheduledSeq,
    StepResult,
    TokenLogprobs,
    TokensOut,
)
from diptych.engine.sched.batching.step import SchedulerOutput
from diptych.engine.sched.lifecycle.lifecycle import Lifecycle
from diptych.engine.sched.requests.beam_search import Child
from diptych.engine.sched.requests.beams import Beams, stopped
from diptych.engine.sched.requests.choices import Draws
from diptych.engine.sched.requests.output import OutputProcessor
from diptych.engine.sched.requests.request import Request, State


def apply_step_result(live: Lifecycle, out: SchedulerOutput, result: StepResult, duration_s: float) -> None:
    """The step was computed.

    A bad row fails its request, and what that request read or wrote leaves the prefix cache. A request whose parameters
    leave no token to draw fails too.
    """
    totals = live.totals
    live.throughput.observe(duration_s, out.num_prefill_tokens, out.num_decode)
    totals.computed += out.num_prefill_tokens
    if out.num_prefill_tokens:
        live.policy.computed(out.num_prefill_tokens)
    size = live.config.block_size
    policy, kv = live.policy, live.kv
    charges = policy.charges
    any_failed = bool(result.bad_rows or result.refused_rows)
    any_beams = bool(live.beams)
    token_ids, logprobs = result.token_ids, result.logprobs
    num_decode = out.num_decode
    for i, request in enumerate(out.requests):
        if request.ended:
            continue  # another choice's failure has ended it in this step, or it ended while the step was on the device
        if any_failed and _failed(live, request, i, result):
            continue
        seq = out.seqs[i]  # the request's own by now may be that of the step behind
        if charges:
            num_outputs = max(int(seq.sample), len(token_ids[i]))
            policy.charge(request, len(seq.token_ids) if i >= num_decode else 0, num_outputs)
        if i >= num_decode:
            _advance_chunk(live, request, seq, i, result, duration_s)
            continue
        # One of hundreds of decoding sequences, in every step: nothing here that is not needed.
        computed = request.num_computed + 1
        request.num_computed = computed
        if not computed % size:
            kv.advance(request)
        if any_beams and seq.num_candidates:
            take_candidates(live, request, result.candidates.get(i))
        elif row := token_ids[i]:
            take_tokens(live, request, row, logprobs.get(i, ()) if logprobs else ())
        else:
            live.fail(request, InternalError(f"the runner drew no token for attempt {request.attempt_id}"))
    if out.num_draft_tokens:
        for request in out.requests[: out.num_decode]:
            if not request.ended and request.seq.num_drafts:
                kv.trim(request)  # blocks that only rejected guesses needed


def _advance_chunk(
    live: Lifecycle, request: Request, seq: ScheduledSeq, i: int, result: StepResult, duration_s: float
) -> None:
    request.num_computed += len(seq.token_ids)
    live.kv.advance(request, in_prompt=True)
    if i in result.prompt_logprobs:
        _send_prompt_logprobs(live, request, result.prompt_logprobs[i])
    if request.mode is KvMode.PREFILL:
        _advance_prefill(live, request, i, result, duration_s)
        return
    if not seq.sample:
        return
    seq.prompt_targets = ()
    if seq.num_candidates:
        live.running.start_decode(request)
        take_candidates(live, request, result.candidates.get(i))
        return
    row = result.token_ids[i]
    if len(row) != 1:
        live.fail(request, InternalError(f"the runner drew no token for attempt {request.attempt_id}"))
        return
    live.running.start_decode(request)
    if seq.num_draws > 1:
        fork_choices(live, request, _draws(i, result))
    else:
        take_tokens(live, request, row, result.logprobs.get(i, ()))


def fork_choices(live: Lifecycle, request: Request, draws: Draws) -> None:
    """First tokens of all choices: the others are forked, then each takes its own."""
    choices = [request, *live.fork_choices(request)]
    if len(draws) != len(choices):
        live.fail(request, InternalError(f"{len(draws)} first tokens for {len(choices)} choices"))
        return
    for one, (token, logprobs) in zip(choices, draws, strict=True):
        if not one.ended:  # one choice's failure ends them all
            take_tokens(live, one, (token,), () if logprobs is None else (logprobs,))


def take_tokens(
    live: Lifecycle, request: Request, row: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()
) -> None:
    """More output tokens: drawn here, or the first one by prefill for a REMOTE request.

    Args:
        row: of which one stands for the position that counts as computed already. With more, guesses were accepted, and
            the positions of these are counted here. What comes behind the end of the output is dropped: it is neither
            sent nor counted, and no KV of it is published.
    """
    output, tokens = request.output, request.token_ids
    assert output is not None
    offset = len(tokens) - request.num_prompt
    try:
        if len(row) == 1:
            token = row[0]
            text = output.push(token)
            tokens.append(token)
        else:
            row, text = _push_row(live, request, output, row)
            logprobs = logprobs[: len(row)]
    except DiptychError as error:
        live.fail(request, error)
        return
    live.totals.generated += len(row)
    if live.choices.withholding and (group := live.choices.of(request)) is not None and group.withholds:
        group.withhold(request.choice, row, text, logprobs)
    else:
        live.emit(TokensOut(request.attempt_id, offset, row, text, request.choice, logprobs))
    if output.finish is not None:
        live.finish(request)
    elif request.block_end * live.block_size < len(tokens):
        live.running.needs_block(request)


def _push_row(
    live: Lifecycle, request: Request, output: OutputProcessor, row: tuple[int, ...]
) -> tuple[tuple[int, ...], str]:
    """Returns: the tokens of a row of several that count, and their text. Raises: InternalError."""
    if len(row) > len(request.seq.token_ids):
        raise InternalError(f"the runner accepted more tokens than it was given for attempt {request.attempt_id}")
    count, text = output.push_all(row)
    request.token_ids.extend(row[:count])
    request.num_computed += count - 1
    live.kv.advance(request)
    return row[:count], text


# ---- beams ----


def take_candidates(live: Lifecycle, beam: Request, candidates: list[Candidate] | None) -> None:
    """A decoding beam's row was computed. With the last one of its attempt all beams advance."""
    group = live.beams.of(beam)
    assert group is not None
    if candidates is None:
        live.fail(beam, InternalError(f"the runner gave no candidates for attempt {beam.attempt_id}"))
        return
    children = group.add_candidates(beam, candidates)
    if children is None:
        live.running.pause(beam)
    elif group.search.done:
        _finish_beams(live, group, beam)
    else:
        _advance_beams(live, group, children)


def _advance_beams(live: Lifecycle, group: Beams, children: list[Child]) -> None:
    """Fork before anything is freed or written: every parent's blocks are as its children need them."""
    named: dict[int, Child] = {}
    beams: dict[int, Request] = {}
    for child in children:
        beam = group.members[child.parent]
        if child.parent in named:
            beam = live.fork_beam(beam)
        named[beam.choice], beams[beam.choice] = child, beam
    for number, beam in list(group.members.items()):
        if number not in named:
            live.end(beam, State.FINISHED_STOPPED)
    for number, beam in beams.items():
        beam.token_ids.append(named[number].token_id)
        live.running.start_decode(beam)
        live.kv.trim(beam)
        if live.kv.needs_block(beam):
            live.running.needs_block(beam)
    live.totals.generated += len(beams)
    group.search.go_on(named)


def _finish_beams(live: Lifecycle, group: Beams, beam: Request) -> None:
    try:
        events = group.answers(beam, live.limits, live.detokenizer_factory)
    except DiptychError as error:
        live.fail(beam, error)
        return
    live.end_attempt(group.attempt, State.FINISHED_STOPPED if stopped(events) else State.FINISHED_LENGTH)
    live.outbox.extend(events)


# ---- rows that fail, and what comes with rows ----


def _failed(live: Lifecycle, request: Request, i: int, result: StepResult) -> bool:
    if i in result.bad_rows:
        live.kv.invalidate(request)
        reason = f"the model gave unusable logits for attempt {request.attempt_id}: {result.bad_rows[i]}"
        live.fail(request, InternalError(reason))
        return True
    if i in result.refused_rows:
        param = "allowed_token_ids" if request.source.grammar is None else "grammar"
        live.fail(request, InvalidRequestError(result.refused_rows[i], param=param))
        return True
    return False


def _draws(i: int, result: StepResult) -> Draws:
    [token] = result.token_ids[i]
    [logprobs] = result.logprobs.get(i, (None,))
    return [(token, logprobs), *result.more_draws.get(i, ())]


def _send_prompt_logprobs(live: Lifecycle, request: Request, entries: list[TokenLogprobs]) -> None:
    """Entries of the chunk that was just computed; those that were sent before a preemption are not sent again."""
    wanted = request.prompt_logprobs_from
    assert wanted is not None
    first = request.num_computed - len(request.seq.token_ids) + 1
    fresh = entries[max(0, wanted - first) :]
    if fresh:
        live.emit(PromptLogprobs(request.attempt_id, max(first, wanted), tuple(fresh)))
    until = max(wanted, first + len(entries))
    request.prompt_logprobs_from = until if until < request.num_prompt else None


def _advance_prefill(live: Lifecycle, request: Request, i: int, result: StepResult, duration_s: float) -> None:
    request.compute_s += duration_s
    if request.want_kv:
        live.packing.offer(request)
    if request.num_computed < len(request.token_ids):
        return
    computed_from = result.computed_from.get(i)
    if computed_from is None:
        live.kv.invalidate(request)  # or every prompt that begins with these blocks would fail
        reason = f"the runner does not say what attempt {request.attempt_id} was computed from"
        live.fail(request, InternalError(reason))
        return
    live.emit(PromptComputed(request.attempt_id, computed_from, request.compute_s))
    if request.samples and request.seq.num_candidates:
        candidates = result.candidates.get(i)
        if candidates is None:
            live.fail(request, InternalError(f"the runner gave no candidates for attempt {request.attempt_id}"))
            return
        live.emit(FirstCandidates(request.attempt_id, tuple(candidates)))
    elif request.samples:
        if len(result.token_ids[i]) != 1:
            live.fail(request, InternalError(f"the runner drew no token for attempt {request.attempt_id}"))
            return
        for choice, (drawn, logprobs) in enumerate(_draws(i, result), request.choice):
            known = (logprobs,) if logprobs is not None else ()
            live.totals.generated += 1
            live.emit(TokensOut(request.attempt_id, 0, (drawn,), "", choice, known))
    live.prompt_computed(request)
