"""How long a silent worker is waited for before its answers move to other workers. Pure.

A worker that is stopped, or cut off, breaks no connection: only its silence shows it. But a worker that is short of CPU is
silent as well, and must not be taken for dead. Its own past tells the two apart: it is waited for _FACTOR times as long as
its slowest recent answer to a probe took, at least `dead_s`, at most MOST times that.
"""

from __future__ import annotations

MOST = 3.0
_FACTOR = 8.0
_FADE = 0.98
"""What is left of a slow answer with each later one. At four probes a second a worker whose slowest answer took as long as
`dead_s` is waited for as briefly as any other after half a minute."""


class Patience:
    """Of one worker. `dead_s`: seconds of silence after which it gets no new requests."""

    def __init__(self, dead_s: float) -> None:
        self._dead_s = dead_s
        self._slowest_s = dead_s  # nobody knows yet that it is quick

    def on_answer(self, took_s: float) -> None:
        """It has answered so many seconds after the first probe without an answer."""
        self._slowest_s = max(took_s, _FADE * self._slowest_s)

    @property
    def limit_s(self) -> float:
        """Seconds of silence after which its answers move, if another worker can take them."""
        return min(max(self._dead_s, _FACTOR * self._slowest_s), self.most_s)

    @property
    def most_s(self) -> float:
        """The same where none can."""
        return MOST * self._dead_s
