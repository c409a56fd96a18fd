"""When tokens of an answer are handed on: at once while the event loop keeps up, merged once it does not. Pure: time is told.

A reader that was told of tokens is busy until it asks for more: it waits for its turn on the loop, writes, and waits for the
write. While nobody is busy, tokens go out at once. The median of these times, doubled, is what the loop needs to serve every
answer once. Tokens that come later than that, and something more for the loop's other work, after the answer's last ones go
out at once, too: the loop keeps up. Those that come sooner wait for a good while longer, and what comes meanwhile is one
event: a loop that cannot write every token by itself writes far fewer, longer pieces. The median counts and not the longest:
a client that takes nothing holds nobody else up.
"""

from __future__ import annotations

MAX_GAP_S = 0.05
"""No token is held for longer, however busy the loop is."""
_KEEPS_UP = 0.75
"""Share of the loop's time that handing tokens on may take before they are merged."""
_MERGED = 0.25
"""What it takes then."""
_STEP = 1.02
"""By which every time moves what is held for their median."""
_LEAST_S = 1e-5


class TokenPace:
    """One for all streams of an event loop."""

    def __init__(self) -> None:
        self._middle_s = _LEAST_S
        self.num_busy = 0
        """Readers."""

    @property
    def round_s(self) -> float:
        """To serve every answer once."""
        return min(2 * self._middle_s, MAX_GAP_S * _MERGED)

    def wait_s(self, last: float, now: float) -> float:
        """How long tokens that come now wait, when the answer's last ones were handed on at `last`; 0: not at all. Seconds of
        one monotonic clock."""
        round_s = self.round_s
        if not self.num_busy or now - last >= round_s / _KEEPS_UP:
            return 0.0
        return last + round_s / _MERGED - now

    def begun(self) -> None:
        """A reader was told of tokens."""
        self.num_busy += 1

    def served(self, seconds: float) -> None:
        """A reader was told of tokens so long ago, and asks for more or leaves."""
        self.num_busy -= 1
        if seconds > self._middle_s:
            self._middle_s = min(self._middle_s * _STEP, MAX_GAP_S)
        else:
            self._middle_s = max(self._middle_s / _STEP, _LEAST_S)
