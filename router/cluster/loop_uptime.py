"""Time in which this process was able to listen. A worker's silence is measured in it: while our own loop stands still (a
large collection, a stopped process, a machine that swaps) nobody's answer can be heard, and nobody is dead for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.05
_MAX_STEP_S = 2 * TICK_S
"""What one tick may add: a loop that comes late was listening no longer than that."""


class Listening:
    """A clock of the loop's own ticks: it runs as long as `run` does, and stands still with the loop.

    Args:
        now: the real clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._at = now()
        self._heard_s = 0.0

    def tick(self) -> None:
        """Called by the loop, every TICK_S while it is well."""
        self._heard_s = self.heard_s()
        self._at = self._now()

    def heard_s(self) -> float:
        """Seconds that the loop has listened, since the start."""
        return self._heard_s + min(max(0.0, self._now() - self._at), _MAX_STEP_S)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()
