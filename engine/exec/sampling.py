"""From one step's logits to its result: draws, their logprobs, and logprobs of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from diptych.engine.constraints import Constraint, constraint_of
from diptych.engine.exec.beam import find_candidates
from diptych.engine.exec.constrain import token_logprobs
from diptych.engine.exec.sampler import Draw, bad_rows, draw_tokens
from diptych.engine.messages import ScheduledSeq, StepResult

PromptRows = list[tuple[int, int]]
"""(sequence index, how many of its rows) in the order of the logits behind the sampled ones."""


class RowsOfStep(Protocol):
    """What StepBatch and CudaBatch have in common."""

    order: list[int]
    sample_rows: list[int]


def want_prompt_rows(seqs: Sequence[ScheduledSeq], batch: RowsOfStep) -> PromptRows:
    """Ask the model for the logits of rows whose next prompt token's logprob is wanted: they come after the sampled rows."""
    wanted = [i for i in batch.order if seqs[i].prompt_targets]
    if not wanted:
        return []
    first, at = {}, 0
    for i in batch.order:
        first[i] = at
        at += len(seqs[i].token_ids)
    for i in wanted:
        batch.sample_rows.extend(range(first[i], first[i] + len(seqs[i].prompt_targets)))
    return [(i, len(seqs[i].prompt_targets)) for i in wanted]


def draw_step(
    seqs: Sequence[ScheduledSeq],
    sampled: Sequence[int],
    prompt_rows: PromptRows,
    logits: Tensor,
    eos_token_ids: Sequence[int],
    result: StepResult,
) -> None:
    """Fill `result`. logits: rows of the sequences `sampled`, then those of `prompt_rows`."""
    if prompt_rows:
        _prompt_logprobs(seqs, prompt_rows, logits[len(sampled) :].float(), result)
        logits = logits[: len(sampled)]
    beams = [row for row, i in enumerate(sampled) if seqs[i].num_candidates]
    if beams:
        find_candidates(seqs, [sampled[row] for row in beams], logits[beams], eos_token_ids, result)
        drawn_rows = [row for row, i in enumerate(sampled) if not seqs[i].num_candidates]
        sampled, logits = [sampled[row] for row in drawn_rows], logits[drawn_rows]
    if not sampled:
        return
    draws = [_draw(seqs[i], eos_token_ids) for i in sampled]
    drawn = draw_tokens(logits, draws)
    for row, i in enumerate(sampled):
        if row in drawn.bad:
            result.bad_rows[i] = drawn.bad[row]
        elif row in drawn.refused:
            result.refused_rows[i] = drawn.refused[row]
        else:
            result.token_ids[i] = drawn.token_ids[row]
    for row, tokens in drawn.more.items():
        if sampled[row] not in result.bad_rows and sampled[row] not in result.refused_rows:
            result.more_draws[sampled[row]] = [(token, None) for token in tokens]
    _logprobs(seqs, sampled, logits, result)


def _draw(seq: ScheduledSeq, eos_token_ids: Sequence[int]) -> Draw:
    if seq.history is None:
        return Draw(seq.sampling, seq.output_index, seq.choice, None, seq.num_draws)
    constraint: Constraint = constraint_of(seq.memo, seq.sampling, eos_token_ids, seq.grammar)
    seq.memo = constraint
    constraint.advance(seq.history, seq.num_prompt)
    return Draw(seq.sampling, seq.output_index, seq.choice, constraint, seq.num_draws)


def _logprobs(seqs: Sequence[ScheduledSeq], sampled: Sequence[int], logits: Tensor, result: StepResult) -> None:
    rows, targets, tops, of = [], [], [], []
    for row, i in enumerate(sampled):
        top, token = seqs[i].top_logprobs, result.token_ids[i]
        if top is None or token is None:
            continue
        for target in (token, *(token for token, _ in result.more_draws.get(i, ()))):
            rows.append(row)
            targets.append(target)
            tops.append(top)
            of.append(i)
    if not rows:
        return
    for i, entry in zip(of, token_logprobs(logits[rows].float(), targets, tops), strict=True):
        if i not in result.logprobs:
            result.logprobs[i] = entry
        else:
            draws = result.more_draws[i]
            at = next(n for n, (_, known) in enumerate(draws) if known is None)
            draws[at] = (draws[at][0], entry)


def _prompt_logprobs(seqs: Sequence[ScheduledSeq], rows: PromptRows, logits: Tensor, result: StepResult) -> None:
    bad = bad_rows(logits)
    first = 0
    for i, count in rows:
        span = range(first, first + count)
        first += count
        reasons = [bad[row] for row in span if row in bad]
        if reasons:
            result.bad_rows[i] = reasons[0]
            continue
        tops = [seqs[i].sampling.prompt_logprobs or 0] * count
        result.prompt_logprobs[i] = token_logprobs(logits[span.start : span.stop], list(seqs[i].prompt_targets), tops)
