"""When tokens of an answer are delivered: at once while the event loop keeps up, else merged. Pure: time is an
argument.

A reader is busy from its wake-up until it asks for more: it waits for its turn on the loop, writes, and waits for the
write. While no reader is busy, tokens are delivered at once. The median of these times, doubled, is what the loop needs
to serve every answer once. Tokens that arrive later than that (plus a margin for other work) after the answer's last
ones are delivered at once, too: the loop keeps up. Tokens that arrive sooner wait longer and are merged with later
ones, so that an overloaded loop writes fewer, longer pieces. The median counts instead of the maximum, so that a client
that does not read blocks no other.
"""

from __future__ import annotations

MAX_GAP_S = 0.05
"""Longest time for which a token is held."""
_KEEPS_UP = 0.75
"""Share of the loop's time for delivering tokens, above which they are merged."""
_MERGED = 0.25
"""That share with merged tokens."""
_STEP = 1.02
"""Factor by which every time moves the median estimate."""
_LEAST_S = 1e-5


class TokenPace:
    """One for all streams of an event loop."""

    def __init__(self) -> None:
        self._middle_s = _LEAST_S
        self.num_busy = 0
        """Number of busy readers."""

    @property
    def round_s(self) -> float:
        """Time to serve every answer once."""
        return min(2 * self._middle_s, MAX_GAP_S * _MERGED)

    def wait_s(self, last: float, now: float) -> float:
        """Seconds that tokens arriving now wait, when the answer's last ones were delivered at `last`; 0: none. Both
        times are on one monotonic clock."""
        if not self.num_busy:
            return 0.0
        round_s = self.round_s
        if now - last >= round_s / _KEEPS_UP:
            return 0.0
        return last + round_s / _MERGED - now

    def on_wake(self) -> None:
        """A reader was woken."""
        self.num_busy += 1

    def on_served(self, seconds: float) -> None:
        """A reader finished `seconds` after its wake-up: it asks for more or leaves."""
        self.num_busy -= 1
        if seconds > self._middle_s:
            self._middle_s = min(self._middle_s * _STEP, MAX_GAP_S)
        else:
            self._middle_s = max(self._middle_s / _STEP, _LEAST_S)
