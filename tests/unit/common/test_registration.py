import asyncio

import msgspec
import pytest

from diptych.common.clock import FakeClock
from diptych.common.store.interface import KvEvent, StoreError
from diptych.common.store.memory import MemoryStore
from diptych.common.store.registration import WorkerRegistration
from diptych_tests import waiting
from diptych_tests.records import worker_record

RECORD = worker_record(event_epoch=3)


def event(sequence, num_keys=1, kind="stored", epoch=3):
    return KvEvent("a", epoch, sequence, kind, (bytes(16),) * num_keys)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    return MemoryStore(clock)


def make(store, clock, incarnation="a", **options):
    record = msgspec.structs.replace(RECORD, incarnation=incarnation)
    # heartbeats of an hour: only `beat` and `beat_now` write in these tests, beside the first one
    settings = {"ttl_s": 7200.0, "heartbeat_s": 3600.0} | options
    return WorkerRegistration(store, lambda: record, clock=clock, **settings)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def sequences(store):
    return [e.sequence for _, e in (await store.read_events({"p0": "0"}, block_s=0)).get("p0", [])]


async def test_start_writes_the_lease_and_close_ends_it(store, clock):
    registration = make(store, clock)
    await registration.start()
    await settle()
    assert [w.worker_id for w in await store.list_workers()] == ["p0"]
    assert registration.connected
    clock.advance(2)
    assert registration.seconds_since_heartbeat == 2
    await registration.close()
    assert await store.list_workers() == []


async def test_a_flush_is_healed_by_the_next_heartbeat(store, clock):
    registration = make(store, clock)
    await registration.start()
    await settle()
    store.flush()
    registration.beat_now()
    await settle()
    assert len(await store.list_workers()) == 1
    await registration.close()


async def test_a_store_that_is_away_is_tried_again(store, clock):
    store.available = False
    registration = make(store, clock, heartbeat_s=0.001)
    await registration.start()
    registration.offer(event(1))
    await settle()
    assert not registration.connected
    store.available = True

    async def caught_up():
        return registration.connected and await sequences(store) == [1]

    await waiting.until(caught_up)
    await registration.close()


async def test_a_heartbeat_that_is_written_wakes_the_events_that_could_not_be(store, clock):
    registration = make(store, clock)
    await registration.start()
    await settle()
    store.available = False
    registration.offer(event(1))
    await settle()
    store.available = True
    registration.beat_now()
    await settle()
    assert await sequences(store) == [1]
    await registration.close()


async def test_a_zombie_stops_writing(store, clock):
    fenced = []
    old = make(store, clock, on_fenced=lambda: fenced.append(True))
    assert await old.beat()
    young = make(store, clock, "b")
    assert await young.beat()
    assert not await old.beat()
    assert (old.fenced, fenced) == (True, [True])
    old.offer(event(1))
    assert await old.flush_events() == 0
    await old.close()
    assert [w.incarnation for w in await store.list_workers()] == ["b"]


async def test_events_arrive_in_order_and_the_lease_names_the_last(store, clock):
    registration = make(store, clock)
    await registration.start()
    for sequence in range(1, 200):
        registration.offer(event(sequence))
    await settle()
    assert await sequences(store) == list(range(1, 200))
    await registration.beat()
    (record,) = await store.list_workers()
    assert (record.event_epoch, record.event_sequences[0]) == (3, 199)
    await registration.close()


async def test_a_full_queue_drops_and_leaves_a_hole_that_the_lease_betrays(store, clock):
    registration = make(store, clock)
    registration.offer(event(1))
    await registration.flush_events()
    for sequence in range(2, 12):
        registration.offer(event(sequence, num_keys=8000))
    assert registration.dropped_events > 0
    await registration.flush_events()
    got = await sequences(store)
    assert got[0] == 1
    assert got != list(range(1, 12))
    await registration.beat()
    (record,) = await store.list_workers()
    assert record.event_sequences[:2] == (11, 0)


async def test_cleared_replaces_what_still_waits(store, clock):
    registration = make(store, clock)
    registration.offer(event(1))
    registration.offer(KvEvent("a", 4, 0, "cleared"))
    registration.offer(event(1, epoch=4))
    await registration.flush_events()
    events = [e for _, e in (await store.read_events({"p0": "0"}, block_s=0))["p0"]]
    assert [(e.epoch, e.kind) for e in events] == [(4, "cleared"), (4, "stored")]


async def test_the_lease_says_where_each_tier_stands(store, clock):
    registration = make(store, clock)
    registration.offer(event(1))
    registration.offer(KvEvent("a", 3, 1, "stored", (bytes(16),), "host"))
    registration.offer(KvEvent("a", 3, 2, "evicted", (bytes(16),), "host"))
    await registration.beat()
    (record,) = await store.list_workers()
    assert (record.event_epoch, *record.event_sequences[:2]) == (3, 1, 2)
    registration.offer(KvEvent("a", 4, 0, "cleared"))
    await registration.beat()
    (record,) = await store.list_workers()
    assert (record.event_epoch, *record.event_sequences[:2]) == (4, 0, 0)


async def test_events_stay_queued_while_the_store_is_away(store, clock):
    registration = make(store, clock)
    registration.offer(event(1))
    store.available = False
    with pytest.raises(StoreError):
        await registration.flush_events()
    store.available = True
    assert await registration.flush_events() == 1
    assert await sequences(store) == [1]


async def test_a_lease_must_outlast_a_heartbeat(store, clock):
    with pytest.raises(ValueError, match="outlast"):
        make(store, clock, ttl_s=1.0, heartbeat_s=1.0)
