"""Time in which this process could receive messages. A worker's silence is measured in it: while this event loop is
blocked (garbage collection, a stopped process, swapping) no answer can be received, and no worker must be considered
dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.05
_MAX_STEP_S = 2 * TICK_S
"""Most time that one tick adds: the loop was receiving no longer than that."""


class LoopUptime:
    """A clock driven by the event loop: it advances while `run` runs, and stops with the loop. `now`: the real clock,
    in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._at = now()
        self._receiving_s = 0.0

    def tick(self) -> None:
        """Called by the loop every TICK_S."""
        self._receiving_s = self.receiving_s()
        self._at = self._now()

    def receiving_s(self) -> float:
        """Seconds in which the loop could receive, since the start."""
        return self._receiving_s + min(max(0.0, self._now() - self._at), _MAX_STEP_S)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()
