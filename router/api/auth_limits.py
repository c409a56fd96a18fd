"""Tokens and requests a minute per tenant, each in a bucket that refills steadily; prompt and output tokens count together.

A request is let in while the bucket is not empty, pays for its prompt at once and for its output as it comes; so the level
can fall below zero, and the tenant then waits until it is above again. The buckets are this router's own: with several
routers each grants the whole quota.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import cast

from diptych.common.errors import DiptychError, QuotaExceededError
from diptych.common.token_bytes import Tokens
from diptych.router.api.interface import RouterApi
from diptych.router.api.packed_ids import PackedIds
from diptych.router.requests.messages import (
    GenerateEvent,
    ModelFeatures,
    ModelInfo,
    TokenEvent,
    UncheckedRequest,
    ValidatedRequest,
)
from diptych.rpc.v1 import router_pb2

PERIOD_S = 60.0
MAX_TENANTS = 10_000


class TenantQuotas:
    """Args:
    per_minute: tokens (or what `unit` says) a minute of a tenant; 0: no limit. Asked at every use, so a changed quota counts
        at once.
    now: seconds on a monotonic clock.
    unit: "tokens" or "requests".
    """

    def __init__(self, per_minute: Callable[[str], int], *, now: Callable[[], float], unit: str = "tokens") -> None:
        self.unit = unit
        self._per_minute = per_minute
        self._now = now
        self._levels: dict[str, tuple[float, float]] = {}
        """Tenant -> (level, when that was true). A tenant that is not in here has a full bucket."""

    def check(self, tenant: str) -> None:
        """Raises: QuotaExceededError, with the time after which there is something again, when nothing is left."""
        limit = self._per_minute(tenant)
        if limit and (level := self._level(tenant, limit)) < 1.0:
            raise QuotaExceededError(
                f"the quota of {limit} {self.unit} a minute is used up", retry_after_s=(1.0 - level) * PERIOD_S / limit
            )

    def spend(self, tenant: str, amount: int) -> None:
        limit = self._per_minute(tenant)
        if limit:
            level = self._level(tenant, limit) - amount
            if tenant not in self._levels and len(self._levels) >= MAX_TENANTS:
                self._forget_full()
            self._levels[tenant] = (level, self._now())

    def headers(self, tenant: str) -> dict[str, str]:
        """x-ratelimit-* as the OpenAI API has them; empty without a limit."""
        limit = self._per_minute(tenant)
        return self._told(limit, self._level(tenant, limit)) if limit else {}

    def _told(self, limit: int, level: float, remaining: float | None = None) -> dict[str, str]:
        """`remaining`: None: the level."""
        return {
            f"x-ratelimit-limit-{self.unit}": str(limit),
            f"x-ratelimit-remaining-{self.unit}": str(max(0, math.floor(level if remaining is None else remaining))),
            f"x-ratelimit-reset-{self.unit}": f"{(limit - level) * PERIOD_S / limit:.3f}s",
        }

    def _level(self, tenant: str, limit: int) -> float:
        level, at = self._levels.get(tenant, (float(limit), 0.0))
        return min(float(limit), level + (self._now() - at) * limit / PERIOD_S)

    def _forget_full(self) -> None:
        full = [t for t in self._levels if self._level(t, limit := self._per_minute(t)) >= limit]
        for tenant in full:
            del self._levels[tenant]


class MeteredRouterApi:
    """A door that takes tenants' quotas into account.

    Args:
        quotas: of tokens. requests: of requests; every one that is let in counts, however it ends.
        on_refused: is told (reason, tenant) of those that it refuses.
    """

    def __init__(
        self,
        door: RouterApi,
        quotas: TenantQuotas,
        on_refused: Callable[[str, str], None] = lambda reason, tenant: None,
        *,
        requests: TenantQuotas | None = None,
    ) -> None:
        self._door = door
        self._on_refused = on_refused
        self._quotas = quotas
        self._requests = requests

    def headers(self, tenant: str) -> dict[str, str]:
        """Of the tenant's answers."""
        told = {} if self._requests is None else self._requests.headers(tenant)
        return told | self._quotas.headers(tenant)

    def models(self) -> list[ModelInfo]:
        return self._door.models()

    def ready(self) -> tuple[bool, list[str]]:
        return self._door.ready()

    def features(self, model: object = "") -> ModelFeatures:
        return self._door.features(model)

    def tokens(self, model: object = "") -> Tokens:
        return self._door.tokens(model)

    async def tokenize(self, spec: UncheckedRequest) -> list[int]:
        return await self._door.tokenize(spec)

    async def detokenize(self, model: object, token_ids: object) -> str:
        return await self._door.detokenize(model, token_ids)

    async def prepare(self, spec: UncheckedRequest) -> ValidatedRequest:
        """Raises: QuotaExceededError, and what the door raises."""
        self._check(spec.tenant)
        prepared = await self._door.prepare(spec)
        self._quotas.spend(spec.tenant, len(prepared.prompt.token_ids))
        return prepared

    def prepare_again(
        self, before: ValidatedRequest, prompt: PackedIds, timeout_s: float | None, *, draws_seed: bool
    ) -> ValidatedRequest:
        """Raises: as prepare."""
        self._check(before.tenant)
        prepared = self._door.prepare_again(before, prompt, timeout_s, draws_seed=draws_seed)
        self._quotas.spend(before.tenant, prompt.count)
        return prepared

    def _check(self, tenant: str) -> None:
        try:
            if self._requests is not None:
                self._requests.check(tenant)
            self._quotas.check(tenant)
            if self._requests is not None:
                self._requests.spend(tenant, 1)
        except QuotaExceededError as error:
            self._on_refused(error.reason, tenant)
            raise

    def explain(self, request_id: str, tenant: str) -> router_pb2.ExplainResponse:
        return self._door.explain(request_id, tenant)

    def what_if(self, request: ValidatedRequest, pool: str) -> router_pb2.WhatIfResponse:
        return self._door.what_if(request, pool)

    def place(
        self, requests: Sequence[ValidatedRequest], spend: Callable[[str, int], None] = lambda _, __: None
    ) -> list[router_pb2.Placed | DiptychError]:
        def spent(tenant: str, num_tokens: int) -> None:
            self._quotas.spend(tenant, num_tokens)
            spend(tenant, num_tokens)

        return self._door.place(requests, spent)

    def tickets_left(self, attempts: Iterable[str]) -> None:
        self._door.tickets_left(attempts)

    async def generate(self, request: ValidatedRequest) -> AsyncIterator[GenerateEvent]:
        events = cast(AsyncGenerator[GenerateEvent, None], self._door.generate(request))
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TokenEvent):
                    self._quotas.spend(request.tenant, len(event.token_ids))
                yield event
