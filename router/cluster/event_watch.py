"""Which workers the index cannot follow, so that placement by cache quietly turns into placement by load. Pure.

A worker is mute when it computed whole blocks for us and neither its stream nor its lease has told of any event since, or
when its lease keeps running ahead of a stream that brings nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.router.placement.index import IndexMode

_GRACE_S = 2.0
_UNTRUSTED_S = 10.0
_RESYNCS = 2


@dataclass(slots=True)
class _Watched:
    computed_at: float | None = None
    resyncs: int = 0
    untrusted_since: float | None = None


class EventWatch:
    """By worker id; `forget` when a life ends."""

    def __init__(self) -> None:
        self._workers: dict[str, _Watched] = {}

    def forget(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def _of(self, worker_id: str) -> _Watched:
        return self._workers.setdefault(worker_id, _Watched())

    def computed(self, worker_id: str, now: float) -> None:
        """It computed at least one whole block for a request of ours."""
        watched = self._of(worker_id)
        if watched.computed_at is None:
            watched.computed_at = now

    def resynced(self, worker_id: str) -> None:
        """Its lease was ahead of its stream for too long."""
        self._of(worker_id).resyncs += 1

    def why(self, worker_id: str, *, num_events: int, lease_sequence: int, mode: IndexMode, now: float) -> str:
        """What is wrong with the worker's events, or "".

        Args:
            num_events: events that came from this life of the worker.
            lease_sequence: how many its lease speaks of.
        """
        watched = self._of(worker_id)
        if mode is IndexMode.EXACT:
            watched.untrusted_since = None
        elif watched.untrusted_since is None:
            watched.untrusted_since = now
        if num_events == 0:
            computed = watched.computed_at
            if lease_sequence == 0 and computed is not None and now - computed > _GRACE_S:
                return "publishes no cache events"
            if lease_sequence > 0 and watched.resyncs >= _RESYNCS:
                return "its cache events do not arrive"
        since = watched.untrusted_since
        if since is not None and now - since > _UNTRUSTED_S:
            return f"its cache is known only as {mode.value} for {now - since:.0f} s"
        return ""
