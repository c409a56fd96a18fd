"""The store in memory, for `diptych serve`, tests and simulations, with an injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from diptych.common.clock import Clock
from diptych.common.store.adapters import RESTORED_STEP, AdapterEntry, AdapterTable
from diptych.common.store.interface import KvEvent, Pending, StoreError
from diptych.common.store.worker_record import WorkerRecord


class MemoryStore:
    """`available = False` makes every call raise StoreError; `flush()` is FLUSHALL."""

    def __init__(self, clock: Clock, *, max_events: int = 10_000) -> None:
        self._clock = clock
        self._max_events = max_events
        self._rows: dict[str, tuple[WorkerRecord, float]] = {}
        self._starts: dict[tuple[str, str], int] = {}
        self._youngest: dict[str, int] = {}
        self._events: dict[str, list[tuple[int, KvEvent]]] = {}
        self._pending: dict[str, tuple[Pending, float]] = {}
        self._buckets: dict[str, tuple[float, float]] = {}
        self._adapters = AdapterTable()
        self._counter = 0
        self._changed = asyncio.Event()
        self.available = True
        self.puts = 0

    def flush(self) -> None:
        self._rows.clear()
        self._events.clear()
        self._pending.clear()
        self._buckets.clear()
        self.lose_adapters()
        self._youngest.clear()

    def lose_adapters(self) -> None:
        """As an eviction of their key."""
        self._adapters = AdapterTable()

    def go_back(self, adapters: AdapterTable) -> None:
        """As a start from a snapshot, or a replica that becomes the primary: it had this registry."""
        self._adapters = adapters

    def _check(self) -> None:
        if not self.available:
            raise StoreError("memory store switched off")

    async def put_worker(self, record: WorkerRecord, *, ttl_s: float) -> bool:
        self._check()
        name = record.worker_id
        start = self._starts.get((name, record.incarnation))
        if start is None:
            self._counter += 1
            start = self._starts[name, record.incarnation] = self._counter
        if start < self._youngest.get(name, 0):
            return False
        self._youngest[name] = start
        self._rows[name] = (record, self._clock.now() + ttl_s)
        self.puts += 1
        return True

    async def remove_worker(self, worker_id: str, incarnation: str) -> None:
        self._check()
        row = self._rows.get(worker_id)
        if row is not None and row[0].incarnation == incarnation:
            del self._rows[worker_id]

    async def list_workers(self) -> list[WorkerRecord]:
        self._check()
        now = self._clock.now()
        return [record for record, expires in self._rows.values() if expires > now]

    async def append_events(self, worker_id: str, events: Sequence[KvEvent]) -> None:
        self._check()
        stream = self._events.setdefault(worker_id, [])
        for event in events:
            self._counter += 1
            stream.append((self._counter, event))
        del stream[: -self._max_events]
        self._changed.set()

    async def read_events(
        self, cursors: Mapping[str, str], *, block_s: float
    ) -> dict[str, list[tuple[str, KvEvent | None]]]:
        self._check()
        found = self._after(cursors)
        if not found and block_s > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(block_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._check()
            found = self._after(cursors)
        return found

    def _after(self, cursors: Mapping[str, str]) -> dict[str, list[tuple[str, KvEvent | None]]]:
        found: dict[str, list[tuple[str, KvEvent | None]]] = {}
        for name, cursor in cursors.items():
            fresh: list[tuple[str, KvEvent | None]] = [
                (str(number), event) for number, event in self._events.get(name, ()) if number > int(cursor)
            ]
            if fresh:
                found[name] = fresh
        return found

    async def put_pending(self, router_id: str, pending: Pending, *, ttl_s: float) -> None:
        self._check()
        self._pending[router_id] = (dict(pending), self._clock.now() + ttl_s)

    async def list_pending(self) -> dict[str, Pending]:
        self._check()
        now = self._clock.now()
        return {router_id: row for router_id, (row, expires) in self._pending.items() if expires > now}

    async def lease_tokens(self, name: str, *, per_minute: int, want: float) -> tuple[float, float]:
        self._check()
        now, full = self._clock.now(), float(per_minute)
        level, at = self._buckets.get(name, (full, now))
        level = min(full, level + (now - at) * per_minute / 60.0)
        granted = max(want, -full) if want < 0 else max(0.0, min(want, level))
        self._buckets[name] = (min(full, level - granted), now)
        return granted, self._buckets[name][0]

    async def read_adapters(self, known: int) -> AdapterTable | None:
        self._check()
        return None if self._adapters.revision == known else self._adapters

    async def write_adapter(
        self, name: str, entry: AdapterEntry | None, *, revision: int, gone: Mapping[str, int]
    ) -> int | None:
        self._check()
        table = self._adapters
        if table.revision != revision:
            return None
        entries = {other: kept for other, kept in table.entries.items() if other != name}
        if entry is not None:
            entries[name] = entry
        self._adapters = AdapterTable(revision + 1, entries, dict(gone))
        return revision + 1

    async def restore_adapters(self, table: AdapterTable, *, over: int = 0) -> bool:
        self._check()
        if self._adapters.revision != over:
            return False
        self._adapters = AdapterTable(table.revision + RESTORED_STEP, dict(table.entries), dict(table.gone))
        return True

    async def close(self) -> None:
        pass
