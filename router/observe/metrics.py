"""The router's metrics, on its monotonic clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from diptych.common.clock import Clock
from diptych.common.errors import DiptychError
from diptych.common.observe.metrics import (
    E2E_BUCKETS_S,
    ITL_BUCKETS_S,
    STAGE_BUCKETS_S,
    TOKEN_BUCKETS,
    TTFT_BUCKETS_S,
    Metrics,
)
from diptych.router.observe.adapter_metrics import FINISHED, AdapterMetrics
from diptych.router.observe.explain import RequestTrace
from diptych.router.observe.live_series import LiveSeries
from diptych.router.observe.tenant_metrics import TenantMetrics
from diptych.router.requests.messages import FinishedEvent, TokenEvent, UsageInfo, ValidatedRequest


class RouterMetrics(Metrics):
    """The metrics.

    Args:
        degraded: read at every scrape: whether the store is unavailable or read-only.
        mode_degraded: the same: whether some worker's cache events do not arrive.
        kv_usage: the same: mean share of KV blocks in use on the decode workers that this router sees.
        waiting_turn: the same: requests in the wait queue.
        copies: the same: hot prefixes that were copied.
        by_tenant: enable series with tenants' names.
    """

    def __init__(
        self,
        *,
        degraded: Callable[[], bool] = lambda: False,
        mode_degraded: Callable[[], bool] = lambda: False,
        kv_usage: Callable[[], float] = lambda: 0.0,
        waiting_turn: Callable[[], float] = lambda: 0.0,
        copies: Callable[[], float] = lambda: 0.0,
        by_tenant: bool = False,
    ) -> None:
        super().__init__()
        self.live = LiveSeries()
        self._parsing = _Parsing(self)
        self.tenants = TenantMetrics(self) if by_tenant else None
        self.adapters = AdapterMetrics(self)
        self.num_running = self.num_waiting = 0
        self.gauge("num_requests_running", "Requests being relayed by this router").set_function(
            lambda: float(self.num_running)
        )
        self.gauge("num_requests_waiting", "Requests that wait for their first token").set_function(
            lambda: float(self.num_waiting)
        )
        self.tokenize = self.histogram(
            "tokenize_seconds", "Checks, template and tokenizer, including the wait for a thread", STAGE_BUCKETS_S
        )
        self.stages = {
            "queue": self.histogram(
                "request_queue_time_seconds",
                "Waiting at the router, for decode's blocks, and in prefill's queue",
                E2E_BUCKETS_S,
            ),
            "prefill": self.histogram(
                "request_prefill_time_seconds", "From the prompt's turn to the first token", STAGE_BUCKETS_S
            ),
            "transfer": self.histogram(
                "request_transfer_time_seconds", "From the first token until all KV was on decode", STAGE_BUCKETS_S
            ),
            "decode": self.histogram("request_decode_time_seconds", "From the first token to the last", E2E_BUCKETS_S),
        }
        self.inference = self.histogram(
            "request_inference_time_seconds", "From the prompt's turn to the last token", E2E_BUCKETS_S
        )
        self.second_token = self.histogram(
            "first_to_second_token_seconds", "The interval that includes the hand-off", ITL_BUCKETS_S
        )
        self.fallbacks = self.counter(
            "fallbacks", "Attempts that deviated from their placement, by where the work went instead", ["to"]
        )
        self.prefill_faults = self.counter(
            "prefill_faults", "Prefill workers that decode gave up, by reason", ["reason"]
        )
        self.ttft = self.histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", TTFT_BUCKETS_S
        )
        self.itl = self.histogram("inter_token_latency_seconds", "Time per token after the first", ITL_BUCKETS_S)
        self.e2e = self.histogram("e2e_request_latency_seconds", "From arrival to the end of an answer", E2E_BUCKETS_S)
        self.request_prompt = self.histogram("request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS)
        self.request_generation = self.histogram(
            "request_generation_tokens", "Generated tokens of a request", TOKEN_BUCKETS
        )
        self.requests = self.counter("requests", "Requests that could be parsed, including rejected ones")
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of requests that reached their first token")
        self.cached_tokens = self.counter(
            "prompt_tokens_cached", "Of those, the ones that no worker had to compute (cached)"
        )
        self.generation_tokens = self.counter(
            "generation_tokens", "Generated tokens: streamed ones, and those of answers discarded by best_of"
        )
        self.unfinished_tokens = self.counter(
            "unfinished_tokens", "Tokens of requests that failed or whose client disconnected", ["of"]
        )
        self.success = self.counter("request_success", "Finished answers by finish reason", ["finished_reason"])
        self.errors = self.counter("request_errors", "Requests that failed, by reason", ["reason"])
        self.unparsed = self.counter(
            "unparsed_requests", "Requests whose body could not be read, by reason; not in requests_total", ["reason"]
        )
        self.placements = self.counter("placements", "Attempts by where the prompt was placed", ["prefill"])
        self.replacements = self.counter("replacements", "Attempts that followed one that was refused or lost")
        self.migrations = self.counter(
            "migrations",
            "Attempts that lost their decode worker, by its reason and what became of it",
            ["reason", "outcome"],
        )
        self.migration = self.histogram(
            "migration_seconds", "From the loss of a decode worker until another one had accepted", STAGE_BUCKETS_S
        )
        self.resumes = self.counter(
            "resumes",
            "Answers that went on after their stream had broken: attached to the worker that has them, or computed again",
            ["outcome"],
        )
        self.admission = self.counter("admission", "Requests by admission decision", ["verdict"])
        self.admission_checks = self.counter(
            "admission_refusals_judged",
            "Requests that admission would have rejected, by whether the rejection had been right",
            ["right"],
        )
        self.tickets = self.counter("placement_tickets", "Placement tickets by outcome", ["outcome"])
        self.kv_bytes = self.counter("kv_transfer_bytes", "Bytes of KV transferred from prefill to decode")
        self.predicted_cached = self.counter("predicted_cached_tokens", "Cached prompt tokens predicted by placement")
        self.cached_error = self.counter(
            "predicted_cached_tokens_error", "Absolute error of that prediction, in prompt tokens"
        )
        self.ttft_error = self.histogram(
            "predicted_ttft_error_seconds", "Absolute error of the predicted time to first token", TTFT_BUCKETS_S
        )
        self.regret = self.histogram(
            "placement_regret_seconds", "Lateness of the first token against its prediction", TTFT_BUCKETS_S
        )
        self.gauge(
            "mode_degraded", "1 while some worker's cache events do not arrive: it is placed on by load only"
        ).set_function(lambda: float(mode_degraded()))
        self.gauge("requests_waiting_turn", "Requests in the router's wait queue").set_function(waiting_turn)
        self.gauge(
            "hot_prefix_copies", "Requests that were placed to create another copy of a hot prefix"
        ).set_function(copies)
        self.gauge(
            "kv_cache_usage_perc", "Mean share of KV blocks in use on the decode workers with a lease"
        ).set_function(kv_usage)
        self.gauge(
            "degraded", "1 while the store is unavailable or read-only: the view of the cluster may be stale"
        ).set_function(lambda: float(degraded()))

    def processes(self, count: int) -> None:
        """Expose the number of this router's processes."""
        self.gauge("router_processes", "Processes of this router; each of them that answers has this series").set(count)

    def parsing(self) -> AbstractContextManager[None]:
        """Counts an error of the block as a request that could not be read."""
        return self._parsing

    def refused(self, reason: str, tenant: str) -> None:
        """A request was rejected, or failed where nothing else counts it."""
        self.requests.inc()
        self.failed(reason, tenant)

    def failed(self, reason: str, tenant: str) -> None:
        """A counted request failed."""
        self.errors.labels(reason).inc()
        if self.tenants is not None:
            self.tenants.failed(tenant, reason)

    def answered(self, reason: str, tenant: str, usage: UsageInfo, total_s: float, kv_bytes: int, now: float) -> None:
        """A request has ended well. `total_s`: from its arrival. `usage`: without the tokens of an attempt before it."""
        self.success.labels(reason).inc()
        self.e2e.observe(total_s)
        self.request_prompt.observe(usage.prompt_tokens)
        self.request_generation.observe(usage.completion_tokens)
        self.kv_bytes.inc(kv_bytes)
        if self.tenants is not None:
            self.tenants.finished(tenant)
        self.live.finished(now)

    def first_token(self, ttft_s: float, tenant: str, now: float) -> None:
        """`ttft_s`: from the request's arrival."""
        self.ttft.observe(ttft_s)
        self.live.first_token(ttft_s, now)
        if self.tenants is not None:
            self.tenants.first_token(tenant, ttft_s)

    def computed(self, prompt_tokens: int, cached_tokens: int, tenant: str, now: float) -> None:
        """A request's prompt, once, with its first token, whatever its outcome."""
        self.prompt_tokens.inc(prompt_tokens)
        self.cached_tokens.inc(cached_tokens)
        self.live.computed(prompt_tokens, cached_tokens, now)
        if self.tenants is not None:
            self.tenants.computed(tenant, prompt_tokens, cached_tokens)

    def unfinished(self, prompt_tokens: int, generation_tokens: int) -> None:
        """A request that had its first token and was not answered."""
        self.unfinished_tokens.labels("prompt").inc(prompt_tokens)
        self.unfinished_tokens.labels("generation").inc(generation_tokens)

    def pace(self, between_s: float, count: int, now: float) -> None:
        """`count` tokens arrived, each after this interval."""
        self.itl.observe(between_s, count)
        self.live.tokens(count, now, between_s)

    def written(self, count: int, tenant: str) -> None:
        """Tokens of an answer arrived, or are known to have been sampled for it."""
        self.generation_tokens.inc(count)
        if self.tenants is not None:
            self.tenants.tokens(tenant, count)

    def split(self, trace: RequestTrace, total_s: float) -> None:
        """Record a request's stages. `total_s`: from its arrival to its last token. Decode's times are on its clock and
        are only added, never subtracted from another clock."""
        facts = trace.facts
        if facts is None or trace.ttft_s <= 0:
            return
        queue_s = trace.waited_s + facts.reserved_s + facts.prefill_queue_s
        decode_s = max(0.0, total_s - trace.ttft_s)
        parts = {"queue": queue_s, "decode": decode_s}
        if facts.first_token_s > 0:
            parts["prefill"] = max(0.0, facts.first_token_s - facts.reserved_s - facts.prefill_queue_s)
        if facts.kv_complete_s > 0 and facts.kv_bytes:
            parts["transfer"] = max(0.0, facts.kv_complete_s - facts.first_token_s)
        for name, seconds in parts.items():
            self.stages[name].observe(seconds)
            self.live.stage(name, seconds)
        if trace.longest_gap_s > 0:
            self.live.stage("longest_gap", trace.longest_gap_s)
        self.inference.observe(max(0.0, total_s - queue_s))

    def count_deviations(self, trace: RequestTrace, faults: Sequence[str]) -> None:
        """Count deviations from the placement. `faults`: reasons of the prefill workers that decode gave up, in order."""
        for reason in faults:
            self.prefill_faults.labels(reason).inc()
        placement, facts = trace.placement, trace.facts
        if placement is None or facts is None or placement.local_prefill:
            return
        if facts.local_prefill:
            self.fallbacks.labels("local_prefill" if faults else "decode_cache").inc()
        elif faults:
            self.fallbacks.labels("other_prefill").inc()

    def moved(self, reason: str, seconds: float) -> None:
        """Another worker has accepted a request, so long after the loss of its own."""
        self.migrations.labels(reason, "moved").inc()
        self.migration.observe(seconds)

    def judged(self, met_target: bool | None) -> None:
        """A request that admission would have rejected: whether it met its target. None: it had no target."""
        if met_target is not None:
            self.admission_checks.labels("no" if met_target else "yes").inc()

    def predictions(self, trace: RequestTrace) -> None:
        """A request has ended well: compare the predictions with it."""
        self.predicted_cached.inc(trace.predicted_cached_tokens)
        self.cached_error.inc(abs(trace.predicted_cached_tokens - trace.cached_tokens))
        if trace.ttft_s > 0:
            late_s = trace.ttft_s - trace.predicted_ttft_s
            self.ttft_error.observe(abs(late_s))
            self.regret.observe(max(0.0, late_s))


