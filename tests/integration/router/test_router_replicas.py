"""Pending placements of several routers over a real server."""

import asyncio

import pytest

from diptych.common.clock import MonotonicClock
from diptych.common.store.redis_store import RedisStore
from diptych.router.placement.pending import PendingShare
from diptych.router.placement.reservations import Reservation, Reservations
from diptych_tests import waiting


@pytest.fixture
async def stores(valkey_url, raw):
    found = [RedisStore(valkey_url, cluster="t") for _ in range(3)]
    yield found
    for store in found:
        await store.close()


async def test_rows_round_trip_and_end(stores, raw):
    one, other, _ = stores
    await one.put_pending("r1", {"p0": (100, 2), "d0": (0, 1)}, ttl_s=1000)
    await other.put_pending("r2", {"p0": (1, 1)}, ttl_s=1000)
    assert await one.list_pending() == {"r1": {"p0": (100, 2), "d0": (0, 1)}, "r2": {"p0": (1, 1)}}
    await other.put_pending("r2", {"p0": (1, 1)}, ttl_s=0.05)

    async def only_one():
        return list(await other.list_pending()) == ["r1"]

    await waiting.until(only_one)
    assert await raw.smembers("{t}:routers") == {b"r1"}
    await one.put_pending("r1", {"p1": (3, 1)}, ttl_s=1000)
    assert await other.list_pending() == {"r1": {"p1": (3, 1)}}
    await one.put_pending("r1", {}, ttl_s=1000)
    assert await other.list_pending() == {}


async def test_hostile_rows_are_skipped_and_wrong_types_replaced(stores, raw):
    store = stores[0]
    await raw.set("{t}:routers", "x")
    assert await store.list_pending() == {}
    await store.put_pending("r1", {"p0": (1, 1)}, ttl_s=1000)
    await raw.sadd("{t}:routers", "r2", "r3", "../x")
    await raw.hset("{t}:pending:r2", "p0", "-4 many")
    await raw.set("{t}:pending:r3", "x")
    assert await store.list_pending() == {"r1": {"p0": (1, 1)}}
    assert store.bad_rows == 4
    await store.put_pending("r3", {"p0": (2, 1)}, ttl_s=1000)
    assert len(await store.list_pending()) == 2


async def test_routers_hear_of_each_other_and_survive_a_loss_of_everything(stores, raw):
    reservations = [Reservations() for _ in stores]
    clock = MonotonicClock()
    shares = [
        PendingShare(store, mine, f"r{i}", clock=clock, interval_s=0.02, ttl_s=0.5)
        for i, (store, mine) in enumerate(zip(stores, reservations, strict=True))
    ]
    tasks = [asyncio.create_task(one.run()) for one in shares]
    try:
        for i, mine in enumerate(reservations):
            mine.reserve("1", Reservation("p0", f"d{i}", 10 * (i + 1)))

        async def all_hear(tokens, indexes):
            await waiting.until(
                lambda: all(
                    mine.at(mine.columns(["p0"]))[0][0] == tokens for mine in (reservations[i] for i in indexes)
                )
            )

        await all_hear(60, (0, 1, 2))
        await raw.flushall()
        await all_hear(60, (0, 1, 2))
        tasks[2].cancel()  # it dies with pending placements
        await all_hear(30, (0, 1))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
