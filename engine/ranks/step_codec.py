"""Step messages as bytes, for ranks in processes of their own: numbers as 32-bit integers, and JSON for what is rare.

    | lengths of the first two, 4 bytes each | JSON | integers | masks of grammars |

Both ends remember the sequences of the last steps. So a step has what is new of each only: its numbers, the ends of its block
tables and of its history. `SeqEncoder` and `SeqDecoder` forget in step: every message must get to every decoder, in order.

A sequence's memo stays in its process, and so does its grammar: the sequence comes with the mask of its next token
(engine.ranks.grammars).
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Container, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import numpy as np

from diptych.common.sampling import EarlyStopping, SamplingParams, TokenLogprobs
from diptych.engine.grammar.program import Mask
from diptych.engine.ranks.grammars import SentMasks, masks_for
from diptych.engine.step_messages import (
    BlockCopy,
    Candidate,
    ComputedFrom,
    CopyKind,
    ScheduledSeq,
    StepResult,
)

_LENGTHS = struct.Struct("<II")
_NUMBERS = (
    "start", "sample", "output_index", "num_drafts", "choice", "num_draws", "num_candidates", "num_prompt", "adapter", "vouch",
)  # fmt: skip
"""Fields of a sequence that are integers or flags."""
_HEAD = 3
"""Integers in front of _NUMBERS: number of the sequence, _FRESH and others, top_logprobs + 1."""
_FRESH, _HISTORY, _GRAMMAR = 1, 2, 4
"""The object is another one than before, which may still be in use; it has a history; it has a grammar."""
_KEPT_STEPS = 64
"""A sequence that had no part in so many steps is forgotten."""
_SAMPLING_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_NO_WORDS: Mask = np.empty(0, dtype=np.int32)
_numbers = attrgetter(*_NUMBERS)


class _Sent:
    """What the decoders know of a sequence."""

    def __init__(self, number: int, seq: ScheduledSeq) -> None:
        self.number, self.seq, self.sampling = number, seq, seq.sampling
        self.tables: list[list[int]] = []
        self.history: Sequence[int] | None = None
        self.num_history = 0
        self.used = 0


class SeqEncoder:
    """One for all ranks."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int], _Sent] = {}
        """By attempt and choice."""
        self._next, self._step = 0, 0

    def encode(self, seqs: Sequence[ScheduledSeq], sources: Sequence[int] | None = None) -> bytes:
        """The sequences of a step.

        Args: sources: of a step that is launched, see ModelRunner.launch; masks follow with its draws. None: it is not.
        """
        self._step += 1
        new: list[Any] = []
        masks: list[Mask] = []
        ints = [len(seqs), len(sources or ()), *(sources or ())]
        for seq in seqs:
            name = seq.attempt, seq.choice
            sent = self._sent.get(name)
            if sent is None or sent.sampling is not seq.sampling:
                sent = self._sent[name] = _Sent(self._next, seq)
                self._next += 1
                new.append([sent.number, seq.attempt, _sampling(seq.sampling)])
            sent.used = self._step
            flags = 0
            if sent.seq is not seq:
                flags, sent.seq = _FRESH, seq
            if seq.history is not None:
                flags |= _HISTORY
                if seq.grammar is not None:
                    flags |= _GRAMMAR
            ints += (sent.number, flags, 0 if seq.top_logprobs is None else seq.top_logprobs + 1)
            ints += _numbers(seq)
            for values in (
                seq.token_ids,
                seq.prompt_targets,
                seq.first_blocks,
            ):  # a call each would cost more than the copy
                ints.append(len(values))
                ints += values
            self._put_tables(ints, sent, seq.block_tables)
            if seq.history is not None:
                _put_history(ints, sent, seq.history)
                if seq.grammar is not None:
                    _put_masks(ints, masks, seq if sources is None else None)
        self._forget()
        return _joined(new or None, ints, masks)

    def encode_draw(self, seqs: Sequence[ScheduledSeq], ended: Container[int]) -> bytes:
        """What is drawn of a launched step waits for these histories. The step's sequences, in its order."""
        masks: list[Mask] = []
        ints: list[int] = []
        for i, seq in enumerate(seqs):
            if i in ended:
                ints += (i, -1)
            elif seq.history is not None:
                sent = self._sent[seq.attempt, seq.choice]
                ints += (i, sent.number)
                _put_history(ints, sent, seq.history)
                _put_masks(ints, masks, seq if seq.grammar is not None else None)
        return _joined(None, ints, masks)

    @staticmethod
    def _put_tables(ints: list[int], sent: _Sent, tables: Sequence[list[int]]) -> None:
        if len(sent.tables) != len(tables):
            sent.tables = [[] for _ in tables]
        ints.append(len(tables))
        for known, table in zip(sent.tables, tables, strict=True):
            count = len(known)
            if known != (table if len(table) == count else table[:count]):
                known.clear()
                count = 0
            ints.append(count)
            if len(table) == count:
                ints.append(0)
            else:
                tail = table[count:]
                known += tail
                ints.append(len(tail))
                ints += tail

    def _forget(self) -> None:
        if not self._step % _KEPT_STEPS:
            self._sent = {name: sent for name, sent in self._sent.items() if sent.used > self._step - _KEPT_STEPS}


