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
    """Fill `result`.

    Args:
        sampled: sequence index of each row; a sequence with drafts has 1 + num_drafts rows, one after the other.
        logits: rows of the sequences `sampled`, then those of `prompt_rows`.
    """
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
    rows_of: dict[int, list[int]] = {}
    for row, i in enumerate(sampled):
        rows_of.setdefault(i, []).append(row)
    constraints = _draw_rows(seqs, rows_of, logits, eos_token_ids, result)
    _logprobs(seqs, rows_of, logits, result)
    for i, constraint in constraints.items():
        seqs[i].memo = constraint


def _draw_rows(
    seqs: Sequence[ScheduledSeq],
    rows_of: dict[int, list[int]],
    logits: Tensor,
    eos_token_ids: Sequence[int],
    result: StepResult,
) -> dict[int, Constraint]:
    """Draw the first row of every sequence; then the next row of those whose draw was the guess behind it, and so on.

    Fills token_ids, bad_rows, refused_rows and more_draws.

    Args: rows_of: sequence index -> its rows of logits, in order.
    Returns: the sequences' constraints. The memo of one that knows accepted tokens is None until the step has succeeded.
    """
    accepted: dict[int, list[int]] = {i: [] for i in rows_of}
    constraints: dict[int, Constraint] = {}
    going, place = list(rows_of), 0
    while going:
        rows = [rows_of[i][place] for i in going]
        draws = []
        for i in going:
            seq = seqs[i]
            if seq.history is not None:
                if not place:
                    constraints[i] = constraint_of(seq.memo, seq.sampling, eos_token_ids, seq.grammar)
                seq.memo = None if place else constraints[i]
                constraints[i].advance([*seq.history, *accepted[i]] if place else seq.history, seq.num_prompt)
            draws.append(Draw(seq.sampling, seq.output_index + place, seq.choice, constraints.get(i), seq.num_draws))
        drawn = draw_tokens(logits if len(rows) == logits.shape[0] else logits[rows], draws)
        for at, i in enumerate(going):
            if at in drawn.bad or at in drawn.refused:
                if not place and at in drawn.bad:
                    result.bad_rows[i] = drawn.bad[at]
                elif not place:
                    result.refused_rows[i] = drawn.refused[at]
                continue
            accepted[i].append(drawn.token_ids[at])
            if at in drawn.more:
                result.more_draws[i] = [(token, None) for token in drawn.more[at]]
        place += 1
        going = [i for i in going if len(accepted[i]) == place and _guessed(seqs[i], place, accepted[i][-1])]
    for i, tokens in accepted.items():
        result.token_ids[i] = tuple(tokens)
    return constraints


def _guessed(seq: ScheduledSeq, place: int, token: int) -> bool:
    """Whether `token` is the row's guess number `place`, counted from 1."""
    return place <= seq.num_drafts and seq.token_ids[len(seq.token_ids) - 1 - seq.num_drafts + place] == token


def _logprobs(seqs: Sequence[ScheduledSeq], rows_of: dict[int, list[int]], logits: Tensor, result: StepResult) -> None:
    rows, targets, tops = [], [], []
    for i, places in rows_of.items():
        top = seqs[i].top_logprobs
        if top is None or not result.token_ids[i]:
            continue
        for row, token in zip(places, result.token_ids[i], strict=False):
            rows.append(row)
            targets.append(token)
            tops.append(top)
        for token, _ in result.more_draws.get(i, ()):
            rows.append(places[0])
            targets.append(token)
            tops.append(top)
    if not rows:
        return
    entries = iter(token_logprobs(logits[rows].float(), targets, tops))
    for i in rows_of:
        if seqs[i].top_logprobs is None or not result.token_ids[i]:
            continue
        result.logprobs[i] = tuple(next(entries) for _ in result.token_ids[i])
        if i in result.more_draws:
            result.more_draws[i] = [(token, next(entries)) for token, _ in result.more_draws[i]]


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
