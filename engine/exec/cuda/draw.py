"""Draw a step's tokens with one sync: the read of the ids. Same draws as engine.exec.sampler, up to rounding of fp32.

One draw a row, with the parameters of `IMPLEMENTED`. A row with another one is drawn by engine.exec.sampler, the reference,
which syncs. Several draws, beams, drafts and prompts' logprobs take engine.exec.sampling, which syncs more often.

A draw without constraints follows from the sequence's place alone, so it can be sent off with its step. With them it follows
from the sequence's tokens: of a step that was launched ahead it is sent once the host has read the last token, while the step
itself is on the device already.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from diptych.common.sampling import SamplingParams
from diptych.engine.constraints import Constraint, constraint_of
from diptych.engine.exec.constrain import EMPTY_CHOICE
from diptych.engine.exec.cuda.constrained import draw_constrained, draw_numbers
from diptych.engine.exec.cuda.logprobs import LogprobsOut
from diptych.engine.exec.cuda.upload import Upload
from diptych.engine.exec.sampler import Draw, draw_tokens
from diptych.engine.messages import ScheduledSeq, StepResult
from diptych.kernels.triton_nucleus import row_thresholds
from diptych.kernels.triton_sample import BAD, NONE_LEFT, sample_rows

BAD_ROW = "logits hold NaN or Inf"
_TURNS = 3

IMPLEMENTED = frozenset({
    # Drawn with, here or in cuda.constrained.
    "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "grammar", "logprobs",
    # Of no effect on a single draw: they act in the scheduler, or on rows that are not drawn here.
    "max_tokens", "ignore_eos", "stop_token_ids", "stop", "include_stop_str_in_output", "n", "best_of", "prompt_logprobs",
    "beam_width", "length_penalty", "early_stopping",
})  # fmt: skip
"""Rows of the table of sampling parameters that are right on this path. A parameter that is not in it is not ignored: a row
that sets it takes the reference."""


_OTHERS: dict[type[SamplingParams], tuple[tuple[str, Any], ...]] = {}


def _others(table: type[SamplingParams]) -> tuple[tuple[str, Any], ...]:
    """Parameters that are not implemented here, with their defaults."""
    found = _OTHERS.get(table)
    if found is None:
        found = _OTHERS[table] = tuple((row.name, row.default) for row in fields(table) if row.name not in IMPLEMENTED)
    return found


def is_implemented(params: SamplingParams) -> bool:
    """Whether the device draws with all parameters that are set."""
    others = _others(type(params))
    return not others or all(getattr(params, name) == default for name, default in others)


def is_single(seq: ScheduledSeq) -> bool:
    """Can it be drawn here?"""
    return seq.num_draws == 1 and not seq.num_candidates and not seq.num_drafts


def is_plain(seq: ScheduledSeq) -> bool:
    """Can its draw be sent at once: it does not depend on its tokens, and the host does not wait for the logits?"""
    return seq.history is None and is_single(seq) and is_implemented(seq.sampling)


class Drawn:
    """Ids on their way to the host."""

    def __init__(
        self, here: Tensor, sampled: Sequence[int], num_seqs: int, *, on_device: bool, check: Callable[[], None]
    ) -> None:
        """here: [len(sampled)] int32 in host memory, valid once what is on the stream by now has ended. check: see DeviceDraw."""
        self._check = check
        self._here, self._sampled, self._num_seqs = here, sampled, num_seqs
        self.refusals: dict[int, str] = {}
        """Row -> why it has no token, should it have none."""
        self.logprobs: tuple[list[int], LogprobsOut] | None = None
        """Sequences, and of each the entry."""
        self._copied = torch.cuda.Event() if on_device else None
        if self._copied is not None:
            self._copied.record()

    def done(self) -> bool:
        return self._copied is None or bool(self._copied.query())

    def fill(self, result: StepResult) -> None:
        """Wait for them. Raises: what `check` raises."""
        if self._copied is not None:
            self._copied.synchronize()
        self._check()
        for row, (token, i) in enumerate(zip(self._here.tolist(), self._sampled, strict=True)):
            if token == BAD:
                result.bad_rows[i] = BAD_ROW
            elif token == NONE_LEFT:
                result.refused_rows[i] = self.refusals.get(row, EMPTY_CHOICE)
            else:
                result.token_ids[i] = (token,)
        if self.logprobs is not None:
            for i, entry in zip(self.logprobs[0], self.logprobs[1].take(), strict=True):
                if result.token_ids[i]:
                    result.logprobs[i] = (entry,)

    def result(self) -> StepResult:
        result = StepResult(token_ids=[()] * self._num_seqs)
        self.fill(result)
        return result


class DeviceDraw:
    """Its own uploads: the step's numbers are still being read when the draws are sent. In turns: a buffer is written again
    only when its last copy has been made, and that stands behind the step before.

    Args:
        max_rows: of one step.
        check: called when the host has waited for draws, before anyone sees them; raises when they mean nothing.
    """

    def __init__(self, device: torch.device, max_rows: int, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._on_device = device.type == "cuda"
        self._uploads = [[Upload(device) for _ in range(4)] for _ in range(_TURNS)]
        self._here = [torch.zeros(max_rows, dtype=torch.int32, pin_memory=self._on_device) for _ in range(_TURNS)]
        self._turn = 0
        self.drawn = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """The last step's draws, in the order of its sampled sequences, at one address for ever: graphs read it."""

    def draw(
        self, seqs: Sequence[ScheduledSeq], sampled: Sequence[int], logits: Tensor, eos_token_ids: Sequence[int] = (),
        ended: Container[int] = (),
    ) -> Drawn:  # fmt: skip
        """No sync where all rows are is_implemented; at most `_TURNS` - 1 may be on their way.

        Args:
            sampled: of seqs, the rows of logits [len(sampled), vocab_size]; each is_single.
            ended: of seqs, those whose token nobody wants: their constraints are left alone.
        """
        self._turn = (self._turn + 1) % _TURNS
        plain, constrained, asked, known = self._uploads[self._turn]
        some = [seqs[i] for i in sampled]
        drawn, here = self.drawn[: len(some)], self._here[self._turn][: len(some)]
        others: list[int] = []
        if any(_others(table) for table in {type(seq.sampling) for seq in some}):
            others = [row for row, i in enumerate(sampled) if i not in ended and not is_implemented(seqs[i].sampling)]
        skipped = set(others)
        rows = [
            row
            for row, i in enumerate(sampled)
            if seqs[i].history is not None and i not in ended and row not in skipped
        ]
        constraints = {
            row: _advance(some[row], eos_token_ids) for row in (*rows, *others) if some[row].history is not None
        }
        skipped.update(rows)
        if len(skipped) < len(some):
            self._plain(plain, some, skipped, logits, drawn)
        if rows:
            draw_constrained(
                constrained, [some[row] for row in rows], rows, [constraints[row] for row in rows], logits, drawn
            )
        if others:
            _draw_reference(known, some, others, constraints, logits, drawn)
        here.copy_(drawn, non_blocking=True)
        wanted = [row for row, i in enumerate(sampled) if seqs[i].top_logprobs is not None and i not in ended]
        logprobs = None
        if wanted:
            tops = [some[row].top_logprobs or 0 for row in wanted]
            logprobs = [sampled[row] for row in wanted], LogprobsOut(asked, wanted, tops, logits, drawn)
        out = Drawn(here, list(sampled), len(seqs), on_device=self._on_device, check=self._check)
        out.logprobs = logprobs
        out.refusals = {row: constraint.trouble or EMPTY_CHOICE for row, constraint in constraints.items()}
        return out

    @staticmethod
    def _plain(
        upload: Upload, seqs: Sequence[ScheduledSeq], skipped: Container[int], logits: Tensor, out: Tensor
    ) -> None:
        """skipped: rows whose token is drawn otherwise; they cost least as greedy ones."""
        greedy = [seq.sampling.greedy or row in skipped for row, seq in enumerate(seqs)]
        if all(greedy):
            sample_rows(logits, out=out)
            return
        draws, top_k, shares = upload.send(draw_numbers(seqs, greedy))
        thresholds = row_thresholds(logits, top_k, shares.view(torch.float32).view(-1, 4))
        sample_rows(logits, draws.view(-1, 4), thresholds, out)


