"""Detects a peer that stopped sending, without counting time in which this process was stopped."""

from __future__ import annotations

import asyncio

_TICKS = 6


class LivenessTimer:
    """Counts short waits instead of seconds: after a stop of this process (or a blocked event loop) the peer's messages
    are unread in the socket, and only one late tick has passed. `limit_s`: how long the peer may send nothing."""

    def __init__(self, limit_s: float) -> None:
        self._tick_s = limit_s / _TICKS
        self._ticks = 0

    def on_message(self) -> None:
        self._ticks = 0

    async def expired(self) -> None:
        """Return once the peer has sent nothing for the limit."""
        while self._ticks < _TICKS:
            await asyncio.sleep(self._tick_s)
            self._ticks += 1
