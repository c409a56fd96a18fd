"""When tokens of an answer are handed on: at once while the event loop keeps up, merged once it does not. Pure: time is told.

A burst begins when a waiting reader is told of tokens and ends when nobody who was told has still to run. Its length is what the
loop needs to serve every answer once. An answer whose last tokens were handed on less than that ago, and a little more, waits:
what comes meanwhile is one event, so that a loop that cannot write every token by itself writes fewer, longer pieces.
"""

from __future__ import annotations

MAX_GAP_S = 0.05
"""No token is held for longer, however busy the loop is."""
_SHARE = 0.7
"""Of the loop's time, that handing tokens on may take before they are merged."""
_WEIGHT = 0.2
"""Of the newest burst in their mean."""


class TokenPace:
    """One for all streams of an event loop. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._burst_s = 0.0
        self._told = 0
        self._since = 0.0

    @property
    def gap_s(self) -> float:
        """Between two looks of a reader at tokens of one answer; next to nothing on an idle loop."""
        return min(self._burst_s / _SHARE, MAX_GAP_S)

    def wait_s(self, last: float, now: float) -> float:
        """How long tokens that come now wait, when the answer's last ones were handed on at `last`; 0: not at all."""
        return max(0.0, last + self.gap_s - now)

    def told(self, now: float) -> None:
        """A waiting reader was told of tokens."""
        if not self._told:
            self._since = now
        elif now - self._since > MAX_GAP_S:  # one burst runs into the next
            self._measure(now)
            self._since = now
        self._told += 1

    def ran(self, now: float) -> None:
        """A reader that was told runs, or will not any more."""
        self._told -= 1
        if not self._told:
            self._measure(now)

    def _measure(self, now: float) -> None:
        self._burst_s += _WEIGHT * (min(now - self._since, MAX_GAP_S) - self._burst_s)
