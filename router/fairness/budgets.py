"""A tenant's tokens (or requests) a minute, shared by all routers. Each router leases about a second's worth from the
store, and may spend its share of the unused bucket before it asks the store.

    store: one bucket a tenant, refilled by its limit --slice, in the background--> lease --check, spend--> requests

No request waits for the store. A router admits at once what is left of its lease and of its part of the bucket, as last
read (an equal part for each router); so a burst may use the unused part. What it took of the bucket is repaid first,
and a router that has used half of what it may take asks at once. R routers together may exceed the bucket by R slices
plus the rest of running answers; with stale levels once by (R - 1) / R of a bucket, which is repaid first. While the
store is unavailable each router grants its share of the limit, by the last known number of routers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from diptych.common.errors import QuotaExceededError
from diptych.common.store.interface import BudgetStore, StoreError
from diptych.router.api.auth.limits import PERIOD_S, TenantQuotas

SLICE_S = 1.0
INTERVAL_S = 0.25
_LEAST_S = 0.02
"""Seconds between two exchanges with the store."""
_IDLE_S = 60.0
_ROUNDING = 1e-6
"""Rounding error of a sum of many spent tokens: a request of `remaining` tokens must be admitted."""


@dataclass(slots=True)
class _Lease:
    """The lease of one tenant.

    Args:
        tokens: left to spend; below zero: to be repaid first.
        owed: spent before the store was asked.
        level: of the bucket, as read at `asked_at`; it refills meanwhile.
    """

    tokens: float
    owed: float
    level: float
    asked_at: float
    used_at: float


class SharedQuotas(TenantQuotas):
    """Quotas shared between routers. `num_routers`: current number of routers, including this one."""

    def __init__(
        self,
        per_minute: Callable[[str], int],
        *,
        now: Callable[[], float],
        store: BudgetStore,
        num_routers: Callable[[], int] = lambda: 1,
        unit: str = "tokens",
    ) -> None:
        super().__init__(per_minute, now=now, unit=unit)
        self._store = store
        self._num_routers = num_routers
        self._leases: dict[str, _Lease] = {}
        self._low = asyncio.Event()
        """Set when a tenant has used half of what it may spend before the store is asked."""

    def check(self, tenant: str) -> None:
        limit = self._per_minute(tenant)
        if limit and (left := self._left(self._lease(tenant, limit), limit)) < 1.0 - _ROUNDING:
            retry_s = max(INTERVAL_S, (1.0 - left) * PERIOD_S / limit)
            raise QuotaExceededError(f"the quota of {limit} {self.unit} a minute is used up", retry_after_s=retry_s)

    def spend(self, tenant: str, amount: int) -> None:
        limit = self._per_minute(tenant)
        if limit:
            lease = self._lease(tenant, limit)
            lease.tokens -= amount
            if self._left(lease, limit) < self._bucket(lease, limit) / self._count() / 2:
                self._low.set()

    def headers(self, tenant: str) -> dict[str, str]:
        """`remaining` is what this router admits now; `reset` is that of the whole bucket."""
        limit = self._per_minute(tenant)
        if not limit:
            return {}
        lease = self._lease(tenant, limit)
        level = min(float(limit), lease.tokens - lease.owed + self._bucket(lease, limit))
        return self._header_values(limit, level, remaining=min(float(limit), self._left(lease, limit)))

    def _count(self) -> int:
        return max(1, self._num_routers())

    def _bucket(self, lease: _Lease, limit: int) -> float:
        """The bucket's level, if the other routers took nothing since it was read."""
        return min(float(limit), lease.level + (self._now() - lease.asked_at) * limit / PERIOD_S)

    def _left(self, lease: _Lease, limit: int) -> float:
        """Tokens that may be spent now."""
        return lease.tokens - lease.owed + self._bucket(lease, limit) / self._count()

    def _lease(self, tenant: str, limit: int) -> _Lease:
        now, lease = self._now(), self._leases.get(tenant)
        if lease is None:
            first = _slice(limit)
            lease = self._leases[tenant] = _Lease(first, first, float(limit), now, now)
        lease.used_at = now
        return lease

    def _name(self, tenant: str) -> str:
        """A hash: tenants' names are unrestricted, keys of the store are not."""
        kind = b"" if self.unit == "tokens" else self.unit.encode()
        return hashlib.blake2b(tenant.encode(), digest_size=16, person=kind).hexdigest()

    async def run(self) -> None:
        while True:
            await self.exchange()
            await asyncio.sleep(_LEAST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S - _LEAST_S):
                    await self._low.wait()
            self._low.clear()

    async def exchange(self) -> None:
        """Fill every lease up to a slice; return what idle tenants have left."""
        for tenant, lease in list(self._leases.items()):
            limit, now = self._per_minute(tenant), self._now()
            idle = not limit or now - lease.used_at > _IDLE_S
            want = -lease.tokens if idle else _slice(limit) - lease.tokens
            want += lease.owed
            if idle:
                del self._leases[tenant]
            if not limit or abs(want) < 1.0:
                continue
            try:
                granted, lease.level = await self._store.lease_tokens(self._name(tenant), per_minute=limit, want=want)
            except StoreError:
                share = limit / PERIOD_S * (now - lease.asked_at) / self._count()
                granted = max(0.0, min(want, share))
            lease.asked_at = now
            paid = min(max(0.0, granted), lease.owed)
            lease.owed -= paid
            lease.tokens += granted - paid


def _slice(limit: int) -> float:
    return max(1.0, limit / PERIOD_S * SLICE_S)
