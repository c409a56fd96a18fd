"""Detects workers whose cache events do not arrive, which would silently turn cache-aware placement into load
balancing. Pure.

A worker is untracked when it computed whole blocks for this router and neither its stream nor its lease mentioned an
event since; or when its lease stays ahead of a stream that delivers nothing.
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
    """State by worker id; call `forget` when an incarnation ends."""

    def __init__(self) -> None:
        self._workers: dict[str, _Watched] = {}

    def forget(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def _of(self, worker_id: str) -> _Watched:
        return self._workers.setdefault(worker_id, _Watched())

    def computed(self, worker_id: str, now: float) -> None:
        """It computed at least one whole block for a request of this router."""
        watched = self._of(worker_id)
        if watched.computed_at is None:
            watched.computed_at = now

    def resynced(self, worker_id: str) -> None:
        """Its lease was ahead of its stream for too long."""
        self._of(worker_id).resyncs += 1

    def why(self, worker_id: str, *, num_events: int, lease_sequence: int, mode: IndexMode, now: float) -> str:
        """What is wrong with the worker's events, or "". `num_events`: events that arrived from this incarnation of the
        worker. `lease_sequence`: the sequence in its lease."""
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
