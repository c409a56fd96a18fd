"""Draw a step's tokens with one sync: the read of the ids. Same draws as engine.exec.sampler, up to rounding of fp32.

Temperature, min_p, top_k and top_p, seeded, one draw a row: what most requests ask for. Everything else (constraints,
logprobs, several draws) takes engine.exec.sampling, which syncs more often.
"""

# mypy: disable-error-code="no-untyped-call"
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
_TURNS = 3


def is_plain(seq: ScheduledSeq) -> bool:
    return seq.history is None and seq.num_draws == 1 and not seq.num_candidates and seq.top_logprobs is None


def _words(x: int) -> tuple[int, int]:
    """The two halves of 64 bits as signed 32-bit numbers."""
    low, high = x & 0xFFFFFFFF, x >> 32
    return low - ((low & 0x80000000) << 1), high - ((high & 0x80000000) << 1)


class Drawn:
    """Ids on their way to the host."""

    def __init__(self, here: Tensor, sampled: Sequence[int], num_seqs: int, *, on_device: bool) -> None:
        """here: [len(sampled)] int32 in host memory, valid once what is on the stream by now has ended."""
        self._here, self._sampled, self._num_seqs = here, sampled, num_seqs
        self._copied = torch.cuda.Event() if on_device else None
        if self._copied is not None:
            self._copied.record()

    def done(self) -> bool:
        return self._copied is None or bool(self._copied.query())

    def fill(self, result: StepResult) -> None:
        """Wait for them."""
        if self._copied is not None:
            self._copied.synchronize()
        for token, i in zip(self._here.tolist(), self._sampled, strict=True):
            if token < 0:
                result.bad_rows[i] = BAD_ROW
            else:
                result.token_ids[i] = token

    def result(self) -> StepResult:
        result = StepResult(token_ids=[None] * self._num_seqs)
        self.fill(result)
        return result


class PlainDraw:
    """Its own uploads: the step's numbers are still being read when the draws are sent. In turns: a buffer is written again
    only when its last copy has been made, and that stands behind the step before.

    Args:
        max_rows: of one step.
    """

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._on_device = device.type == "cuda"
        self._uploads = [Upload(device) for _ in range(_TURNS)]
        self._here = [torch.zeros(max_rows, dtype=torch.int32, pin_memory=self._on_device) for _ in range(_TURNS)]
        self._turn = 0
        self.drawn = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """The last step's draws, in the order of its sampled sequences, at one address for ever: graphs read it."""

    def draw(self, seqs: Sequence[ScheduledSeq], sampled: Sequence[int], logits: Tensor) -> Drawn:
        """logits: [len(sampled), vocab_size]; every sequence is_plain. No sync; at most `_TURNS` - 1 may be on their way."""
        self._turn = (self._turn + 1) % _TURNS
        some = [seqs[i] for i in sampled]
        drawn, here = self.drawn[: len(some)], self._here[self._turn][: len(some)]
        if all(seq.sampling.greedy for seq in some):
            sample_rows(logits, out=drawn)
        else:
            self._seeded(some, logits, drawn)
        here.copy_(drawn, non_blocking=True)
        return Drawn(here, list(sampled), len(seqs), on_device=self._on_device)

    def _seeded(self, seqs: Sequence[ScheduledSeq], logits: Tensor, out: Tensor) -> None:
        shares: list[float] = []
        for seq in seqs:
            p = seq.sampling
            shares += (p.top_p, p.min_p, 0.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE), 0.0)
        bits = float_bits(shares)
        words: list[int] = []
        for seq, temperature in zip(seqs, bits[2::4].tolist(), strict=True):
            low, high = _words(draw_key(seq.sampling.seed, seq.choice, seq.output_index))
            words += (temperature, low, high, 0)
        draws, top_k, limits = self._uploads[self._turn].send((words, [seq.sampling.top_k for seq in seqs], bits))
        thresholds = row_thresholds(logits, top_k, limits.view(torch.float32).view(-1, 4))
        sample_rows(logits, draws.view(-1, 4), thresholds, out)
