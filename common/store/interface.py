"""The cluster's metadata store, as workers and routers see it: Redis in production, memory in tests.

It is a cache of facts that every worker can write again. Callers continue without it, and no request waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.common.store.adapters import AdapterEntry, AdapterTable
from diptych.common.store.worker_record import WorkerRecord
from diptych.common.tiers import DEVICE


class StoreError(Exception):
    """The store did not answer in time, or returned invalid data. Callers continue with their last state and retry."""


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One prefix-cache event of one worker.

    kind: "stored" | "evicted" | "cleared" (all tiers at once); tier: a name of common/tiers.py. The sequence rises by one
    with every event of a tier in an epoch.
    """

    incarnation: str
    epoch: int
    sequence: int
    kind: str
    keys: tuple[bytes, ...] = ()
    tier: str = DEVICE


Pending = Mapping[str, tuple[int, int]]
"""By worker id: prompt tokens and requests that a router placed there and that have not ended."""


class PendingStore(Protocol):
    """Data shared between routers. Bounded in time; StoreError when the store cannot be reached."""

    async def put_pending(self, router_id: str, pending: Pending, *, ttl_s: float) -> None:
        """Replace this router's row; it expires after `ttl_s`."""
        ...

    async def list_pending(self) -> dict[str, Pending]:
        """Live rows by router id; a row that does not parse is skipped and counted."""
        ...


class BudgetStore(Protocol):
    """Token buckets shared by routers. Bounded in time; StoreError when the store cannot be reached."""

    async def lease_tokens(self, name: str, *, per_minute: int, want: float) -> tuple[float, float]:
        """Take tokens from a bucket that holds one minute's tokens and refills steadily, by the store's clock. Returns:
        (tokens granted, level left). Grants at most `want` and at most the level; a negative `want` returns tokens."""
        ...


class AdapterStore(Protocol):
    """The registry of adapters, see adapters.py. It is the one thing here that no worker can write again: routers do, from
    what they last read. Bounded in time; StoreError when the store cannot be reached."""

    async def read_adapters(self, known: int) -> AdapterTable | None:
        """The registry; None: its revision is `known`. After a loss of all data the revision is 0."""
        ...

    async def write_adapter(
        self, name: str, entry: AdapterEntry | None, *, revision: int, gone: Mapping[str, int]
    ) -> int | None:
        """Set one name's entry (None: remove it) and the last numbers of names that are gone, if the registry still has
        this revision. Returns: its revision after that; None: it has another one, and nothing is changed."""
        ...

    async def restore_adapters(self, table: AdapterTable, *, over: int = 0) -> bool:
        """Write the whole registry over the one of revision `over` (0: there is none): its revision becomes RESTORED_STEP more
        than the table's. Returns: whether it was written."""
        ...


class Store(PendingStore, BudgetStore, AdapterStore, Protocol):
    """Every method is bounded in time and raises StoreError when the store cannot be reached."""

    async def put_worker(self, record: WorkerRecord, *, ttl_s: float) -> bool:
        """Write the worker's lease. False: a younger incarnation holds the name; the caller must stop writing."""
        ...

    async def remove_worker(self, worker_id: str, incarnation: str) -> None:
        """End the lease, unless another incarnation holds it."""
        ...

    async def list_workers(self) -> list[WorkerRecord]:
        """Workers with a live lease; rows that do not parse are skipped and counted."""
        ...

    async def append_events(self, worker_id: str, events: Sequence[KvEvent]) -> None: ...

    async def read_events(
        self, cursors: Mapping[str, str], *, block_s: float
    ) -> dict[str, list[tuple[str, KvEvent | None]]]:
        """New events of each worker id after its cursor ("0" = from the start), as (cursor, event); None: an event that this
        version cannot read. It is counted, and the next read begins after it."""
        ...

    async def close(self) -> None: ...
