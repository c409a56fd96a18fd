"""Numbers that the engine's process and all ranks see: signs of life, and the agreement to give a step up.

Ranks that exchange their parts in every layer must give a step up at the same layer, or one would wait for another. The first
rank decides, a few looks ahead of itself:

    the engine           sets `wanted` to the step's call
    rank 0, look n       reads it, and sets `last` to n + AHEAD
    every rank, look n   gives up once `last` is reached

A look stands between two layers, and in each layer a rank needs what rank 0 sent: no rank can be AHEAD looks in front of it.
"""

from __future__ import annotations

from diptych.common.shared_memory import SharedArea

AHEAD = 4
_WANTED, _LAST, _COUNTERS, _APART = 0, 8, 16, 8
"""Places in 64-bit words, each in a cache line of its own."""


class Board:
    """Args: area: of the engine's process; None: a new one."""

    def __init__(self, num_ranks: int, area: SharedArea | None = None) -> None:
        self.num_ranks = num_ranks
        self.area = area or SharedArea(8 * (_COUNTERS + _APART * num_ranks))
        self.words = memoryview(self.area.memory).cast("q")

    def place_of(self, rank: int) -> int:
        """Of its counter, in `words`. Behind it: 1 while the rank carries out a frame."""
        return _COUNTERS + _APART * rank

    @property
    def busy(self) -> bool:
        """A rank carries out a frame."""
        return any(self.words[self.place_of(rank) + 1] for rank in range(self.num_ranks))

    def counters(self) -> list[int]:
        return [self.words[self.place_of(rank)] for rank in range(self.num_ranks)]

    def begin_step(self) -> None:
        """No rank computes: nothing is to be given up."""
        self.words[_WANTED] = self.words[_LAST] = 0

    def give_up(self, call: int) -> None:
        """The step of this call, if its ranks get there."""
        self.words[_WANTED] = call


class Agreement:
    """A rank's `should_abort` of one step. Args: decides: it is the first rank."""

    def __init__(self, board: Board, call: int, *, decides: bool) -> None:
        self._words, self._call, self._decides = board.words, call, decides
        self._looks = 0

    def __call__(self) -> bool:
        self._looks += 1
        if self._decides and not self._words[_LAST] and self._words[_WANTED] == self._call:
            self._words[_LAST] = self._looks + AHEAD
        return 0 < self._words[_LAST] <= self._looks
