"""Draw a step's tokens with one sync: the read of the ids. Same draws as engine.exec.sampler, up to rounding of fp32.

Temperature, top_k and top_p, seeded, one draw a row: what most requests ask for. Everything else (constraints, min_p,
logprobs, several draws) takes engine.exec.sampling, which syncs more often.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.engine.exec.cuda.upload import Upload, float_bits
from diptych.engine.exec.sampler import MIN_TEMPERATURE, NUCLEUS_WINDOW, draw_key
from diptych.engine.messages import ScheduledSeq, StepResult
from diptych.kernels.triton_sample import sample_rows

BAD_ROW = "logits hold NaN or Inf"


def is_plain(seq: ScheduledSeq) -> bool:
    return seq.history is None and seq.num_draws == 1 and seq.top_logprobs is None and seq.sampling.min_p == 0.0


def _words(x: int) -> tuple[int, int]:
    """The two halves of 64 bits as signed 32-bit numbers."""
    low, high = x & 0xFFFFFFFF, x >> 32
    return low - ((low & 0x80000000) << 1), high - ((high & 0x80000000) << 1)


class PlainDraw:
    """Its own upload: the step's numbers are still being read when the draws are sent."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._upload, self._vocab_size = Upload(device), vocab_size

    def draw(self, seqs: Sequence[ScheduledSeq], sampled: Sequence[int], logits: Tensor, result: StepResult) -> None:
        """Fill `result`. logits: [len(sampled), vocab_size]; every sequence is_plain."""
        if all(seqs[i].sampling.greedy for i in sampled):
            ids = sample_rows(logits).tolist()
        else:
            ids = self._seeded([seqs[i] for i in sampled], logits)
        for token, i in zip(ids, sampled, strict=True):
            if token < 0:
                result.bad_rows[i] = BAD_ROW
            else:
                result.token_ids[i] = token

    def _seeded(self, seqs: Sequence[ScheduledSeq], logits: Tensor) -> list[int]:
        params = [seq.sampling for seq in seqs]
        temperatures = [0.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE) for p in params]
        rows = [i for i, p in enumerate(params) if not p.greedy and (0 < p.top_k < self._vocab_size or p.top_p < 1.0)]
        words: list[int] = []
        for seq, bits in zip(seqs, float_bits(temperatures).tolist(), strict=True):
            low, high = _words(draw_key(seq.sampling.seed, seq.choice, seq.output_index))
            words += (bits, low, high, 0)
        draws, index, top_k, top_p, temperature = self._upload.send(
            (
                words,
                rows,
                [params[i].top_k or self._vocab_size for i in rows],
                float_bits([params[i].top_p for i in rows]),
                float_bits([temperatures[i] for i in rows]),
            )
        )
        draws = draws.view(-1, 4)
        thresholds = torch.full((len(seqs),), float("-inf"), device=logits.device)
        if not rows:
            return sample_rows(logits, draws, thresholds).tolist()
        some = logits.index_select(0, index).float()
        limits = (top_k, top_p.view(torch.float32), temperature.view(torch.float32))
        window = min(self._vocab_size, max([NUCLEUS_WINDOW, *(params[i].top_k for i in rows)]))
        while True:
            least, sure = _thresholds(some, *limits, window)
            thresholds.index_copy_(0, index.long(), least)
            ids = sample_rows(logits, draws, thresholds)
            out = torch.cat((ids, sure.to(torch.int32))).tolist()
            if all(out[len(seqs) :]):
                return out[: len(seqs)]
            # Rare: a nucleus of more candidates than the window held.
            window = min(self._vocab_size, 16 * window)


def _thresholds(
    logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Least logit that top_k and top_p keep, [rows]; and whether `window` candidates sufficed to tell."""
    values = torch.topk(logits, window, dim=-1).values
    best = values[:, :1]
    scaled = (values - best) / temperature[:, None]
    in_k = torch.arange(window, device=logits.device) < top_k[:, None]
    limited = top_k <= window
    top = scaled.masked_fill(~in_k, float("-inf"))
    whole = torch.logsumexp((logits - best) / temperature[:, None], -1)
    total = torch.where(limited, torch.logsumexp(top, -1), whole)
    probability = torch.exp(top - total[:, None])
    # A token stays while the mass before it is below top_p; the first one always does.
    before = probability.cumsum(-1) - probability
    kept = in_k & ((before < top_p[:, None]) | (top_p[:, None] >= 1.0))
    kept[:, 0] = True
    count = kept.sum(-1)
    sure = limited | (count < window) | (window == logits.shape[1])
    # A row with NaN is refused by the kernel whatever its threshold.
    return values.gather(1, (count - 1)[:, None])[:, 0], sure | ~best[:, 0].isfinite()
