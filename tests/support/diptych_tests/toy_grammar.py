"""A grammar without a back end: even and odd tokens in turn."""

from __future__ import annotations

from diptych.engine.grammar.program import Mask, mask_of, mask_words


class Alternates:
    """Its program, and a matcher. It has no way back, so it must never see a token that is not accepted."""

    slow = False
    size_bytes = 0

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_words = mask_words(vocab_size)
        self.count = 0

    def matcher(self) -> Alternates:
        return Alternates(self._vocab_size)

    def accept(self, token_id: int) -> bool:
        allowed = token_id % 2 == self.count % 2
        self.count += 1
        return allowed

    def fill(self, mask: Mask) -> None:
        mask |= mask_of(range(self.count % 2, self._vocab_size, 2), self._vocab_size)
