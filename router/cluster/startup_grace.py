"""How long a request is held back that finds no decode worker. Pure, but for the clock.

A router that has just started has not seen its workers yet, and one worker's successor may be seen a moment after the next one
began to drain: to refuse at once would fail requests in a rolling restart.
"""

from __future__ import annotations

from diptych.common.clock import Clock


class Settling:
    """Args:
    settle_s: how long a decode worker may be missing, since the start or since one was usable.
    """

    def __init__(self, clock: Clock, settle_s: float) -> None:
        self._clock = clock
        self._settle_s = settle_s
        self._seen_at = clock.now()

    def saw(self, num_usable: int) -> None:
        """Decode workers that are usable now."""
        if num_usable:
            self._seen_at = self._clock.now()

    def left_s(self) -> float:
        """How much longer; 0.0: refuse."""
        return max(0.0, self._seen_at + self._settle_s - self._clock.now())
