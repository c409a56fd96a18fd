"""The interface between the grammar back ends and the sampler, and what the back ends share.

A mask is numpy int32 [ceil(vocab_size / 32)]: token t may be drawn if bit t % 32 of word t // 32 is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.int32]

SLOW_S = 0.5
"""A matcher that takes longer for one token, of the step thread's CPU time, is given up: every request of the batch waits for
it. A machine that is too busy to run that thread is no fault of the grammar."""
SLOW = "the grammar takes too long to follow"
NOT_ALLOWED = "a token came that the grammar does not allow"


class Matcher(Protocol):
    """One choice's place in a grammar. Used by the step thread only; a function of the tokens it was fed.

    Args (fields):
        num_words: of the masks. slow: following it took too long; it must not be called again.
    """

    num_words: int

    @property
    def slow(self) -> bool: ...

    def accept(self, token_id: int) -> bool:
        """Take in the next output token. Returns: whether the grammar allows it; nothing may follow one that it does not."""
        ...

    def fill(self, mask: Mask) -> None:
        """Write what may follow."""
        ...


class Program(Protocol):
    """A compiled grammar. Shared by requests and threads; its matchers are not."""

    size_bytes: int

    def matcher(self) -> Matcher: ...


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def mask_of(token_ids: Sequence[int], vocab_size: int) -> Mask:
    """A mask that allows these tokens only."""
    bits = np.zeros(mask_words(vocab_size) * 32, dtype=np.uint8)
    bits[np.asarray(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_ids(mask: Mask, vocab_size: int) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])


class FirstToken:
    """Program of a worker that draws the first token only, under a mask that another one worked out."""

    def __init__(self, mask: bytes) -> None:
        self._mask = np.frombuffer(mask, dtype=np.int32)
        self.num_words, self.slow = len(self._mask), False
        self.size_bytes = len(mask)

    def matcher(self) -> Matcher:
        return self

    def accept(self, token_id: int) -> bool:
        return False

    def fill(self, mask: Mask) -> None:
        mask[:] = self._mask


class AfterText:
    """Program that lets everything but an end pass until a text has come; `inner` begins with the token after it.

    Args:
        token_bytes: bytes of a token.
    """

    def __init__(
        self,
        inner: Program,
        text: str,
        token_bytes: Callable[[int], bytes],
        vocab_size: int,
        end_token_ids: Sequence[int],
    ) -> None:
        self._inner = inner
        self._text = text.encode()
        self._token_bytes = token_bytes
        self._free = ~mask_of(end_token_ids, vocab_size)
        self.size_bytes = inner.size_bytes

    def matcher(self) -> Matcher:
        return _AfterText(self._inner.matcher(), self._text, self._token_bytes, self._free)


class _AfterText:
    def __init__(self, inner: Matcher, text: bytes, token_bytes: Callable[[int], bytes], free: Mask) -> None:
        self._inner = inner
        self._text = text
        self._token_bytes = token_bytes
        self._free = free
        self._tail = b""
        self._waits = True
        self.num_words = inner.num_words

    @property
    def slow(self) -> bool:
        return self._inner.slow

    def accept(self, token_id: int) -> bool:
        if not self._waits:
            return self._inner.accept(token_id)
        seen = self._tail + self._token_bytes(token_id)
        self._waits = self._text not in seen
        self._tail = seen[-(len(self._text) - 1) :] if len(self._text) > 1 else b""
        return True

    def fill(self, mask: Mask) -> None:
        if self._waits:
            mask[:] = self._free
        else:
            self._inner.fill(mask)


def first_mask(program: Program) -> bytes:
    """What FirstToken takes."""
    matcher = program.matcher()
    mask = np.zeros(matcher.num_words, dtype=np.int32)
    matcher.fill(mask)
    return mask.tobytes()
