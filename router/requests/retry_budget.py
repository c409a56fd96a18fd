"""Limits replacements of requests to a share of the requests, so that retries never multiply an outage. Pure."""

from __future__ import annotations


class RetryBudget:
    """The budget. `share`: retries per request in the long run. `burst`: retries that may be saved up; the budget
    starts full."""

    def __init__(self, share: float = 0.2, burst: float = 20.0) -> None:
        self._share = share
        self._burst = burst
        self._left = burst

    @property
    def left(self) -> float:
        return self._left

    def on_request(self) -> None:
        self._left = min(self._burst, self._left + self._share)

    def take(self) -> bool:
        """Whether one more retry may be made now."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
