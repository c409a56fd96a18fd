"""The cluster's metadata store, as workers and routers see it. Redis is behind it in production, fakeredis or memory in tests.

A cache of facts that every worker can write again, never the truth: callers go on without it and no request waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.common.worker_record import WorkerRecord


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One prefix-cache event of one worker.

    kind: "stored" | "evicted" | "cleared"; sequence rises by one with every event of an epoch.
    """

    incarnation: str
    epoch: int
    sequence: int
    kind: str
    keys: tuple[bytes, ...] = ()


class Store(Protocol):
    async def put_worker(self, record: WorkerRecord, *, ttl_s: float) -> bool:
        """Write the worker's lease. False: a younger incarnation holds the name (we are a zombie and must stop writing)."""
        ...

    async def remove_worker(self, worker_id: str, incarnation: str) -> None: ...

    async def list_workers(self) -> list[WorkerRecord]:
        """Workers whose lease lives; rows that do not parse are skipped (and counted)."""
        ...

    async def append_events(self, worker_id: str, events: Sequence[KvEvent]) -> None: ...

    async def read_events(
        self, cursors: Mapping[str, str], *, block_s: float
    ) -> dict[str, list[tuple[str, KvEvent]]]:
        """New events of each worker id after its cursor ("0" = from the start), as (cursor, event)."""
        ...

    async def close(self) -> None: ...
