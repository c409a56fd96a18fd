"""What a beam may go on with: the likeliest tokens of its row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.engine.constraints import Constraint, constraint_of
from diptych.engine.exec.constrain import constrain
from diptych.engine.exec.sampler import bad_rows
from diptych.engine.messages import Candidate, ScheduledSeq, StepResult, TokenLogprobs


def find_candidates(
    seqs: Sequence[ScheduledSeq], beams: Sequence[int], logits: Tensor, eos_token_ids: Sequence[int], result: StepResult
) -> None:
    """Fill `result.candidates`: the model's logprobs, changed by penalties, bias and bans, are the scores.

    Args:
        beams: indices of the sequences, in the order of the rows.
        logits: [len(beams), vocab_size], any float dtype; not changed.
    """
    logits = logits.float()
    bad = bad_rows(logits)
    logprobs = torch.log_softmax(logits, dim=-1)
    constrained, constraints = [], []
    for row, i in enumerate(beams):
        seq = seqs[i]
        if seq.history is not None and row not in bad:
            seq.memo = constraint = constraint_of(seq.memo, seq.sampling, eos_token_ids, seq.grammar)
            constraint.advance(seq.history, seq.num_prompt)
            constrained.append(row)
            constraints.append(constraint)
    scores = logprobs
    if constrained:
        scores = logprobs.clone()
        constrain(scores, constrained, constraints)
    count = min(max(seqs[i].num_candidates for i in beams), scores.shape[1])
    best = torch.topk(scores, count, dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    for row, i in enumerate(beams):
        if row in bad:
            result.bad_rows[i] = bad[row]
            continue
        memo = seqs[i].memo
        if isinstance(memo, Constraint) and memo.trouble:
            result.refused_rows[i] = memo.trouble
            continue
        kept = [k for k in range(min(count, seqs[i].num_candidates)) if values[row][k] > float("-inf")]
        known = _logprobs(logprobs[row], [ids[row][k] for k in kept], seqs[i].top_logprobs)
        result.candidates[i] = [
            Candidate(ids[row][k], values[row][k], entry) for k, entry in zip(kept, known, strict=True)
        ]


def _logprobs(row: Tensor, tokens: list[int], top: int | None) -> Sequence[TokenLogprobs | None]:
    """The model's own, of each of one row's tokens. row: [vocab_size]."""
    if top is None or not tokens:
        return [None] * len(tokens)
    own = row[torch.tensor(tokens, device=row.device)]
    ranks = ((row[None] > own[:, None]).sum(-1) + 1).tolist()
    best = torch.topk(row, min(top, row.shape[0]))
    likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return [
        TokenLogprobs(token, logprob, rank, likeliest)
        for token, logprob, rank in zip(tokens, own.tolist(), ranks, strict=True)
    ]
