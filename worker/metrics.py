"""A worker's metrics, and their server: Prometheus text on a separate port, loopback by default.

Gauges and counters of engine and ledger are read at the scrape, so they cost nothing in between; only KV reads are
timed when they happen. The server has its own thread: it reads `EngineStats` without a lock, and queries the transfer
thread through the event loop, with a deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from itertools import accumulate
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych.common.addresses import host_port
from diptych.common.clock import Clock
from diptych.common.errors import ConfigError, DiptychError
from diptych.common.observe.metrics import PREFIX, TOKEN_BUCKETS, Metrics
from diptych.common.observe.series import Counter, Histogram
from diptych.engine.messages import EngineStats
from diptych.engine.stats import AGE_BUCKETS_S, AdapterStats, Ages, ClaimStats, TierStats
from diptych.kvtransfer.api import PeerRef, ReceivedSlab, SlabReader, TakeOffer, Transfer, TransferAudit
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.worker.adapters import AdapterLibrary
from diptych.worker.gpu import GpuMonitor, gpu_families
from diptych.worker.reads.block_pulls import SOURCE_ATTEMPT, PullFacts

log = structlog.get_logger(__name__)

LOAD_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TRANSFER_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_AUDIT_DEADLINE_S = 2.0
_MOST_STEPS = 256
_JOIN_S = 5.0
_SLAB_STATES = ("free", "packed", "in_flight", "settled", "quarantined")


class WorkerMetrics(Metrics):
    """The metrics of one worker. `role`: "prefill" or "decode": only metrics that change there are exposed.
    `stats`: the engine's current numbers; callable from any thread."""

    def __init__(self, role: str, *, stats: Callable[[], EngineStats], clock: Clock) -> None:
        super().__init__()
        self.role = role
        self._stats = stats
        self._clock = clock
        self._since = EngineStats()
        self._transfer: Transfer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.external_tokens = 0
        self.block_bytes = self.block_size = 0
        """Of the pool's first KV group."""
        self.gpu: GpuMonitor | None = None
        self.library: AdapterLibrary | None = None
        self.registry.register(_Snapshot(self))  # first: it counts the last steps before their histogram is read
        if role == "decode":
            self.register_reads()
        self._adapter_seconds: Histogram | None = None
        self._pulls: tuple[Counter, Counter, Counter] | None = None
        self.iteration_tokens = self.histogram(
            "iteration_tokens_total", "Tokens computed or sampled by an engine step", TOKEN_BUCKETS
        )
        self._seen: EngineStats | None = None
        self._steps_lock = threading.Lock()

    def set_role(self, role: str) -> None:
        """Counters go on; those of reads stay once they were there."""
        self.role = role
        if role == "decode":
            self.register_reads()

    def register_reads(self) -> None:
        """At the latest with the first read. Idempotent."""
        if hasattr(self, "read_seconds"):
            return
        self.read_seconds = self.histogram(
            "kv_transfer_seconds",
            "Time of one slab read, from its request to the verified KV; 0 of one that came unasked",
            TRANSFER_BUCKETS_S,
        )
        self.read_failures = self.counter("kv_transfer_failures", "Reads of slabs that failed, by reason", ["reason"])

    def adapter_loaded(self, seconds: float) -> None:
        """An adapter is in memory. The series is there from the first one on."""
        if self._adapter_seconds is None:
            self._adapter_seconds = self.histogram(
                "lora_load_seconds", "Time of loading an adapter into host memory", LOAD_BUCKETS_S
            )
        self._adapter_seconds.observe(seconds)

    def pulled(self, facts: PullFacts) -> None:
        """A pull has ended. Its series are there from the first one on."""
        if self._pulls is None:
            self._pulls = (
                self.counter("kv_pulls", "Pulls of cached blocks from another worker, by outcome", ["outcome"]),
                self.counter("kv_pulled_tokens", "Prompt tokens whose KV was pulled, by holder", ["holder"]),
                self.counter("kv_pulled_bytes", "Bytes of KV that pulls have read, by holder", ["holder"]),
            )
        pulls, tokens, size = self._pulls
        pulls.labels("whole" if not facts.note else "part" if facts.num_tokens else "none").inc()
        tokens.labels(facts.holder).inc(facts.num_tokens)
        size.labels(facts.holder).inc(facts.kv_bytes)

    def describe_cache(self, **labels: object) -> None:
        """The pool's constants, as labels of one series that is always 1 (for gateways' endpoint pickers)."""
        self._describe("cache_config_info", "The KV cache's constants, as labels", labels)

    def describe_model(self, **labels: object) -> None:
        """How weights are kept and computed with, likewise."""
        self._describe("model_config_info", "Method of the weights, dtype and kernels, as labels", labels)

    def _describe(self, name: str, text: str, labels: Mapping[str, object]) -> None:
        told = {label: str(value) for label, value in labels.items()}
        self.gauge(name, text, list(told)).labels(**told).set(1)

    def step(self) -> None:
        """The engine delivered events: observe its last steps. Steps without events are counted with the next, or at a scrape."""
        with self._steps_lock:
            now, before = self._stats(), self._seen
            if before is None:
                return  # the warm-up's
            steps = now.steps - before.steps
            if steps > 0:
                self._seen = now
                tokens = now.computed_tokens_total - before.computed_tokens_total
                tokens += now.generation_tokens_total - before.generation_tokens_total
                for _ in range(min(steps, _MOST_STEPS)):
                    self.iteration_tokens.observe(tokens / steps)

    def begin(self, transfer: Transfer, loop: asyncio.AbstractEventLoop) -> None:
        """Start counting: the warm-up is not a request."""
        self._since = self._seen = self._stats()
        self._transfer, self._loop = transfer, loop

    def metered(self, reader: SlabReader) -> SlabReader:
        """Decode: the same reader, timed and counted."""
        return _MeteredReader(reader, self, self._clock)

    def engine_families(self) -> Iterator[Metric]:
        now, since = self._stats(), self._since
        yield _gauge("num_requests_running", "Requests in the running batch, prefilling or decoding", now.num_running)
        waiting = now.num_waiting + now.num_waiting_remote
        yield _gauge("num_requests_waiting", "Requests waiting for blocks, a turn, or KV from prefill", waiting)
        reasons = GaugeMetricFamily(
            PREFIX + "num_requests_waiting_by_reason",
            "Waiting requests; capacity: for blocks or a turn; deferred: for KV from prefill",
            labels=["reason"],
        )
        reasons.add_metric(["capacity"], now.num_waiting)
        if self.role == "decode":
            reasons.add_metric(["deferred"], now.num_waiting_remote)
        yield reasons
        yield _gauge("waiting_prompt_tokens", "Prompt tokens queued or not yet computed", now.waiting_prompt_tokens)
        yield _gauge(
            "prefill_tokens_per_second", "Measured rate at which prompts are computed", now.prefill_tokens_per_s
        )
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use or reserved; 1 is all of them", now.kv_usage)
        cached = now.cached_tokens_total - since.cached_tokens_total
        prompt = now.prompt_tokens_total - since.prompt_tokens_total
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", prompt)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", cached)
        yield _counter("prompt_tokens", "Prompt tokens of admitted requests", prompt)
        sources = CounterMetricFamily(
            PREFIX + "prompt_tokens_by_source", "Prompt tokens by the source of their KV", labels=["source"]
        )
        sources.add_metric(["local_compute"], now.computed_tokens_total - since.computed_tokens_total)
        sources.add_metric(["local_cache_hit"], cached)
        if self.role == "decode":
            sources.add_metric(["external_kv_transfer"], self.external_tokens)
        yield sources
        generated = now.generation_tokens_total - since.generation_tokens_total
        yield _counter("generation_tokens", "Generated tokens, including those sampled by prefill", generated)
        if self.role == "decode":  # prefill's requests never grow
            preempted = now.preemptions_total - since.preemptions_total
            yield _counter("num_preemptions", "Preempted requests", preempted)
            yield _gauge("decode_step_seconds", "Measured time of a step of decode", now.decode_step_s)
        ages = now.block_ages
        yield _ages("kv_block_lifetime_seconds", "Lifetime of a cached block, until its eviction", ages.lifetime)
        yield _ages(
            "kv_block_idle_before_evict_seconds",
            "Time of an evicted block since a request last used it",
            ages.idle_before_evict,
        )
        yield _ages("kv_block_reuse_gap_seconds", "Time between two uses of a cached block", ages.reuse_gap)
        yield from _tier_families(now.tiers, since.tiers)
        yield from _claims(now.claims, since.claims, self.block_bytes, self.block_size)
        yield _counter("engine_steps", "Steps of the engine", now.steps - since.steps)
        if now.steps_ahead or now.not_ahead:  # only on a device
            ahead = now.steps_ahead - since.steps_ahead
            yield _counter("engine_steps_ahead", "Steps launched before the previous one had finished", ahead)
            waited = CounterMetricFamily(
                PREFIX + "engine_steps_not_ahead", "Steps that waited for the previous one's tokens", labels=["reason"]
            )
            before = dict(since.not_ahead)
            for reason, count in now.not_ahead:
                waited.add_metric([reason], count - before.get(reason, 0))
            yield waited
        if self.library is not None:
            yield from _adapter_families(self.library, now.adapters, since.adapters)

    def transfer_families(self) -> Iterator[Metric]:
        """Nothing when the transfer thread does not answer: a missing series is noticed, a stale one is not."""
        audit = self._audit()
        if audit is None:
            return
        moved = audit.bytes_sent if self.role == "prefill" else audit.bytes_received
        moved_text = "KV bytes read by decode workers" if self.role == "prefill" else "KV bytes read and verified"
        yield _counter("kv_transfer_bytes", moved_text, moved)
        if self.role == "prefill":
            text = "Requests whose KV was reclaimed: not read, or not acknowledged, within its lease"
            yield _counter("kv_expired_requests", text, audit.expired_requests)
        slabs = GaugeMetricFamily(PREFIX + "kv_slabs", "Slabs of the staging ring by state", labels=["state"])
        for state in _SLAB_STATES:
            slabs.add_metric([state], getattr(audit.slabs, state))
        yield slabs

    def _audit(self) -> TransferAudit | None:
        """From a thread other than the event loop's."""
        if self._transfer is None or self._loop is None or self._loop.is_closed():
            return None
        coroutine = self._transfer.audit()
        try:
            asked = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop was just closed
            coroutine.close()
            return None
        try:
            return asked.result(_AUDIT_DEADLINE_S)
        except (TimeoutError, CancelledError, DiptychError) as error:
            asked.cancel()
            log.warning("no numbers from the transfer thread", error=repr(error))
            return None


