import asyncio
import socket
import time

import pytest

from diptych.common.store.interface import KvEvent, StoreError
from diptych.common.store.redis_store import RedisStore
from diptych.common.tiers import TierState
from diptych_tests.records import worker_record


def make_record(incarnation="a1", worker_id="p0", **changes):
    plain = {"incarnation": incarnation, "role": "prefill", "compat": {"block_size": "16"}, "event_epoch": 1}
    return worker_record(worker_id, **(plain | changes))


@pytest.fixture
async def stores(valkey_url, raw):
    pair = RedisStore(valkey_url, cluster="t"), RedisStore(valkey_url, cluster="t")
    yield pair
    for store in pair:
        await store.close()


async def test_lease_lives_and_ends(stores, raw):
    old, _ = stores
    assert await old.put_worker(make_record(), ttl_s=1000)
    assert [w.incarnation for w in await old.list_workers()] == ["a1"]
    assert 0 < await raw.pttl("{t}:worker:p0") <= 1_000_000
    await old.remove_worker("p0", "other")
    assert len(await old.list_workers()) == 1
    await old.remove_worker("p0", "a1")
    assert await old.list_workers() == []


async def test_younger_incarnation_fences_the_older(stores, raw):
    old, young = stores
    assert await old.put_worker(make_record("zz"), ttl_s=1000)
    assert await young.put_worker(make_record("aa"), ttl_s=1000)
    assert not await old.put_worker(make_record("zz"), ttl_s=1000)
    await raw.delete("{t}:worker:p0")  # the lease ends: still fenced
    assert not await old.put_worker(make_record("zz"), ttl_s=1000)
    assert await young.put_worker(make_record("aa"), ttl_s=1000)
    await raw.flushall()  # and after a loss of everything the younger one wins in the end
    await old.put_worker(make_record("zz"), ttl_s=1000)
    assert await young.put_worker(make_record("aa"), ttl_s=1000)
    assert not await old.put_worker(make_record("zz"), ttl_s=1000)
    assert [w.incarnation for w in await young.list_workers()] == ["aa"]


async def test_events_round_trip(stores):
    store, other = stores
    events = [KvEvent("a1", 1, i, "stored", (bytes([i]) * 16, bytes(16))) for i in range(1, 4)]
    events.append(KvEvent("a1", 2, 0, "cleared"))
    await store.append_events("p0", events)
    got = (await other.read_events({"p0": "0", "p1": "0"}, block_s=0.0))["p0"]
    assert [event for _, event in got] == events
    assert await other.read_events({"p0": got[-1][0]}, block_s=0.02) == {}
    tail = await other.read_events({"p0": got[1][0]}, block_s=0.02)
    assert [event for _, event in tail["p0"]] == events[2:]


async def test_hostile_rows_are_skipped_and_counted(stores, raw):
    store, _ = stores
    await store.put_worker(make_record(), ttl_s=1000)
    await raw.sadd("{t}:workers", "p1", "p2", "../x", b"\xff")
    await raw.set("{t}:worker:p1", "a string")
    await raw.hset("{t}:worker:p2", "record", b'{"worker_id": 3}')
    assert [w.worker_id for w in await store.list_workers()] == ["p0"]
    assert store.bad_rows == 4
    await raw.xadd("{t}:kv:p0", {"x": "y"})
    await store.append_events("p0", [KvEvent("a1", 1, 1, "stored", (bytes(16),))])
    assert [e and e.sequence for _, e in (await store.read_events({"p0": "0"}, block_s=0))["p0"]] == [None, 1]
    await raw.set("{t}:kv:bad", "x")
    assert list(await store.read_events({"p0": "0", "bad": "0"}, block_s=0)) == ["p0"]


async def test_a_tier_of_another_version_is_passed_over_and_counted(stores):
    """Also where a whole read holds nothing else: the next read begins after it."""
    store, _ = stores
    await store.put_worker(make_record(tiers=(TierState("device", 1), TierState("tape", 300))), ttl_s=1000)
    assert [(w.worker_id, w.event_sequences[0]) for w in await store.list_workers()] == [("p0", 1)]
    assert store.unknown_tiers == 1
    await store.append_events("p0", [KvEvent("a1", 1, i, "evicted", (bytes(16),), "tape") for i in range(300)])
    await store.append_events("p0", [KvEvent("a1", 1, 1, "stored", (bytes(16),))])
    cursor, seen = "0", []
    for _ in range(2):
        read = (await store.read_events({"p0": cursor}, block_s=0))["p0"]
        cursor = read[-1][0]
        seen += [event.tier for _, event in read if event is not None]
    assert seen == ["device"]
    assert store.bad_rows == 300


async def test_keys_of_a_wrong_type_are_replaced(stores, raw):
    store, _ = stores
    for key in ("worker:p0", "start:p0", "workers", "kv:p0"):
        await raw.lpush("{t}:" + key, "junk")
    assert await store.list_workers() == []
    assert await store.put_worker(make_record(), ttl_s=1000)
    await store.append_events("p0", [KvEvent("a1", 1, 1, "stored")])
    assert len(await store.list_workers()) == 1
    assert len((await store.read_events({"p0": "0"}, block_s=0))["p0"]) == 1


async def test_a_server_that_is_away_or_silent_is_a_store_error(tmp_path):
    away = RedisStore(f"unix://{tmp_path}/none", timeout_s=0.2)
    with pytest.raises(StoreError):
        await away.list_workers()
    await away.close()
    with socket.socket(socket.AF_UNIX) as listener:  # nobody accepts
        listener.bind(str(tmp_path / "silent"))
        listener.listen()
        silent = RedisStore(f"unix://{tmp_path}/silent", timeout_s=0.05)
        with pytest.raises(StoreError, match="did not answer in 0.05 s"):
            await silent.put_worker(make_record(), ttl_s=1000)
        await silent.close()


async def test_a_budget_is_one_for_all_and_survives_what_others_write(stores, raw):
    one, other = stores
    began = time.monotonic()

    def refilled() -> float:
        """At most, since the start."""
        return 600 / 60 * (time.monotonic() - began) + 1

    grants = await asyncio.gather(*(s.lease_tokens("b", per_minute=600, want=50.0) for s in (one, other) * 10))
    assert 600 <= sum(granted for granted, _ in grants) <= 600 + refilled()
    assert (await one.lease_tokens("b", per_minute=600, want=-100.0))[0] == -100
    granted, level = await other.lease_tokens("b", per_minute=600, want=90.0)
    assert granted == 90
    assert level <= 10 + refilled()
    assert 0 < await raw.pttl("{t}:budget:b") <= 120_000
    await raw.set("{t}:budget:b", "a string")
    assert (await one.lease_tokens("b", per_minute=600, want=5.0))[0] == 5
    await raw.hset("{t}:budget:b", mapping={"level": "x", "at": "y"})
    assert (await one.lease_tokens("b", per_minute=600, want=5.0))[0] == 5
