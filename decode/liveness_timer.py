"""Notices that a peer says nothing any more, on this worker's own time: a stop of this process does not count as silence."""

from __future__ import annotations

import asyncio

_TICKS = 6


class LivenessTimer:
    """Counts short waits of its own and not seconds: after a stop of this process (or an event loop that was held up) the
    peer's words lie in the socket unread, and one late tick is all that has passed.

    Args:
        limit_s: how long the peer may say nothing.
    """

    def __init__(self, limit_s: float) -> None:
        self._tick_s = limit_s / _TICKS
        self._ticks = 0

    def heard(self) -> None:
        self._ticks = 0

    async def lasts(self) -> None:
        """Returns once the peer has said nothing for the limit."""
        while self._ticks < _TICKS:
            await asyncio.sleep(self._tick_s)
            self._ticks += 1
