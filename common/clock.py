"""Time as an argument: the monotonic clock in production, a clock that tests and simulations advance."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic clock of this process; not comparable with another process's."""
        ...


class MonotonicClock:
    now = staticmethod(time.monotonic)


class FakeClock:
    """A clock that moves only by `advance`."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"seconds={seconds}: must not be negative")
        self._now += seconds
