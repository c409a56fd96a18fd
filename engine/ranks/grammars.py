"""Grammars over ranks in processes of their own: the engine follows them, and the ranks are sent what may be drawn next.

engine   Follower, in the sequence's memo: the matcher and its tokens  -> masks of the next position and of its drafts
rank     SentMasks: a program that allows what was sent, for the sampler's Constraint
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.engine.grammar.program import NOT_ALLOWED, SLOW, Mask, Matcher, Program
from diptych.engine.step_messages import ScheduledSeq

_TROUBLES = ("", NOT_ALLOWED, SLOW)


class Follower:
    """One sequence's place in its grammar, in the engine's process."""

    def __init__(self, grammar: Program) -> None:
        self._matcher = grammar.matcher()
        self._matched = 0
        self._trouble = ""

    def masks(self, outputs: Sequence[int]) -> tuple[int, list[Mask]]:
        """Args: outputs: begin with those of the last call. Returns: the trouble's number, and what may follow them: one mask."""
        for token in outputs[self._matched :]:
            if not self._trouble and not self._matcher.accept(token):
                self._trouble = SLOW if self._matcher.slow else NOT_ALLOWED
        self._matched = len(outputs)
        mask = _mask(self._matcher)
        if not self._trouble:
            self._matcher.fill(mask)
            if self._matcher.slow:
                self._trouble = SLOW
        return _TROUBLES.index(self._trouble), [mask]


def masks_for(seq: ScheduledSeq) -> tuple[int, list[Mask]]:
    """Of a sequence with history and grammar: the trouble's number (0: none), and what may be drawn at its position; with drafts
    also behind each of them, as long as the grammar allows them."""
    assert seq.history is not None
    assert seq.grammar is not None
    outputs = seq.history[seq.num_prompt :]
    if not isinstance(seq.memo, Follower):
        seq.memo = Follower(seq.grammar)
    trouble, masks = seq.memo.masks(outputs)
    if seq.num_drafts and not trouble:
        matcher = seq.grammar.matcher()  # one cannot go back: another one goes on
        for token in outputs:
            matcher.accept(token)
        for draft in seq.token_ids[-seq.num_drafts :]:
            if not matcher.accept(draft):
                break  # it is not drawn, so nothing is drawn behind it
            masks.append(_mask(matcher))
            matcher.fill(masks[-1])
    return trouble, masks


def _mask(matcher: Matcher) -> Mask:
    return np.zeros(matcher.num_words, dtype=np.int32)


class SentMasks:
    """A Program and its Matcher, in a rank's process: what the engine has sent for the step."""

    def __init__(self) -> None:
        self.size_bytes = self.num_words = 0
        self._trouble = ""
        self._masks: Sequence[Mask] = ()
        self._at = -1

    def update(self, trouble: int, masks: Sequence[Mask]) -> None:
        """For another step."""
        self._trouble, self._masks, self._at = _TROUBLES[trouble], masks, -1
        self.num_words = len(masks[0])
        self.size_bytes = sum(mask.nbytes for mask in masks)

    @property
    def slow(self) -> bool:
        return self._trouble == SLOW

    def matcher(self) -> Matcher:
        return self

    def accept(self, token_id: int) -> bool:
        """A token of the history; one behind the first mask is a draft that was drawn."""
        if self._at >= 0:
            self._at += 1
        return not self._trouble

    def fill(self, mask: Mask) -> None:
        self._at = max(self._at, 0)
        mask[:] = self._masks[self._at] if self._at < len(self._masks) else 0
