"""The events of one tier below the prefix cache, numbered from 1 on in each epoch."""

from __future__ import annotations

from collections.abc import Iterable

from diptych.engine.messages import TierEvicted, TierStored

MOST_KEYS = 4096
"""Of one event: a tier that is announced as a whole has a hundred thousand."""


class TierEvents:
    """What entered and left a tier, in order; keys that follow one another in one direction share an event."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self.sequence = 0
        """Of the last event."""
        self._kind: type[TierStored] | type[TierEvicted] = TierStored
        self._keys: list[bytes] = []
        self._events: list[TierStored | TierEvicted] = []

    def stored(self, keys: Iterable[bytes]) -> None:
        self._note(TierStored, keys)

    def evicted(self, keys: Iterable[bytes]) -> None:
        self._note(TierEvicted, keys)

    def flush(self) -> None:
        """`sequence` covers everything afterwards."""
        if self._keys:
            self.sequence += 1
            self._events.append(self._kind(self._tier, self.sequence, tuple(self._keys)))
            self._keys.clear()

    def take(self) -> list[TierStored | TierEvicted]:
        """Since the last call."""
        self.flush()
        events, self._events = self._events, []
        return events

    def restart(self) -> None:
        """A new epoch begins; events that were not taken are dropped."""
        self._keys.clear()
        self._events.clear()
        self.sequence = 0

    def _note(self, kind: type[TierStored] | type[TierEvicted], keys: Iterable[bytes]) -> None:
        # One direction at a time: a key that leaves and comes back is told in that order.
        if kind is not self._kind:
            self.flush()
            self._kind = kind
        for key in keys:
            self._keys.append(key)
            if len(self._keys) >= MOST_KEYS:
                self.flush()