def _draw_reference(
    upload: Upload, seqs: Sequence[ScheduledSeq], rows: Sequence[int], constraints: Mapping[int, Constraint],
    logits: Tensor, drawn: Tensor,
) -> None:  # fmt: skip
    """drawn[row] = a token of each of `rows` of logits, or BAD or NONE_LEFT, by engine.exec.sampler; waits for the logits."""
    draws = [Draw(seqs[row].sampling, seqs[row].output_index, seqs[row].choice, constraints.get(row)) for row in rows]
    found = draw_tokens(logits[list(rows)], draws)
    tokens = [
        BAD if at in found.bad else NONE_LEFT if at in found.refused else token
        for at, token in enumerate(found.token_ids)
    ]
    places, ids = upload.send((rows, tokens))
    drawn.index_copy_(0, places.long(), ids)


def _advance(seq: ScheduledSeq, eos_token_ids: Sequence[int]) -> Constraint:
    seq.memo = constraint = constraint_of(seq.memo, seq.sampling, eos_token_ids, seq.grammar)
    assert seq.history is not None
    constraint.advance(seq.history, seq.num_prompt)
    return constraint


class DeviceStep:
    """A step of decoding sequences on the device. `draw` at once, or when the tokens of the step before are known."""

    def __init__(
        self, drawer: DeviceDraw, seqs: Sequence[ScheduledSeq], sampled: Sequence[int], logits: Tensor,
        eos_token_ids: Sequence[int],
    ) -> None:  # fmt: skip
        self._drawer, self._seqs, self._sampled = drawer, list(seqs), sampled
        self._logits: Tensor | None = logits
        self._eos = eos_token_ids
        self._drawn: Drawn | None = None

    def draw(self, ended: Container[int] = ()) -> None:
        """The first call counts."""
        if self._logits is not None:
            logits, self._logits = self._logits, None
            self._drawn = self._drawer.draw(self._seqs, self._sampled, logits, self._eos, ended)

    def done(self) -> bool:
        return self._drawn is not None and self._drawn.done()

    def result(self) -> StepResult:
        assert self._drawn is not None, "nothing was drawn yet"
        return self._drawn.result()
