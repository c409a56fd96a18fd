"""How long a request waits when there is no decode worker. Pure, except for the clock.

A router that just started has not seen its workers yet, and a worker's successor may be seen shortly after the worker
began to drain. An immediate error would fail requests during a rolling restart.
"""

from __future__ import annotations

from diptych.common.clock import Clock


class StartupGrace:
    """The grace period. `settle_s`: how long a decode worker may be missing, since the start or since one was usable."""

    def __init__(self, clock: Clock, settle_s: float) -> None:
        self._clock = clock
        self._settle_s = settle_s
        self._seen_at = clock.now()

    def saw(self, num_usable: int) -> None:
        """`num_usable`: number of usable decode workers."""
        if num_usable:
            self._seen_at = self._clock.now()

    def left_s(self) -> float:
        """Seconds left; 0.0: fail the request."""
        return max(0.0, self._seen_at + self._settle_s - self._clock.now())
