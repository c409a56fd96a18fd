"""The engine's cache events as the store carries them: one stream a tier, both begun anew by "cleared"."""

from __future__ import annotations

from diptych.common.store import KvEvent
from diptych.engine.messages import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    EngineEvent,
    TierEvicted,
    TierStored,
)


class CacheEventFeed:
    """Args: incarnation: of the worker whose caches these are."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self.epoch = 0

    def beginning(self) -> KvEvent:
        """An epoch begins with an event of its own, so that a reader knows it from the start."""
        return KvEvent(self._incarnation, self.epoch, 0, "cleared")

    def convert(self, event: EngineEvent) -> KvEvent | None:
        """None: it says nothing of a cache."""
        match event:
            case CacheCleared(epoch):
                self.epoch = epoch
                return self.beginning()
            case BlocksStored(sequence, keys):
                return self._event(sequence, "stored", keys)
            case BlocksEvicted(sequence, keys):
                return self._event(sequence, "evicted", keys)
            case TierStored(tier, sequence, keys):
                return self._event(sequence, "stored", keys, tier)
            case TierEvicted(tier, sequence, keys):
                return self._event(sequence, "evicted", keys, tier)
        return None

    def _event(self, sequence: int, kind: str, keys: tuple[bytes, ...], tier: str = "device") -> KvEvent:
        return KvEvent(self._incarnation, self.epoch, sequence, kind, keys, tier)