def _adapter_families(library: AdapterLibrary, now: AdapterStats, since: AdapterStats) -> Iterator[Metric]:
    """From any thread: nothing is changed while another one reads it."""
    resident, counts = library.resident(), library.counts
    yield _gauge("lora_resident", "Adapters in host memory", len(resident))
    yield _gauge("lora_resident_bytes", "Bytes of these", sum(one.num_bytes for one in resident))
    held = sum(one.num_requests for one in resident)
    yield _gauge("lora_requests", "Requests with an adapter, waiting or running", held)
    loads = CounterMetricFamily(PREFIX + "lora_loads", "Loads of adapters, by outcome", labels=["outcome"])
    for outcome, count in counts.by_outcome.items():
        loads.add_metric([outcome], count)
    yield loads
    yield _counter("lora_evictions", "Adapters that left host memory for others", counts.evicted)
    yield _gauge("lora_slots_used", "Adapters in slots of the device", len(now.resident))
    yield _gauge("lora_running", "Adapters that running requests compute with", len(now.running))
    yield _counter("lora_installs", "Copies of an adapter into a slot of the device", now.installs - since.installs)
    yield _counter(
        "lora_slot_evictions", "Adapters that left a slot of the device for others", now.evictions - since.evictions
    )


class _Snapshot(Collector):
    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        """Names only, for the registry's check against duplicates."""
        return list(self._metrics.engine_families())

    def collect(self) -> Iterator[Metric]:
        self._metrics.step()
        yield from self._metrics.engine_families()
        if self._metrics.gpu is not None:
            yield from gpu_families(self._metrics.gpu)
        yield from self._metrics.transfer_families()


