"""Constraints of many rows in a few tensor operations; and logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diptych.engine.constraints import Constraint
from diptych.engine.messages import TokenLogprobs

EMPTY_CHOICE = "the grammar, allowed_token_ids, bad_words, logit_bias and min_tokens leave no token to draw"


def _spots(rows: Sequence[int], ids: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Row and column of every id; None: there are none."""
    lengths = [len(some) for some in ids]
    if not any(lengths):
        return None
    at = np.repeat(np.array(rows, dtype=np.int64), lengths)
    return torch.from_numpy(at).to(device), torch.from_numpy(np.concatenate(ids)).to(device)


def _values(values: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(values)).to(device)


def constrain(logits: Tensor, rows: Sequence[int], constraints: Sequence[Constraint]) -> None:
    """Change rows of logits [num_rows, vocab_size] float32 in place, each by its constraint, which has advanced already;
    other rows are not read or written. The numbers are those of engine.constraints.apply."""
    device = logits.device
    biased = _spots(rows, [c.bias_ids for c in constraints], device)
    if biased is not None:
        logits[biased] += _values([c.bias for c in constraints], device)
    seen = _spots(rows, [c.seen for c in constraints], device)
    if seen is not None:
        lengths = [len(c.seen) for c in constraints]
        repetition = _values([np.repeat(c.repetition, n) for c, n in zip(constraints, lengths, strict=True)], device)
        minus = _values([c.frequency * c.counts + c.presence * (c.counts > 0) for c in constraints], device)
        some = logits[seen]
        logits[seen] = torch.where(some > 0, some / repetition, some * repetition) - minus
    for row, constraint in zip(rows, constraints, strict=True):
        if constraint.allowed is not None:
            ids = torch.from_numpy(constraint.allowed).to(device)
            kept = logits[row, ids]
            logits[row] = float("-inf")
            logits[row, ids] = kept
    masked = [(row, c.mask) for row, c in zip(rows, constraints, strict=True) if c.mask is not None]
    if masked:
        at = torch.tensor([row for row, _ in masked], device=device)
        words = torch.from_numpy(np.stack([mask for _, mask in masked])).to(device)
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
        forbidden = bits.view(len(masked), -1)[:, : logits.shape[1]] == 0
        logits[at] = logits[at].masked_fill_(forbidden, float("-inf"))
    banned = _spots(rows, [c.banned for c in constraints], device)
    if banned is not None:
        logits[banned] = float("-inf")


def token_logprobs(logits: Tensor, targets: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Logprobs of one token a row, and of as many of the likeliest as `tops` says.

    Args:
        logits: [len(targets), vocab_size] float32, finite.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    column = torch.tensor(targets, dtype=torch.int64, device=logits.device)[:, None]
    chosen = logprobs.gather(1, column)
    ranks = ((logprobs > chosen).sum(-1) + 1).tolist()
    best = torch.topk(logprobs, min(max(1, *tops), logits.shape[1]) if tops else 1, dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    own = chosen[:, 0].tolist()
    return [
        TokenLogprobs(target, own[i], ranks[i], tuple(zip(ids[i][:top], values[i][:top], strict=True)))
        for i, (target, top) in enumerate(zip(targets, tops, strict=True))
    ]
