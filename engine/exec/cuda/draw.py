"""Draw a step's tokens with one sync: the read of the ids. Same draws as engine.exec.sampler, up to rounding of fp32.

Temperature, min_p, top_k and top_p, seeded, one draw a row: what most requests ask for. Everything else (constraints,
logprobs, several draws) takes engine.exec.sampling, which syncs more often.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.engine.exec.cuda.upload import Upload, float_bits
from diptych.engine.exec.sampler import MIN_TEMPERATURE, draw_key
from diptych.engine.messages import ScheduledSeq, StepResult
from diptych.kernels.triton_nucleus import row_thresholds
from diptych.kernels.triton_sample import sample_rows

BAD_ROW = "logits hold NaN or Inf"


def is_plain(seq: ScheduledSeq) -> bool:
    return seq.history is None and seq.num_draws == 1 and not seq.num_candidates and seq.top_logprobs is None


def _words(x: int) -> tuple[int, int]:
    """The two halves of 64 bits as signed 32-bit numbers."""
    low, high = x & 0xFFFFFFFF, x >> 32
    return low - ((low & 0x80000000) << 1), high - ((high & 0x80000000) << 1)


class PlainDraw:
    """Its own upload: the step's numbers are still being read when the draws are sent."""

    def __init__(self, device: torch.device) -> None:
        self._upload = Upload(device)

    def draw(self, seqs: Sequence[ScheduledSeq], sampled: Sequence[int], logits: Tensor, result: StepResult) -> None:
        """Fill `result`. logits: [len(sampled), vocab_size]; every sequence is_plain."""
        some = [seqs[i] for i in sampled]
        if all(seq.sampling.greedy for seq in some):
            ids = sample_rows(logits)
        else:
            ids = self._seeded(some, logits)
        for token, i in zip(ids.tolist(), sampled, strict=True):
            if token < 0:
                result.bad_rows[i] = BAD_ROW
            else:
                result.token_ids[i] = token

    def _seeded(self, seqs: Sequence[ScheduledSeq], logits: Tensor) -> Tensor:
        shares: list[float] = []
        for seq in seqs:
            p = seq.sampling
            shares += (p.top_p, p.min_p, 0.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE), 0.0)
        bits = float_bits(shares)
        words: list[int] = []
        for seq, temperature in zip(seqs, bits[2::4].tolist(), strict=True):
            low, high = _words(draw_key(seq.sampling.seed, seq.choice, seq.output_index))
            words += (temperature, low, high, 0)
        draws, top_k, limits = self._upload.send((words, [seq.sampling.top_k for seq in seqs], bits))
        thresholds = row_thresholds(logits, top_k, limits.view(torch.float32).view(-1, 4))
        return sample_rows(logits, draws.view(-1, 4), thresholds)