class _Known:
    """A sequence as the encoder has described it."""

    def __init__(self, attempt: str, sampling: SamplingParams) -> None:
        self.seq = ScheduledSeq(attempt, [], 0, (), False, sampling, 0)
        self.tables: tuple[list[int], ...] = ()
        self.history: list[int] = []
        self.masks = SentMasks()
        self.used = 0


class SeqDecoder:
    """Of one rank. The same sequence is the same object in its next step, unless the encoder had another one."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._step = 0

    def decode(self, data: bytes) -> tuple[list[ScheduledSeq], list[int]]:
        """Returns: the sequences; their sources, if the step is launched."""
        self._step += 1
        new, ints, words = _parted(data)
        for number, attempt, sampling in new or ():
            self._known[number] = _Known(attempt, _params(sampling))
        masks = _Masks(words)
        at = 2 + ints[1]
        sources = ints[2:at]
        seqs = []
        for _ in range(ints[0]):
            number, flags, top = ints[at : at + _HEAD]
            known = self._known[number]
            known.used = self._step
            seq = known.seq = replace(known.seq) if flags & _FRESH else known.seq
            at += _HEAD
            (
                seq.start, sample, seq.output_index, seq.num_drafts, seq.choice, seq.num_draws, seq.num_candidates,
                seq.num_prompt, seq.adapter, vouch,
            ) = ints[at : at + len(_NUMBERS)]  # fmt: skip
            at += len(_NUMBERS)
            seq.sample, seq.vouch, seq.top_logprobs = bool(sample), bool(vouch), top - 1 if top else None
            end = at + 1 + ints[at]
            seq.token_ids = ints[at + 1 : end]
            at = end + 1 + ints[end]
            seq.prompt_targets = ints[end + 1 : at]
            end = at + 1 + ints[at]
            seq.first_blocks = tuple(ints[at + 1 : end])
            at = end
            at = _take_tables(ints, at, known)
            seq.block_tables = known.tables
            seq.history = seq.grammar = None
            if flags & _HISTORY:
                at = _take_history(ints, at, known)
                seq.history = known.history
            if flags & _GRAMMAR:
                seq.grammar = known.masks
                at = masks.take(ints, at, known.masks)
            seqs.append(seq)
        if not self._step % _KEPT_STEPS:
            self._known = {n: known for n, known in self._known.items() if known.used > self._step - _KEPT_STEPS}
        return seqs, sources

    def decode_draw(self, data: bytes, seqs: Sequence[ScheduledSeq]) -> set[int]:
        """Fills the histories of these sequences, which are those of a launched step. Returns: those that have ended."""
        _, ints, words = _parted(data)
        ended, at, masks = set(), 0, _Masks(words)
        while at < len(ints):
            i, number = ints[at : at + 2]
            at += 2
            if number < 0:
                ended.add(i)
                continue
            known = self._known[number]
            at = _take_history(ints, at, known)
            seqs[i].history = known.history
            at = masks.take(ints, at, known.masks)
        return ended


class _Masks:
    """Takes masks from their part of a message, one after the other."""

    def __init__(self, words: Mask) -> None:
        self._words, self._at = words, 0

    def take(self, ints: list[int], at: int, into: SentMasks) -> int:
        count, size, trouble = ints[at : at + 3]
        if count:
            end = self._at + count * size
            into.update(trouble, list(self._words[self._at : end].reshape(count, size)))
            self._at = end
        return at + 3


def _put(ints: list[int], values: Sequence[int]) -> None:
    ints.append(len(values))
    ints += values


def _taken(ints: list[int], at: int) -> tuple[list[int], int]:
    end = at + 1 + ints[at]
    return ints[at + 1 : end], end


def _put_history(ints: list[int], sent: _Sent, history: Sequence[int]) -> None:
    if sent.history is not history or len(history) < sent.num_history:
        sent.history, sent.num_history = history, 0
    ints.append(sent.num_history)
    _put(ints, history[sent.num_history :])
    sent.num_history = len(history)


def _put_masks(ints: list[int], masks: list[Mask], seq: ScheduledSeq | None) -> None:
    """Number of masks, words of each, and the number of what is wrong. None: none."""
    if seq is None:
        ints += (0, 0, 0)
        return
    trouble, some = masks_for(seq)
    ints += (len(some), len(some[0]), trouble)
    masks += some


def _take_history(ints: list[int], at: int, known: _Known) -> int:
    count = ints[at]
    tail, at = _taken(ints, at + 1)
    if count:
        known.history += tail
    else:
        known.history = tail
    return at


def _take_tables(ints: list[int], at: int, known: _Known) -> int:
    if len(known.tables) != ints[at]:
        known.tables = tuple([] for _ in range(ints[at]))
    at += 1
    for table in known.tables:
        if not ints[at]:
            table.clear()
        tail, at = _taken(ints, at + 1)
        table += tail
    return at


def _joined(head: Any, ints: Sequence[int], masks: Sequence[Mask] = ()) -> bytes:
    text = b"" if head is None else json.dumps(head, separators=(",", ":")).encode()
    numbers = array("i", ints).tobytes()
    return b"".join((_LENGTHS.pack(len(text), len(numbers)), text, numbers, *(mask.tobytes() for mask in masks)))


def _parted(data: bytes) -> tuple[Any, list[int], Mask]:
    num_text, num_numbers = _LENGTHS.unpack_from(data)
    begin, ints = _LENGTHS.size + num_text, array("i")
    end = begin + num_numbers
    ints.frombytes(data[begin:end])
    words = np.frombuffer(data, dtype=np.int32, offset=end) if end < len(data) else _NO_WORDS
    return json.loads(data[_LENGTHS.size : begin]) if num_text else None, ints.tolist(), words


def encode_result(result: StepResult) -> bytes:
    rare = {
        "bad_rows": list(result.bad_rows.items()),
        "refused_rows": list(result.refused_rows.items()),
        "logprobs": [[i, [_entry(one) for one in row]] for i, row in result.logprobs.items()],
        "more_draws": [[i, [[t, _entry(one)] for t, one in row]] for i, row in result.more_draws.items()],
        "candidates": [
            [i, [[c.token_id, c.score, _entry(c.logprobs)] for c in row]] for i, row in result.candidates.items()
        ],
        "prompt_logprobs": [[i, [_entry(one) for one in row]] for i, row in result.prompt_logprobs.items()],
        "computed_from": [
            [i, one.num_tokens, one.digest.hex(), one.block_size] for i, one in result.computed_from.items()
        ],
    }
    ints = [len(row) for row in result.token_ids]
    for row in result.token_ids:
        ints += row
    return _joined(rare if any(rare.values()) else None, [len(result.token_ids), *ints])


def decode_result(data: bytes) -> StepResult:
    values, ints, _ = _parted(data)
    at, rows = 1 + ints[0], []
    for count in ints[1:at]:
        rows.append(tuple(ints[at : at + count]))
        at += count
    if values is None:
        return StepResult(rows)
    return StepResult(
        token_ids=rows,
        bad_rows=dict(values["bad_rows"]),
        refused_rows=dict(values["refused_rows"]),
        logprobs={i: tuple(_known(one) for one in row) for i, row in values["logprobs"]},
        more_draws={i: [(t, _logprobs(one)) for t, one in row] for i, row in values["more_draws"]},
        candidates={
            i: [Candidate(t, score, _logprobs(one)) for t, score, one in row] for i, row in values["candidates"]
        },
        prompt_logprobs={i: [_known(one) for one in row] for i, row in values["prompt_logprobs"]},
        computed_from={
            i: ComputedFrom(count, bytes.fromhex(digest), size) for i, count, digest, size in values["computed_from"]
        },
    )


def encode_copies(copies: Sequence[BlockCopy]) -> bytes:
    ints: list[int] = []
    for copy in copies:
        ints += (_KINDS.index(copy.kind), copy.src, copy.dst, copy.group)
    return array("i", ints).tobytes()


def decode_copies(data: bytes) -> list[BlockCopy]:
    ints = array("i")
    ints.frombytes(data)
    return [BlockCopy(_KINDS[ints[i]], *ints[i + 1 : i + 4]) for i in range(0, len(ints), 4)]


_KINDS = tuple(CopyKind)


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    values = {name: getattr(params, name) for name in _SAMPLING_DEFAULTS if name != "grammar"}
    changed = {name: value for name, value in values.items() if value != _SAMPLING_DEFAULTS[name]}
    if "early_stopping" in changed:
        changed["early_stopping"] = params.early_stopping.value
    return changed


def _params(values: dict[str, Any]) -> SamplingParams:
    if "early_stopping" in values:
        values["early_stopping"] = EarlyStopping(values["early_stopping"])
    return SamplingParams(**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def _entry(one: TokenLogprobs | None) -> list[Any] | None:
    return None if one is None else [one.token_id, one.logprob, one.rank, one.top]


def _known(values: list[Any]) -> TokenLogprobs:
    token_id, logprob, rank, top = values
    return TokenLogprobs(token_id, logprob, rank, _tuples(top))


def _logprobs(values: list[Any] | None) -> TokenLogprobs | None:
    return None if values is None else _known(values)
