"""Prefixes of the prompts that wait or are being computed: what another request of them need not compute. Pure.

Only every fourth block of a prompt is remembered. A prompt is forgotten GRACE_S after its request ended: by then the cache
events of its blocks have arrived.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TypeVar

from diptych.router.placement.block_table import Keys

K = TypeVar("K", bytes, int)
STRIDE = 4
GRACE_S = 1.0
_ROOT = b""


class PrefixesInFlight:
    """By the name of the request. A name may be added again, with no effect."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[list[bytes], int]] = {}
        self._ended: deque[tuple[float, str]] = deque()
        self._marks: Counter[bytes] = Counter()
        """Remembered blocks of all prompts."""
        self._ends: dict[bytes, Counter[int]] = {}
        """By the last remembered block of prompts: tokens from there to the end of the answer."""

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, name: str, keys: Keys, block_size: int, num_tokens: int, max_answer: int) -> None:
        """`keys`: [blocks, 2], of the whole blocks of `num_tokens` prompt tokens."""
        if name in self._prompts:
            return
        marks = _marks(keys)
        more = num_tokens + max_answer - max(0, len(marks) - 1) * STRIDE * block_size
        self._prompts[name] = marks, more
        self._marks.update(marks)
        self._ends.setdefault(marks[-1] if marks else _ROOT, Counter())[more] += 1

    def end(self, name: str, now: float) -> None:
        """The request ended. `now`: never less than before."""
        if name in self._prompts:
            self._ended.append((now + GRACE_S, name))
        while self._ended and self._ended[0][0] <= now:
            self._forget(self._ended.popleft()[1])

    def _forget(self, name: str) -> None:
        known = self._prompts.pop(name, None)
        if known is None:
            return
        marks, more = known
        for mark in marks:
            _less(self._marks, mark)
        last = marks[-1] if marks else _ROOT
        _less(self._ends[last], more)
        if not self._ends[last]:
            del self._ends[last]

    def shared_tokens(self, keys: Keys, block_size: int) -> int:
        """Most leading tokens of a prompt that prompts in flight, or their answers, may have in common with it."""
        marks = _marks(keys) if self._prompts else []
        run = next((i for i, mark in enumerate(marks) if mark not in self._marks), len(marks))
        stride = STRIDE * block_size
        ends = [(0, _ROOT), *((i * stride, mark) for i, mark in enumerate(marks[:run]))]
        return max(run * stride, *(start + max(self._ends.get(mark, ()), default=0) for start, mark in ends))


def _marks(keys: Keys) -> list[bytes]:
    return [key.tobytes() for key in keys[::STRIDE]]


def _less(counter: Counter[K], key: K) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
