"""Series with a tenant's name as label: off by default, because readers of metrics could then list the tenants."""

from __future__ import annotations

from diptych.common.observe.metrics import TTFT_BUCKETS_S, Metrics

FINISHED = "finished"


class TenantMetrics:
    """Tenants come from the key file, so the number of series is bounded. Without keys there is one, ""."""

    def __init__(self, metrics: Metrics) -> None:
        by = ["tenant"]
        self._requests = metrics.counter("tenant_requests", "Requests by tenant and outcome", ["tenant", "outcome"])
        self._prompt = metrics.counter(
            "tenant_prompt_tokens", "Prompt tokens of requests that reached their first token", by
        )
        self._cached = metrics.counter(
            "tenant_prompt_tokens_cached", "Of those, the ones that no worker had to compute (cached)", by
        )
        self._generation = metrics.counter("tenant_generation_tokens", "Tokens that were streamed, by tenant", by)
        self._ttft = metrics.histogram(
            "tenant_time_to_first_token_seconds", "From arrival to the first token, by tenant", TTFT_BUCKETS_S, by
        )

    def first_token(self, tenant: str, seconds: float) -> None:
        self._ttft.labels(tenant).observe(seconds)

    def tokens(self, tenant: str, count: int) -> None:
        self._generation.labels(tenant).inc(count)

    def computed(self, tenant: str, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt.labels(tenant).inc(prompt_tokens)
        self._cached.labels(tenant).inc(cached_tokens)

    def finished(self, tenant: str) -> None:
        self._requests.labels(tenant, FINISHED).inc()

    def failed(self, tenant: str, reason: str) -> None:
        """Also for rejected requests, for example for their quota."""
        self._requests.labels(tenant, reason).inc()
