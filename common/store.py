"""The cluster's metadata store, as workers and routers see it. Redis is behind it in production, memory in tests.

A cache of facts that every worker can write again, never the truth: callers go on without it, no request waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.common.worker_record import WorkerRecord

TIERS = ("device", "host")
"""Where a worker keeps blocks: ready for attention, or to be copied back first."""


class StoreError(Exception):
    """The store did not answer in time, or not with sense. Callers go on with what they know and try again."""


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One prefix-cache event of one worker.

    kind: "stored" | "evicted" | "cleared" (all tiers at once); tier: one of TIERS. The sequence rises by one with every
    event of a tier in an epoch.
    """

    incarnation: str
    epoch: int
    sequence: int
    kind: str
    keys: tuple[bytes, ...] = ()
    tier: str = "device"


Pending = Mapping[str, tuple[int, int]]
"""By worker id: prompt tokens and requests that a router placed there and has not seen the end of."""


class PendingStore(Protocol):
    """What routers tell each other. Bounded in time; StoreError when the store cannot be reached."""

    async def put_pending(self, router_id: str, pending: Pending, *, ttl_s: float) -> None:
        """Replace this router's row; it ends by itself after `ttl_s`."""
        ...

    async def list_pending(self) -> dict[str, Pending]:
        """The rows that live, by router id; what does not parse is skipped (and counted)."""
        ...


class BudgetStore(Protocol):
    """Buckets of tokens that routers share. Bounded in time; StoreError when the store cannot be reached."""

    async def lease_tokens(self, name: str, *, per_minute: int, want: float) -> tuple[float, float]:
        """(tokens granted, level left) of a bucket that holds a minute's tokens and refills steadily, by the store's clock. At
        most `want` are granted and at most what is there; a negative `want` gives back."""
        ...


class Store(PendingStore, BudgetStore, Protocol):
    """Every method is bounded in time and raises StoreError when the store cannot be reached."""

    async def put_worker(self, record: WorkerRecord, *, ttl_s: float) -> bool:
        """Write the worker's lease. False: a younger incarnation holds the name; the caller must stop writing."""
        ...

    async def remove_worker(self, worker_id: str, incarnation: str) -> None:
        """End the lease, unless another incarnation holds it."""
        ...

    async def list_workers(self) -> list[WorkerRecord]:
        """Workers whose lease lives; rows that do not parse are skipped (and counted)."""
        ...

    async def append_events(self, worker_id: str, events: Sequence[KvEvent]) -> None: ...

    async def read_events(self, cursors: Mapping[str, str], *, block_s: float) -> dict[str, list[tuple[str, KvEvent]]]:
        """New events of each worker id after its cursor ("0" = from the start), as (cursor, event)."""
        ...

    async def close(self) -> None: ...
