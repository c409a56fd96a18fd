"""Which adapters' requests run at each worker: this router's from its reservations, others' from the lease. Pure.

A lease is some time old. So of an adapter that this router placed there lately only its own count matters; the lease says
what other routers run.
"""

from __future__ import annotations

from collections.abc import Callable

from diptych.common.store.worker_record import WorkerRecord

_MAX_WORKERS = 4096
OWN_S = 3.0
"""Longer than a lease needs to show what has ended."""


class AdaptersInUse:
    """`now`: seconds on a monotonic clock. `on_free`: called when the last request of an adapter left a worker."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._counts: dict[str, dict[str, int]] = {}
        """Worker -> adapter -> requests."""
        self._left: dict[str, dict[str, float]] = {}
        """Worker -> adapter -> when its last request of this router ended."""
        self.on_free: Callable[[], None] = lambda: None

    def add(self, worker_id: str, adapter_id: str) -> None:
        counts = self._counts.setdefault(worker_id, {})
        counts[adapter_id] = counts.get(adapter_id, 0) + 1

    def remove(self, worker_id: str, adapter_id: str) -> None:
        counts = self._counts[worker_id]
        counts[adapter_id] -= 1
        if counts[adapter_id]:
            return
        del counts[adapter_id]
        if not counts:
            del self._counts[worker_id]
        now = self._now()
        if len(self._left) > _MAX_WORKERS:  # of workers that are gone
            self._left = {name: left for name, left in self._left.items() if now - max(left.values()) <= OWN_S}
        self._left.setdefault(worker_id, {})[adapter_id] = now
        self.on_free()

    def count(self, worker_id: str, adapter_id: str) -> int:
        """Requests of this router."""
        return self._counts.get(worker_id, {}).get(adapter_id, 0)

    def own(self, record: WorkerRecord) -> set[str]:
        """Ids whose requests of this router run at the worker."""
        return set(self._counts.get(record.worker_id, ()))

    def running(self, record: WorkerRecord) -> set[str]:
        """Ids whose requests run at the worker."""
        own, left = self._counts.get(record.worker_id), self._left.get(record.worker_id)
        running = {adapter_id for adapter_id, count in record.load.adapters.items() if count}
        if left:
            now = self._now()
            for adapter_id in [one for one, at in left.items() if now - at > OWN_S]:
                del left[adapter_id]
            running -= left.keys()
            if not left:
                del self._left[record.worker_id]
        if own:
            running |= own.keys()
        return running
