"""Conversion of the engine's cache events to those of the store: one stream a tier, both reset by "cleared"."""

from __future__ import annotations

from diptych.common.store.interface import KvEvent
from diptych.engine.messages import (
    BlocksEvicted,
    BlocksStored,
    CacheCleared,
    EngineEvent,
    TierEvicted,
    TierStored,
)


class CacheEventFeed:
    """Args: incarnation: of the worker."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self.epoch = 0

    def beginning(self) -> KvEvent:
        """The first event of an epoch, so that a reader can follow from the start."""
        return KvEvent(self._incarnation, self.epoch, 0, "cleared")

    def convert(self, event: EngineEvent) -> KvEvent | None:
        """None: not a cache event."""
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
