"""Tokens and requests a minute per tenant, as token buckets that refill steadily. Prompt and output tokens both count.

A request is admitted while the bucket is not empty; it pays for its prompt at once and for its output as it is
generated. So the level can fall below zero, and the tenant then waits until it is positive again. A resumed answer is paid
once; only one that is computed again is paid again. The buckets are local: with several routers each one grants the whole
quota.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import cast

from diptych.common.errors import DiptychError, QuotaExceededError
from diptych.common.text.token_bytes import Tokens
from diptych.router.adapters.operations import AdapterOperations
from diptych.router.api.interface import RouterApi
from diptych.router.api.packed_ids import PackedIds
from diptych.router.requests.messages import (
    GenerateEvent,
    ModelFeatures,
    ModelInfo,
    StartedEvent,
    TokenEvent,
    UncheckedRequest,
    ValidatedRequest,
)
from diptych.rpc.v1 import router_pb2

PERIOD_S = 60.0
MAX_TENANTS = 10_000


class TenantQuotas:
    """The buckets of all tenants.

    Args:
        per_minute: tokens (or `unit`) a minute of a tenant; 0: no limit. Called at every use, so that a changed quota
            takes effect at once.
        now: seconds on a monotonic clock.
        unit: "tokens" or "requests".
    """

    def __init__(self, per_minute: Callable[[str], int], *, now: Callable[[], float], unit: str = "tokens") -> None:
        self.unit = unit
        self._per_minute = per_minute
        self._now = now
        self._levels: dict[str, tuple[float, float]] = {}
        """Tenant -> (level, time of that level). A missing tenant has a full bucket."""

    def check(self, tenant: str) -> None:
        """Raises: QuotaExceededError, with the time until the bucket refills, when it is empty."""
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
        """The x-ratelimit-* headers of the OpenAI API; empty without a limit."""
        limit = self._per_minute(tenant)
        return self._header_values(limit, self._level(tenant, limit)) if limit else {}

    def _header_values(self, limit: int, level: float, remaining: float | None = None) -> dict[str, str]:
        """Args: remaining: None: the level."""
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
    """A RouterApi that applies tenants' quotas.

    Args:
        quotas: of tokens.
        requests: of requests; every admitted one counts, whatever its outcome.
        on_refused: called with (reason, tenant) of each rejected request.
    """

    def __init__(
        self,
        router_api: RouterApi,
        quotas: TenantQuotas,
        on_refused: Callable[[str, str], None] = lambda reason, tenant: None,
        *,
        requests: TenantQuotas | None = None,
    ) -> None:
        self._router_api = router_api
        self._on_refused = on_refused
        self._quotas = quotas
        self._requests = requests

    def headers(self, tenant: str) -> dict[str, str]:
        """Headers of the tenant's answers."""
        headers = {} if self._requests is None else self._requests.headers(tenant)
        return headers | self._quotas.headers(tenant)

    @property
    def adapters(self) -> AdapterOperations:
        return self._router_api.adapters

    def models(self, tenant: str = "") -> list[ModelInfo]:
        return self._router_api.models(tenant)

    def ready(self, *, names_adapters: bool = True) -> tuple[bool, list[str]]:
        return self._router_api.ready(names_adapters=names_adapters)

    def features(self, model: object = "", tenant: str = "") -> ModelFeatures:
        return self._router_api.features(model, tenant)

    def tokens(self, model: object = "", tenant: str = "") -> Tokens:
        return self._router_api.tokens(model, tenant)

    async def tokenize(self, spec: UncheckedRequest) -> list[int]:
        return await self._router_api.tokenize(spec)

    async def detokenize(self, model: object, token_ids: object, tenant: str = "") -> str:
        return await self._router_api.detokenize(model, token_ids, tenant)

    async def prepare(self, spec: UncheckedRequest) -> ValidatedRequest:
        """Raises: QuotaExceededError, and the errors of the wrapped API."""
        if spec.resume_id is None:
            self._check(spec.tenant)
        prepared = await self._router_api.prepare(spec)
        if prepared.resume is None:
            self._quotas.spend(spec.tenant, len(prepared.prompt.token_ids))
        return prepared

    def prepare_again(
        self, before: ValidatedRequest, prompt: PackedIds, timeout_s: float | None, *, draws_seed: bool
    ) -> ValidatedRequest:
        """Raises: as prepare."""
        self._check(before.tenant)
        prepared = self._router_api.prepare_again(before, prompt, timeout_s, draws_seed=draws_seed)
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

    async def explain(self, request_id: str, tenant: str) -> router_pb2.ExplainResponse:
        return await self._router_api.explain(request_id, tenant)

    def what_if(self, request: ValidatedRequest, pool: str) -> router_pb2.WhatIfResponse:
        return self._router_api.what_if(request, pool)

    def place(
        self, requests: Sequence[ValidatedRequest], spend: Callable[[str, int], None] = lambda _, __: None
    ) -> list[router_pb2.Placed | DiptychError]:
        def spent(tenant: str, num_tokens: int) -> None:
            self._quotas.spend(tenant, num_tokens)
            spend(tenant, num_tokens)

        return self._router_api.place(requests, spent)

    async def close_session(self, session_id: object, tenant: str) -> router_pb2.CloseSessionResponse:
        return await self._router_api.close_session(session_id, tenant)

    def tickets_left(self, attempts: Iterable[str]) -> None:
        self._router_api.tickets_left(attempts)

    async def generate(self, request: ValidatedRequest) -> AsyncIterator[GenerateEvent]:
        events = cast(AsyncGenerator[GenerateEvent, None], self._router_api.generate(request))
        paid: Sequence[int] = ()
        """By choice: tokens that were paid for at another router."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TokenEvent):
                    had = paid[event.choice] if event.choice < len(paid) else 0
                    count = len(event.token_ids)
                    self._quotas.spend(request.tenant, min(count, max(0, event.offset + count - had)))
                elif isinstance(event, StartedEvent) and request.resume is not None:
                    if event.attached:
                        paid = [choice.num_tokens for choice in request.resume.seen.choices]
                    else:  # it is computed again: as any other request
                        self._check(request.tenant)
                        self._quotas.spend(request.tenant, len(request.prompt.token_ids))
                yield event
