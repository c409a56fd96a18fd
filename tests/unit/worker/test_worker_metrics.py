"""A worker's metrics: what is counted since when, and failures of KV reads."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import generate_latest

from diptych.common.errors import DiptychError, TransferError
from diptych.engine.messages import EngineStats
from diptych.engine.stats import AGE_BUCKETS_S, Ages, BlockAgeStats
from diptych.kvtransfer.api import KvAddress, PeerRef, ReceivedSlab, TakeOffer
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.worker.metrics import WorkerMetrics

PEER = PeerRef("prefill-0", "i", KvAddress("inproc", "", 0))
HANDLE = SlabHandle("prefill-0", "i", "a", 0, 1, 0, 32, 0, 2, 7, 4096, 9, 5, b"mac")


class FakeClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


class FakeReader:
    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.error: Exception | None = None
        self.finished: list[ReceivedSlab] = []
        self.forgotten: list[PeerRef] = []

    async def read(self, peer: PeerRef, handle: SlabHandle, *, deadline_s: float) -> ReceivedSlab:
        self.clock.time += 0.02
        if self.error is not None:
            raise self.error
        return ReceivedSlab(handle, 0, memoryview(b""))

    def finish(self, slab: ReceivedSlab) -> None:
        self.finished.append(slab)

    async def forget(self, peer: PeerRef) -> None:
        self.forgotten.append(peer)

    def expect(self, peer: PeerRef, attempt: str, take: TakeOffer, *, read_s: float) -> bool:
        take(ReceivedSlab(HANDLE, 0, memoryview(b"")))
        take(TransferError("damaged"))
        return True


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value("diptych_" + name, labels)


async def test_reads_are_timed_and_failures_counted_by_reason() -> None:
    clock = FakeClock()
    metrics = WorkerMetrics("decode", stats=EngineStats, clock=clock)
    inner = FakeReader(clock)
    reader = metrics.metered(inner)
    slab = await reader.read(PEER, HANDLE, deadline_s=1.0)
    reader.finish(slab)
    await reader.forget(PEER)
    assert (inner.finished, inner.forgotten) == ([slab], [PEER])
    assert value(metrics, "kv_transfer_seconds_count") == 1
    assert value(metrics, "kv_transfer_seconds_sum") == pytest.approx(0.02)
    assert value(metrics, "prompt_tokens_by_source_total", source="external_kv_transfer") == 32
    inner.error = TransferError("gone")
    with pytest.raises(TransferError):
        await reader.read(PEER, HANDLE, deadline_s=1.0)
    assert value(metrics, "kv_transfer_failures_total", reason=TransferError("x").reason) == 1
    assert value(metrics, "kv_transfer_seconds_count") == 1


async def test_slabs_that_come_unasked_are_counted_as_reads_that_nobody_waited_for() -> None:
    clock = FakeClock()
    metrics = WorkerMetrics("decode", stats=EngineStats, clock=clock)
    taken: list[ReceivedSlab | DiptychError] = []
    assert metrics.metered(FakeReader(clock)).expect(PEER, HANDLE.attempt, taken.append, read_s=1.0)
    slab, error = taken
    assert isinstance(slab, ReceivedSlab)
    assert slab.handle == HANDLE
    assert isinstance(error, TransferError)
    assert value(metrics, "kv_transfer_failures_total", reason=error.reason) == 1
    assert value(metrics, "kv_transfer_seconds_count") == 1
    assert value(metrics, "kv_transfer_seconds_sum") == 0.0
    assert value(metrics, "prompt_tokens_by_source_total", source="external_kv_transfer") == 32


def test_what_the_warm_up_did_is_not_counted() -> None:
    now = EngineStats(prompt_tokens_total=32, computed_tokens_total=32, generation_tokens_total=2, steps=3)
    metrics = WorkerMetrics("decode", stats=lambda: now, clock=FakeClock())
    loop = asyncio.new_event_loop()
    loop.close()
    metrics.begin(None, loop)  # type: ignore[arg-type]  # no transfer: its series are absent, the engine's are not
    now = EngineStats(
        prompt_tokens_total=132, cached_tokens_total=16, computed_tokens_total=116, generation_tokens_total=3, steps=9,
        preemptions_total=2, num_running=4, num_waiting=1, num_waiting_remote=2, kv_usage=0.5,
    )  # fmt: skip
    names = {
        "prompt_tokens_total": 100, "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 16,
        "generation_tokens_total": 1, "num_preemptions_total": 2, "engine_steps_total": 6, "num_requests_running": 4,
        "num_requests_waiting": 3, "kv_cache_usage_perc": 0.5,
    }  # fmt: skip
    assert {name: value(metrics, name) for name in names} == names
    assert value(metrics, "prompt_tokens_by_source_total", source="local_compute") == 84
    assert value(metrics, "prompt_tokens_by_source_total", source="external_kv_transfer") == 0
    assert value(metrics, "kv_transfer_bytes_total") is None
    assert value(metrics, "num_requests_waiting_by_reason", reason="capacity") == 1
    assert value(metrics, "num_requests_waiting_by_reason", reason="deferred") == 2


def test_a_step_is_counted_by_its_tokens() -> None:
    now = EngineStats(steps=3, computed_tokens_total=40)
    metrics = WorkerMetrics("prefill", stats=lambda: now, clock=FakeClock())
    metrics.step()
    assert value(metrics, "iteration_tokens_total_count") == 0, "the warm-up is nobody's request"
    loop = asyncio.new_event_loop()
    loop.close()
    metrics.begin(None, loop)  # type: ignore[arg-type]
    now = EngineStats(steps=5, computed_tokens_total=100, generation_tokens_total=4)
    metrics.step()
    metrics.step()
    assert value(metrics, "iteration_tokens_total_count") == 2
    assert value(metrics, "iteration_tokens_total_sum") == pytest.approx(64)
    # One that delivered nothing, such as a request's that had just ended: counted by whoever reads both series.
    now = EngineStats(steps=6, computed_tokens_total=100, generation_tokens_total=4)
    text = generate_latest(metrics.registry).decode()
    assert "iteration_tokens_total_count 3.0" in text
    assert "engine_steps_total 3.0" in text


def test_ages_of_blocks_are_histograms() -> None:
    ages = Ages((0, 2, *(0 for _ in AGE_BUCKETS_S[2:]), 1), 4000.5)
    now = EngineStats(block_ages=BlockAgeStats(lifetime=ages))
    metrics = WorkerMetrics("prefill", stats=lambda: now, clock=FakeClock())
    assert value(metrics, "kv_block_lifetime_seconds_bucket", le="0.001") == 0
    assert value(metrics, "kv_block_lifetime_seconds_bucket", le="1800.0") == 2
    assert value(metrics, "kv_block_lifetime_seconds_count") == 3
    assert value(metrics, "kv_block_lifetime_seconds_sum") == 4000.5
    assert value(metrics, "kv_block_reuse_gap_seconds_count") == 0


def test_the_caches_constants_are_labels() -> None:
    metrics = WorkerMetrics("prefill", stats=EngineStats, clock=FakeClock())
    metrics.describe_cache(block_size=16, num_gpu_blocks=99)
    assert value(metrics, "cache_config_info", block_size="16", num_gpu_blocks="99") == 1


def test_the_method_of_the_weights_is_a_label() -> None:
    metrics = WorkerMetrics("decode", stats=EngineStats, clock=FakeClock())
    metrics.describe_model(method="int4", dtype="float32", kernels="native", tensor_parallel=2, pipeline=1, nodes=2)
    assert (
        value(
            metrics,
            "model_config_info",
            method="int4",
            dtype="float32",
            kernels="native",
            tensor_parallel="2",
            pipeline="1",
            nodes="2",
        )
        == 1
    )