class _MeteredReader:
    def __init__(self, reader: SlabReader, metrics: WorkerMetrics, clock: Clock) -> None:
        self._reader, self._metrics, self._clock = reader, metrics, clock

    async def read(self, peer: PeerRef, handle: SlabHandle, *, deadline_s: float) -> ReceivedSlab:
        self._metrics.register_reads()
        began = self._clock.now()
        try:
            slab = await self._reader.read(peer, handle, deadline_s=deadline_s)
        except DiptychError as error:
            self._metrics.read_failures.labels(error.reason).inc()
            raise
        self._count(handle, self._clock.now() - began)
        return slab

    def _count(self, handle: SlabHandle, duration_s: float) -> None:
        self._metrics.read_seconds.observe(duration_s)
        # Its other layers are the same tokens; those of a pull are a hit of the cache when they are used.
        if handle.first_layer == 0 and not handle.attempt.startswith(SOURCE_ATTEMPT):
            self._metrics.external_tokens += handle.num_tokens

    def expect(self, peer: PeerRef, attempt: str, take: TakeOffer, *, read_s: float) -> bool:
        def counted(slab: ReceivedSlab | DiptychError) -> None:
            if isinstance(slab, DiptychError):
                self._metrics.read_failures.labels(slab.reason).inc()
            else:
                self._count(slab.handle, 0.0)
            take(slab)

        self._metrics.register_reads()
        return self._reader.expect(peer, attempt, counted, read_s=read_s)

    def unexpect(self, attempt: str) -> None:
        self._reader.unexpect(attempt)

    def finish(self, slab: ReceivedSlab) -> None:
        self._reader.finish(slab)

    def renew(self, peer: PeerRef, handle: SlabHandle) -> None:
        self._reader.renew(peer, handle)

    async def forget(self, peer: PeerRef) -> None:
        await self._reader.forget(peer)