class _Parsing(AbstractContextManager[None]):
    """See RouterMetrics.parsing. It keeps nothing, so that one serves all requests."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DiptychError):
            self._metrics.unparsed.labels(error.reason).inc()


class RequestTimer:
    """One request's share of the metrics. Exactly one of finished, failed, left ends it."""

    def __init__(self, metrics: RouterMetrics, request: ValidatedRequest, clock: Clock) -> None:
        self._metrics, self._request, self._clock = metrics, request, clock
        self._last: dict[int, float] = {}
        """By choice: time of its last token."""
        self._over = False
        self._tokens = 0
        self._had = len(request.resume_after)
        """Tokens of the answer that another router has counted."""
        metrics.requests.inc()
        metrics.num_running += 1
        metrics.num_waiting += 1

    def tokens(self, event: TokenEvent, num_new: int | None = None) -> None:
        """`num_new`: of its tokens, those that another router has not counted; None: all."""
        count = len(event.token_ids)
        if num_new is not None:
            self._had += count - num_new
            count = num_new
        if not count:
            return
        now = self._clock.now()
        metrics, tenant = self._metrics, self._request.tenant
        metrics.written(count, tenant)
        last = self._last.get(event.choice)
        if last is None:
            if not self._last:
                metrics.num_waiting -= 1
                metrics.first_token(now - self._request.arrived, tenant, now)
                metrics.computed(len(self._request.prompt.token_ids), event.cached_tokens, tenant, now)
            metrics.live.tokens(1, now)
            last = now  # tokens in the first message count as simultaneous
            pairs = count - 1
        else:
            pairs = count
            if self._tokens == 1 and self._request.sampling.num_choices == 1:
                metrics.second_token.observe(now - last)
                metrics.live.stage("second_token", now - last)
        self._tokens += count
        if pairs:
            metrics.pace((now - last) / pairs, pairs, now)
        self._last[event.choice] = now

    def finished(self, event: FinishedEvent, kv_bytes: int) -> None:
        if not self._close():
            return
        now, request, metrics, usage = self._clock.now(), self._request, self._metrics, event.usage
        if not self._last:  # all of it was sent before
            metrics.computed(usage.prompt_tokens, usage.cached_tokens, request.tenant, now)
        own = usage.completion_tokens - self._had
        if own > self._tokens:  # from choices that best_of discarded
            metrics.written(own - self._tokens, request.tenant)
            metrics.live.tokens(own - self._tokens, now)
        usage = UsageInfo(usage.prompt_tokens, own, usage.cached_tokens)
        metrics.answered(event.reason.value, request.tenant, usage, now - request.arrived, kv_bytes, now)
        metrics.adapters.ended(request.adapter, FINISHED, usage.prompt_tokens, usage.completion_tokens)

    def failed(self, error: DiptychError) -> None:
        if self._close():
            self._not_answered(error.reason)
            self._metrics.live.failed(self._clock.now())

    def left(self) -> None:
        """The client disconnected; no effect when the request has ended."""
        if self._close():
            self._not_answered("CLIENT_LEFT")

    def _not_answered(self, reason: str) -> None:
        self._metrics.failed(reason, self._request.tenant)
        self._metrics.adapters.ended(self._request.adapter, reason)
        if self._last:
            self._metrics.unfinished(len(self._request.prompt.token_ids), self._tokens)

    def _close(self) -> bool:
        if self._over:
            return False
        self._over = True
        self._metrics.num_running -= 1
        if not self._last:
            self._metrics.num_waiting -= 1
        return True
