"""What the router counts and times, on its own monotonic clock."""

from __future__ import annotations

from collections.abc import Callable

from diptych.common.clock import Clock
from diptych.common.errors import DiptychError
from diptych.common.metrics import E2E_BUCKETS_S, ITL_BUCKETS_S, TOKEN_BUCKETS, TTFT_BUCKETS_S, Metrics
from diptych.router.explain import Story
from diptych.router.messages import FinishedEvent, PreparedRequest, TokenEvent


class RouterMetrics(Metrics):
    """Args:
    degraded: read at every scrape: whether the view of the cluster may be old.
    mode_degraded: the same: whether some worker's cache cannot be followed.
    """

    def __init__(
        self, *, degraded: Callable[[], bool] = lambda: False, mode_degraded: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__()
        self.running = self.gauge("num_requests_running", "Requests that this router relays now")
        self.ttft = self.histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", TTFT_BUCKETS_S
        )
        self.itl = self.histogram("inter_token_latency_seconds", "Time per token after the first", ITL_BUCKETS_S)
        self.e2e = self.histogram("e2e_request_latency_seconds", "From arrival to the end of an answer", E2E_BUCKETS_S)
        self.request_prompt = self.histogram("request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS)
        self.request_generation = self.histogram(
            "request_generation_tokens", "Generated tokens of a request", TOKEN_BUCKETS
        )
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of answered requests")
        self.cached_tokens = self.counter("prompt_tokens_cached", "Prompt tokens that no worker had to compute")
        self.generation_tokens = self.counter("generation_tokens", "Tokens that were streamed")
        self.success = self.counter("request_success", "Answers by the reason of their end", ["finished_reason"])
        self.errors = self.counter("request_errors", "Requests that failed, by reason", ["reason"])
        self.placements = self.counter("placements", "Attempts by where the prompt was to be computed", ["prefill"])
        self.replacements = self.counter("replacements", "Requests that were placed again before their first token")
        self.kv_bytes = self.counter("kv_transfer_bytes", "Bytes of KV that crossed from prefill to decode")
        self.predicted_cached = self.counter(
            "predicted_cached_tokens", "Cached prompt tokens as placement expected them"
        )
        self.cached_error = self.counter(
            "predicted_cached_tokens_error", "Prompt tokens by which that expectation was off, either way"
        )
        self.ttft_error = self.histogram(
            "predicted_ttft_error_seconds", "Difference between expected and seen time to first token", TTFT_BUCKETS_S
        )
        self.regret = self.histogram(
            "placement_regret_seconds", "How much later than expected the first token came", TTFT_BUCKETS_S
        )
        self.gauge(
            "mode_degraded", "1 while placement by cache has no news of some worker's cache and is by load there"
        ).set_function(lambda: float(mode_degraded()))
        self.gauge("degraded", "1 while the store is away and the view of the cluster may be old").set_function(
            lambda: float(degraded())
        )

    def predictions(self, story: Story) -> None:
        """A request has ended well: what was expected of it, against what came."""
        self.predicted_cached.inc(story.predicted_cached_tokens)
        self.cached_error.inc(abs(story.predicted_cached_tokens - story.cached_tokens))
        if story.ttft_s > 0:
            late_s = story.ttft_s - story.predicted_ttft_s
            self.ttft_error.observe(abs(late_s))
            self.regret.observe(max(0.0, late_s))


class RequestTimer:
    """One request's share of the metrics. Exactly one of finished, failed, left ends it."""

    def __init__(self, metrics: RouterMetrics, request: PreparedRequest, clock: Clock) -> None:
        self._metrics, self._request, self._clock = metrics, request, clock
        self._last: float | None = None
        self._over = False
        metrics.running.inc()

    def tokens(self, event: TokenEvent) -> None:
        count = len(event.token_ids)
        if not count:
            return
        now = self._clock.now()
        self._metrics.generation_tokens.inc(count)
        if self._last is None:
            self._metrics.ttft.observe(now - self._request.arrived)
            count -= 1  # tokens in the first message beside the first came at the same moment
            self._last = now
        for _ in range(count):
            self._metrics.itl.observe((now - self._last) / count)
        self._last = now

    def finished(self, event: FinishedEvent, kv_bytes: int) -> None:
        if self._close():
            metrics, usage = self._metrics, event.usage
            metrics.success.labels(event.reason.value).inc()
            metrics.e2e.observe(self._clock.now() - self._request.arrived)
            metrics.request_prompt.observe(usage.prompt_tokens)
            metrics.request_generation.observe(usage.completion_tokens)
            metrics.prompt_tokens.inc(usage.prompt_tokens)
            metrics.cached_tokens.inc(usage.cached_tokens)
            metrics.kv_bytes.inc(kv_bytes)

    def failed(self, error: DiptychError) -> None:
        if self._close():
            self._metrics.errors.labels(error.reason).inc()

    def left(self) -> None:
        """The client went away; nothing to do when the request has ended."""
        if self._close():
            self._metrics.errors.labels("CLIENT_LEFT").inc()

    def _close(self) -> bool:
        if self._over:
            return False
        self._over = True
        self._metrics.running.dec()
        return True