def _claims(now: ClaimStats, since: ClaimStats, block_bytes: int, block_size: int) -> Iterator[Metric]:
    """Once a request has claimed something."""
    if not now.by_rank:
        return
    claimed = GaugeMetricFamily(
        PREFIX + "kv_claimed_bytes", "Cached KV that requests have claimed, by rank of the tenant", labels=["rank"]
    )
    for rank, blocks in now.by_rank:
        claimed.add_metric([str(rank)], blocks * block_bytes)
    yield claimed
    yield _counter("kv_claims", "Bytes of cached KV that were claimed", (now.made - since.made) * block_bytes)
    ended = CounterMetricFamily(
        PREFIX + "kv_claims_ended",
        "Bytes whose claim ended: expired; pressure: evicted, for want of unclaimed KV; share: the tenant gave them up for other "
        "claims; closed: with their session",
        labels=["reason"],
    )
    for reason, name in (
        ("expired", "expired"),
        ("pressure", "evicted"),
        ("share", "over_share"),
        ("closed", "closed"),
    ):
        ended.add_metric([reason], (getattr(now, name) - getattr(since, name)) * block_bytes)
    yield ended
    yield _counter(
        "kv_claim_kept_tokens",
        "Prefix cache hits, in tokens, on KV that an eviction had passed over for its claim",
        (now.kept - since.kept) * block_size,
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value)


def _tier_families(now: Sequence[TierStats], since: Sequence[TierStats]) -> Iterator[Metric]:
    """Nothing on a worker with one tier: the other series show all of it."""
    if len(now) < 2:
        return
    used = GaugeMetricFamily(PREFIX + "kv_tier_used_bytes", "KV bytes in use, by tier", labels=["tier"])
    size = GaugeMetricFamily(PREFIX + "kv_tier_bytes", "Size of each tier of KV blocks", labels=["tier"])
    hits = CounterMetricFamily(
        PREFIX + "kv_tier_hit_tokens",
        "Prompt tokens whose KV was cached, by the nearest tier that had it",
        labels=["tier"],
    )
    served = CounterMetricFamily(
        PREFIX + "kv_tier_served_tokens",
        "Tokens whose KV other workers were offered, by the tier that had it",
        labels=["tier"],
    )
    evicted = CounterMetricFamily(PREFIX + "kv_tier_evicted_blocks", "Blocks evicted to make room", labels=["tier"])
    dropped = CounterMetricFamily(
        PREFIX + "kv_tier_dropped_blocks", "Blocks that were not written in time", labels=["tier"]
    )
    errors = CounterMetricFamily(
        PREFIX + "kv_tier_errors",
        "Blocks that could not be written, or were not what they should be, by tier and reason",
        labels=["tier", "reason"],
    )
    before = {tier.name: tier for tier in since}
    for tier in now:
        old = before.get(tier.name) or TierStats(tier.name, 0, 0)
        used.add_metric([tier.name], tier.used_bytes)
        size.add_metric([tier.name], tier.num_bytes)
        hits.add_metric([tier.name], tier.hit_tokens - old.hit_tokens)
        served.add_metric([tier.name], tier.served_tokens - old.served_tokens)
        evicted.add_metric([tier.name], tier.evicted_blocks - old.evicted_blocks)
        dropped.add_metric([tier.name], tier.dropped_blocks - old.dropped_blocks)
        old_errors = dict(old.errors)
        for reason, count in tier.errors:
            errors.add_metric([tier.name, reason], count - old_errors.get(reason, 0))
    yield from (used, size, hits, served, evicted, dropped, errors)


def _ages(name: str, text: str, ages: Ages) -> Metric:
    ends = [*(str(end) for end in AGE_BUCKETS_S), "+Inf"]
    buckets = list(zip(ends, accumulate(ages.buckets), strict=True))
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=ages.sum_s)


class MetricsServer:
    """GET /metrics on host:port until close(). Raises: ConfigError when the port cannot be bound."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, host, metrics.exposed)
        except OSError as error:
            raise ConfigError(
                "metrics_port", host_port(host, port), f"cannot be listened on: {error.strerror}"
            ) from None
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Blocks until the current response is written, a few seconds at most."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)
