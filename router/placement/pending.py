"""Pending placements shared among routers through the store, in the background, so that they do not stampede one
worker.

    every interval_s: write this router's sums if they changed (or half their TTL is over), read those of the others

No request waits for it. A dead router is forgotten when its row expires; while the store is unavailable the others'
sums are kept for that long, then dropped.
"""

from __future__ import annotations

import asyncio

import structlog

from diptych.common.clock import Clock
from diptych.common.store.interface import PendingStore, StoreError
from diptych.router.placement.reservations import Reservations

INTERVAL_S = 0.1
TTL_S = 3.0

log = structlog.get_logger(__name__)


class PendingShare:
    """Exchanges the sums. `router_id`: unique among the routers of the cluster; a suffix after "." distinguishes the
    models of one router."""

    def __init__(
        self,
        store: PendingStore,
        reservations: Reservations,
        router_id: str,
        *,
        clock: Clock,
        interval_s: float = INTERVAL_S,
        ttl_s: float = TTL_S,
    ) -> None:
        self._store = store
        self._reservations = reservations
        self._router_id = router_id
        self._clock = clock
        self._interval_s = interval_s
        self._ttl_s = ttl_s
        self._written: dict[str, tuple[int, int]] = {}
        self._written_at = -ttl_s
        self._read_at = clock.now()
        self.num_others = 0
        self.failing = ""
        """Why the last exchange failed, or ""."""

    async def run(self) -> None:
        while True:
            await self.exchange()
            await asyncio.sleep(self._interval_s)

    async def exchange(self) -> None:
        """Write changed sums and read the others once."""
        mine = self._reservations.mine()
        now = self._clock.now()
        try:
            if mine != self._written or (mine and now - self._written_at > self._ttl_s / 2):
                await self._store.put_pending(self._router_id, mine, ttl_s=self._ttl_s)
                self._written, self._written_at = mine, now
            rows = await self._store.list_pending()
        except StoreError as err:
            self.failing = str(err)
            if self._clock.now() - self._read_at > self._ttl_s:
                self._reservations.set_others({})
            return
        self.failing = ""
        rows.pop(self._router_id, None)
        others: dict[str, tuple[int, int]] = {}
        for row in rows.values():
            for worker_id, (tokens, requests) in row.items():
                before = others.get(worker_id, (0, 0))
                others[worker_id] = (before[0] + tokens, before[1] + requests)
        self._reservations.set_others(others)
        self._read_at = self._clock.now()
        self.num_others = len({name.partition(".")[0] for name in rows} - {self._router_id.partition(".")[0]})
