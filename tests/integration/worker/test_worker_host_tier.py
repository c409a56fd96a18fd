"""The host tier of a worker, as a router sees it: its events give host hits, a gap in them leads to a snapshot with
both tiers, and the worker reports the cost of a swap."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType

from diptych.cli.worker_roles import services_of
from diptych.common.block_identity import block_keys
from diptych.common.clock import MonotonicClock
from diptych.common.store.interface import KvEvent
from diptych.common.store.memory import MemoryStore
from diptych.common.tiers import TIER_NAMES
from diptych.router.cluster.worker_link import WorkerLink
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.index import BlockIndex, IndexMode
from diptych.rpc.stubs import WorkerStub
from diptych.rpc.v1 import worker_pb2
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting

PROMPTS = [list(range(100 * i, 100 * i + 49)) for i in range(3)]
"""Four blocks each with their answer, three of them full; the pool holds eight."""


@asynccontextmanager
async def a_worker(pd: ModuleType, store: MemoryStore) -> AsyncIterator[WorkerRuntime]:
    config = pd.worker_config("decode", "decode-0", heartbeat_s=0.02, lease_s=600.0, num_host_blocks=8)
    model = pd.fake_model(num_blocks=8, num_host_blocks=8)
    worker = WorkerRuntime(config, model, make_transfer=make_transfer, make_services=services_of, store=store)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


async def serve_prompts(pd: ModuleType, worker: WorkerRuntime) -> None:
    alone = pd.Cluster(worker, [])
    async with pd.FakeRouter(worker.address) as router:
        for i, prompt in enumerate(PROMPTS):
            answer = await router.run(alone.submit_message(attempt=f"a{i}", prompt=prompt, max_tokens=2))
            assert answer.error is None


async def all_events(store: MemoryStore, worker: WorkerRuntime) -> list[KvEvent]:
    """The stream once it has caught up with the worker's lease."""
    dump = await worker.engine.dump_blocks()
    events: list[KvEvent] = []

    async def caught_up() -> bool:
        found = (await store.read_events({"decode-0": "0"}, block_s=0.0)).get("decode-0", [])
        events[:] = [event for _, event in found]
        last = {event.tier: event.sequence for event in events}
        expected = dict(zip(TIER_NAMES, (tier.sequence for tier in dump.tiers), strict=True))
        return all(last.get(name) == expected[name] for name in ("device", "host"))

    await waiting.until(caught_up)
    return events


def new_index(worker: WorkerRuntime) -> BlockIndex:
    index = BlockIndex()
    index.register("decode-0", worker.incarnation, 0, 0)
    return index


async def test_host_credit_from_events_and_after_a_hole_from_a_snapshot(pd: ModuleType) -> None:
    store = MemoryStore(MonotonicClock())
    async with a_worker(pd, store) as worker:
        await serve_prompts(pd, worker)
        events = await all_events(store, worker)
        for tier in ("device", "host"):
            sequences = [event.sequence for event in events if event.tier == tier and event.kind != "cleared"]
            assert sequences == list(range(1, len(sequences) + 1))
            assert sequences
        keys = block_keys(worker.model.identity, PROMPTS[0])
        index = new_index(worker)
        index.apply_all("decode-0", events)
        assert index.mode("decode-0") is IndexMode.EXACT
        runs = index.runs(as_keys(keys))
        column = index.column("decode-0")
        assert column is not None
        assert runs.lower_blocks is not None
        in_pool = set((await worker.engine.dump_blocks()).tiers[0].keys)
        pushed_out = [key for key in keys if key not in in_pool]
        assert pushed_out
        assert (runs.blocks[column], runs.lower_blocks[0][column]) == (len(keys), len(pushed_out))

        holed = new_index(worker)
        first_host = next(i for i, event in enumerate(events) if event.tier == "host")
        holed.apply_all("decode-0", events[:first_host] + events[first_host + 1 :] + [lost_tail(worker, events)])
        assert holed.needs_snapshot() == ["decode-0"]
        last = events_of(events, "host")[-1].sequence
        record = None

        async def lease_says_so() -> bool:  # from the next heartbeat on
            nonlocal record
            (record,) = await store.list_workers()
            return record.event_sequences[1] == last

        await waiting.until(lease_says_so)
        link = WorkerLink(
            record,
            receiving_s=MonotonicClock().now,
            probe_s=1.0,
            dead_s=1.0,
            on_change=lambda: None,
            call_key=pd.CALL_KEY,
        )
        try:
            dump = await link.dump_blocks()
        finally:
            await link.close("the test is over")
        holed.load_snapshot(
            "decode-0",
            worker.incarnation,
            epoch=dump.epoch,
            tiers=dump.tiers,
        )
        for tier in (0, 1):
            assert holed.keys_of("decode-0", tier) == index.keys_of("decode-0", tier)


def events_of(events: list[KvEvent], tier: str) -> list[KvEvent]:
    return [event for event in events if event.tier == tier]


def lost_tail(worker: WorkerRuntime, events: list[KvEvent]) -> KvEvent:
    """One host event too far ahead: what a reader gets that missed the one before it."""
    last = events_of(events, "host")[-1]
    return KvEvent(worker.incarnation, last.epoch, last.sequence + 2, "stored", (bytes(16),), "host")


async def test_an_emptied_cache_begins_both_tiers_anew(pd: ModuleType) -> None:
    store = MemoryStore(MonotonicClock())
    async with a_worker(pd, store) as worker:
        await serve_prompts(pd, worker)
        await all_events(store, worker)
        await worker.engine.reset_cache()
        await serve_prompts(pd, worker)
        events = await all_events(store, worker)
        index = new_index(worker)
        index.apply_all("decode-0", events)
        dump = await worker.engine.dump_blocks()
        assert index.mode("decode-0") is IndexMode.EXACT
        assert index.keys_of("decode-0", 1) == set(dump.tiers[1].keys) != set()
        assert index.keys_of("decode-0", 0) == set(dump.tiers[0].keys)


async def get_stats(pd: ModuleType, worker: WorkerRuntime) -> worker_pb2.GetStatsResponse:
    async with pd.worker_channel(worker.address) as channel:
        return await WorkerStub(channel).GetStats(worker_pb2.GetStatsRequest(), timeout=300.0)


async def test_a_worker_reports_its_rates_and_from_where_a_swap_is_cheaper(pd: ModuleType) -> None:
    store = MemoryStore(MonotonicClock())
    async with a_worker(pd, store) as worker:
        cost = (await get_stats(pd, worker)).preemption
        block_bytes = worker.model.compat.kv.block_bytes
        assert [(tier.name, tier.num_bytes, tier.eviction) for tier in cost.tiers] == [
            ("device", 8 * block_bytes, "lru"), ("host", 8 * block_bytes, "lru"),
        ]  # fmt: skip
        assert cost.tiers[1].bytes_per_s > 0
        assert cost.kv_bytes_per_token == worker.model.runner.kv_bytes_per_token
        assert cost.prefill_tokens_per_s > 0
        assert cost.copy_bytes_per_s > 0
        assert cost.HasField("swap_from_tokens")
        assert cost.swap_from_tokens > 0 or math.isinf(cost.swap_from_tokens)
        await waiting.until(store.list_workers)
        records = await store.list_workers()
        assert records[0].tiers[1].bytes_per_s == worker.engine.stats().copy_bytes_per_s
    async with pd.cluster(num_prefill=0) as alone:
        cost = (await get_stats(pd, alone.decode)).preemption
        assert ([tier.name for tier in cost.tiers], cost.copy_bytes_per_s) == (["device"], 0.0)
        assert not cost.HasField("swap_from_tokens")
