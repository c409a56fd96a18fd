"""Draws of rows with constraints, without a sync: the host works out what each constraint says now (engine.constraints), sends it
as one copy, and the device applies it to copies of those rows in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diptych.engine.constraints import Constraint
from diptych.engine.exec.cuda.upload import Upload, float_bits
from diptych.engine.exec.sampler import MIN_TEMPERATURE, draw_key
from diptych.engine.grammar.program import mask_words
from diptych.engine.messages import ScheduledSeq
from diptych.kernels.triton_constrain import constrained_rows
from diptych.kernels.triton_nucleus import row_thresholds
from diptych.kernels.triton_sample import sample_rows

NO_WORDS = np.empty(0, dtype=np.int32)


def _words(x: int) -> tuple[int, int]:
    """The two halves of 64 bits as signed 32-bit numbers."""
    low, high = x & 0xFFFFFFFF, x >> 32
    return low - ((low & 0x80000000) << 1), high - ((high & 0x80000000) << 1)


def draw_numbers(seqs: Sequence[ScheduledSeq], greedy: Sequence[bool]) -> tuple[list[int], list[int], np.ndarray]:
    """What sample_rows and row_thresholds take: draws [rows * 4], top_k [rows], shares as bits [rows * 4]."""
    shares: list[float] = []
    for seq, plain in zip(seqs, greedy, strict=True):
        p = seq.sampling
        shares += (p.top_p, p.min_p, 0.0 if plain else max(p.temperature, MIN_TEMPERATURE), 0.0)
    bits = float_bits(shares)
    draws: list[int] = []
    for seq, temperature in zip(seqs, bits[2::4].tolist(), strict=True):
        low, high = _words(draw_key(seq.sampling.seed, seq.choice, seq.output_index))
        draws += (temperature, low, high, 0)
    return draws, [seq.sampling.top_k for seq in seqs], bits


def draw_constrained(
    upload: Upload, seqs: Sequence[ScheduledSeq], rows: Sequence[int], constraints: Sequence[Constraint], logits: Tensor,
    drawn: Tensor,
) -> None:  # fmt: skip
    """drawn[row] = a token of each of `rows` of logits, or BAD or NONE_LEFT, as engine.exec.sampler.draw_tokens draws it.

    Args:
        seqs, rows, constraints: alike; each constraint has advanced to this draw.
        logits: [num_rows, vocab_size]; not changed. drawn: [num_rows] int32.
    """
    vocab_size = logits.shape[1]
    masks = [constraint.permitted(vocab_size) for constraint in constraints]
    num_words = mask_words(vocab_size)
    everything = np.full(num_words, -1, dtype=np.int32)
    masked = any(mask is not None for mask in masks)
    words = np.concatenate([everything if m is None else m for m in masks]) if masked else NO_WORDS
    biased = _places([c.bias_ids for c in constraints], vocab_size)
    seen = _places([c.seen for c in constraints], vocab_size)
    minus = np.concatenate([c.frequency * c.counts + c.presence * (c.counts > 0) for c in constraints])
    repetition = np.concatenate([np.repeat(c.repetition, len(c.seen)) for c in constraints])
    greedy = [seq.sampling.greedy for seq in seqs]
    draws, top_k, shares = draw_numbers(seqs, greedy)
    sent = upload.send((
        rows, words, biased, float_bits(np.concatenate([c.bias for c in constraints])), seen, float_bits(repetition),
        float_bits(minus), draws, top_k, shares,
    ))  # fmt: skip
    x, bad = constrained_rows(logits, sent[0], sent[1].view(len(rows), num_words) if masked else None)
    flat = x.view(-1)
    if len(biased):
        at = sent[2].long()
        flat.index_copy_(0, at, flat.index_select(0, at) + sent[3].view(torch.float32))
    if len(seen):
        at = sent[4].long()
        some, by = flat.index_select(0, at), sent[5].view(torch.float32)
        flat.index_copy_(0, at, torch.where(some > 0, some / by, some * by) - sent[6].view(torch.float32))
    if all(greedy):
        tokens = sample_rows(x, bad=bad)
    else:
        thresholds = row_thresholds(x, sent[8], sent[9].view(torch.float32).view(-1, 4))
        tokens = sample_rows(x, sent[7].view(-1, 4), thresholds, bad=bad)
    drawn.index_copy_(0, sent[0].long(), tokens)


def _places(ids: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """Each id's place in the flattened rows, int32."""
    first = np.repeat(np.arange(len(ids), dtype=np.int64) * vocab_size, [len(some) for some in ids])
    places: np.ndarray = (first + np.concatenate(ids)).astype(np.int32)
    return places
