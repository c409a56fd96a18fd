"""The effect of one request's parameters on its logits, derived from its tokens: numpy, for every runner alike.

    logits + bias  ->  repetition penalty  ->  frequency and presence penalty  ->  what may not be drawn: -inf

A grammar's mask forbids, too. Where it allows nothing but an end, it overrides min_tokens and ignore_eos.

The state is derived from the tokens alone, so a preempted or transferred request samples the same tokens as an
undisturbed one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from diptych.common.sampling import SamplingParams
from diptych.engine.grammar.program import NOT_ALLOWED, SLOW, Mask, Program, mask_of, mask_words

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_NO_IDS: Ids = np.empty(0, dtype=np.int64)


def constraint_of(
    seq_memo: object | None, sampling: SamplingParams, eos_token_ids: Sequence[int], grammar: Program | None = None
) -> Constraint:
    """The constraint in a sequence's memo, or a new one."""
    return seq_memo if isinstance(seq_memo, Constraint) else Constraint(sampling, eos_token_ids, grammar)


class Constraint:
    """The state of one request. Call `advance` with its tokens, then read the fields.

    Args (fields):
        bias_ids, bias: added. allowed: all others are forbidden; None: no such limit. banned: forbidden now.
        seen, counts: distinct tokens that were seen, and how often among the outputs (0: in the prompt only).
        mask: what the grammar allows now, see engine.grammar.program; None: there is no grammar.
        trouble: why the grammar cannot go on; then the mask allows nothing.
    """

    def __init__(self, sampling: SamplingParams, eos_token_ids: Sequence[int], grammar: Program | None = None) -> None:
        self.repetition = np.float32(sampling.repetition_penalty)
        self.frequency = np.float32(sampling.frequency_penalty)
        self.presence = np.float32(sampling.presence_penalty)
        self.bias_ids = np.array([token for token, _ in sampling.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        self.allowed = (
            np.unique(np.array(sampling.allowed_token_ids, dtype=np.int64)) if sampling.allowed_token_ids else None
        )
        self._allowed_bits: Mask | None = None
        self.banned = _NO_IDS
        self._counts_prompt = sampling.repetition_penalty != 1.0
        self._counts_outputs = self._counts_prompt or bool(sampling.frequency_penalty or sampling.presence_penalty)
        self._bad_words = sampling.bad_words
        self._min_tokens = sampling.min_tokens
        self._ends = np.array(
            sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}), dtype=np.int64
        )
        self.mask: Mask | None = None
        self.trouble = ""
        self._matcher = None if grammar is None else grammar.matcher()
        self._matched = 0
        self._eos = np.array(eos_token_ids, dtype=np.int64)
        self._ignores_eos = sampling.ignore_eos
        self._ids: Ids = np.empty(64, dtype=np.int64)
        self._num: Floats = np.empty(64, dtype=np.float32)
        self._index: dict[int, int] = {}
        self._done = -1
        """Tokens of the history that are in the counts; -1: not begun."""

    @property
    def seen(self) -> Ids:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> Floats:
        return self._num[: len(self._index)]

    def permitted(self, vocab_size: int) -> Mask | None:
        """What may be drawn now, one bit a token as in engine.grammar.program; None: everything."""
        if self.allowed is None and self.mask is None and not len(self.banned):
            return None
        words = mask_words(vocab_size)
        bits = np.full(words, -1, dtype=np.int32) if self.mask is None else self.mask[:words].copy()
        if self.allowed is not None:
            if self._allowed_bits is None or len(self._allowed_bits) != words:
                self._allowed_bits = mask_of(self.allowed, vocab_size)  # type: ignore[arg-type]
            bits &= self._allowed_bits
        np.bitwise_and.at(bits, self.banned >> 5, ~(np.int32(1) << (self.banned & 31).astype(np.int32)))
        return bits

    def advance(self, history: Sequence[int], num_prompt: int) -> None:
        """Process the tokens since the last call.

        Args: history: prompt and outputs so far; it begins with that of the last call.
        """
        if self._counts_outputs:
            if self._done < 0:
                if self._counts_prompt:
                    for token in history[:num_prompt]:
                        self._count(token, 0.0)
                self._done = num_prompt
            for i in range(self._done, len(history)):
                self._count(history[i], 1.0)
            self._done = len(history)
        self.banned = self._forbidden(history, num_prompt)
        if self._matcher is not None:
            self._follow(history, num_prompt)

    def _follow(self, history: Sequence[int], num_prompt: int) -> None:
        matcher = self._matcher
        assert matcher is not None
        if self.mask is None:
            self.mask = np.zeros(matcher.num_words, dtype=np.int32)
        for i in range(num_prompt + self._matched, len(history)):
            if not self.trouble and not matcher.accept(history[i]):
                self.trouble = SLOW if matcher.slow else NOT_ALLOWED
        self._matched = len(history) - num_prompt
        self.mask[:] = 0
        if self.trouble:
            return
        matcher.fill(self.mask)
        if matcher.slow:
            self.trouble = SLOW
            self.mask[:] = 0
            return
        early = len(history) - num_prompt < self._min_tokens
        if early or self._ignores_eos:
            ends = np.union1d(self._ends, self._eos) if early else self._eos
            kept = self.mask.copy()
            np.bitwise_and.at(kept, ends >> 5, ~(np.int32(1) << (ends & 31).astype(np.int32)))
            if kept.any():
                self.mask = kept
            else:  # the text is complete: nothing but an end may follow
                self.banned = np.setdiff1d(self.banned, ends)

    def _count(self, token: int, amount: float) -> None:
        at = self._index.get(token)
        if at is not None:
            self._num[at] += amount
            return
        at = len(self._index)
        if at == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._num = np.concatenate((self._num, np.empty_like(self._num)))
        self._index[token] = at
        self._ids[at] = token
        self._num[at] = amount

    def _forbidden(self, history: Sequence[int], num_prompt: int) -> Ids:
        banned = self._ends if len(history) - num_prompt < self._min_tokens else _NO_IDS
        if not self._bad_words:
            return banned
        # A word counts wherever it began, in the prompt, too: the whole sequence must not appear.
        last = []
        for word in self._bad_words:
            head = len(word) - 1
            if head <= len(history) and (not head or tuple(history[-head:]) == word[:-1]):
                last.append(word[-1])
        return np.concatenate((banned, np.array(last, dtype=np.int64))) if last else banned


def apply(logits: Floats, constraint: Constraint) -> bool:
    """Change one row of logits in place, as the torch sampler does for many. Returns: whether a token is left."""
    logits[constraint.bias_ids] += constraint.bias
    seen = constraint.seen
    if len(seen):
        counts, some = constraint.counts, logits[seen]
        some = np.where(some > 0, some / constraint.repetition, some * constraint.repetition)
        logits[seen] = some - constraint.frequency * counts - constraint.presence * (counts > 0)
    if constraint.allowed is not None:
        kept = logits[constraint.allowed]
        logits[:] = -np.inf
        logits[constraint.allowed] = kept
    if constraint.mask is not None:
        bits = np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")[: len(logits)]
        logits[bits == 0] = -np.inf
    logits[constraint.banned] = -np.inf
    return bool((logits > -np.inf).any())
