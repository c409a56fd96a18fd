import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.clock import FakeClock
from diptych.common.errors import QuotaExceededError
from diptych.common.store.memory import MemoryStore
from diptych.router.fairness.budgets import INTERVAL_S, SharedQuotas

LIMIT = 6000
SLICE = LIMIT / 60
ROUTERS = 3


@pytest.fixture
def clock():
    return FakeClock(100.0)


@pytest.fixture
def store(clock):
    return MemoryStore(clock)


def routers(store, clock, limits=None, count=ROUTERS):
    limits = limits or {}
    return [
        SharedQuotas(lambda tenant: limits.get(tenant, LIMIT), now=clock.now, store=store, num_routers=lambda: count)
        for _ in range(count)
    ]


def hammer(quotas, tenant, tokens=10, tries=200):
    """Tokens let in by one router now."""
    done = 0
    for _ in range(tries):
        try:
            quotas.check(tenant)
        except QuotaExceededError:
            break
        quotas.spend(tenant, tokens)
        done += tokens
    return done


async def minutes(all_routers, clock, seconds, demand):
    """`demand`: (tenant, requested tokens a router and interval). Returns admitted tokens by tenant."""
    got = {tenant: 0 for tenant, _ in demand}
    for _ in range(int(seconds / INTERVAL_S)):
        for quotas in all_routers:
            for tenant, want in demand:
                got[tenant] += hammer(quotas, tenant, tries=want // 10)
            await quotas.exchange()
        clock.advance(INTERVAL_S)
    return got


async def test_all_routers_together_stay_within_the_bucket_and_their_slices(store, clock):
    got = await minutes(routers(store, clock), clock, 120, [("a", 2000)])
    bound = LIMIT * (1 + 120 / 60) + LIMIT * (ROUTERS - 1) / ROUTERS + ROUTERS * (SLICE + 10)
    assert 0.9 * LIMIT * 3 < got["a"] <= bound


async def test_ten_times_the_requests_take_nothing_from_another_tenant(store, clock):
    limits = {"greedy": 12_000, "modest": 12_000}
    modest, greedy = 10, 100  # a router and interval: 120 and 1,200 tokens a second in all, where 200 are allowed
    got = await minutes(routers(store, clock, limits), clock, 120, [("greedy", greedy), ("modest", modest)])
    assert got["modest"] == ROUTERS * modest * 120 / INTERVAL_S  # all that it requested
    assert 0.9 * 36_000 < got["greedy"] <= 36_000 + ROUTERS * (200 + 10)


async def test_an_overspent_lease_is_repaid_first(store, clock):
    quotas = routers(store, clock, count=1)[0]
    quotas.check("a")
    quotas.spend("a", LIMIT + 50)  # one long answer
    await quotas.exchange()
    with pytest.raises(QuotaExceededError) as caught:
        quotas.check("a")
    assert caught.value.retry_after_s >= INTERVAL_S
    clock.advance(3.0)
    await quotas.exchange()
    quotas.check("a")


async def test_no_request_waits_for_a_store_that_is_away(store, clock):
    store.available = False
    got = await minutes(routers(store, clock), clock, 60, [("a", 2000)])
    assert 0.8 * 2 * LIMIT < got["a"] <= 2 * LIMIT + ROUTERS * (SLICE + 10)
    store.available = True
    again = await minutes(routers(store, clock), clock, 60, [("a", 2000)])
    assert again["a"] <= 2 * LIMIT + LIMIT * (ROUTERS - 1) / ROUTERS + ROUTERS * (SLICE + 10)


async def test_an_idle_tenant_gives_back_what_it_has(store, clock):
    quotas = routers(store, clock, count=1)[0]
    quotas.check("a")
    await quotas.exchange()
    clock.advance(61.0)
    await quotas.exchange()
    assert not quotas._leases
    assert (await store.lease_tokens("x", per_minute=LIMIT, want=1e9))[0] == LIMIT


async def test_headers_tell_what_is_left(store, clock):
    quotas = routers(store, clock, {"free": 0}, count=1)[0]
    assert quotas.headers("free") == {}
    quotas.spend("a", 60)
    await quotas.exchange()
    headers = quotas.headers("a")
    assert headers["x-ratelimit-limit-tokens"] == str(LIMIT)
    assert LIMIT - 70 <= int(headers["x-ratelimit-remaining-tokens"]) <= LIMIT


def test_a_tenant_without_a_limit_is_never_refused(store, clock):
    quotas = routers(store, clock, {"free": 0}, count=1)[0]
    rng = random.Random(1)
    for _ in range(100):
        quotas.check("free")
        quotas.spend("free", rng.randrange(10**6))


@pytest.mark.parametrize("unit", ["tokens", "requests"])
def test_a_burst_may_use_what_is_unused(store, clock, unit):
    """Item 2.6: sixty requests a minute, twelve quick ones: all are let in, and `remaining` is what is let in then."""
    quotas = SharedQuotas(lambda tenant: 60, now=clock.now, store=store, unit=unit)
    for number in range(12):
        assert quotas.headers("a")[f"x-ratelimit-remaining-{unit}"] == str(60 - number)
        quotas.check("a")
        quotas.spend("a", 1)
    assert hammer(quotas, "a", tokens=1) == 48
    assert quotas.headers("a")[f"x-ratelimit-remaining-{unit}"] == "0"


async def test_a_burst_after_a_pause_may_use_what_has_come_back(store, clock):
    quotas = SharedQuotas(lambda tenant: 60, now=clock.now, store=store)
    assert hammer(quotas, "a", tokens=1) == 60
    await quotas.exchange()
    for _ in range(120):  # half a minute without requests
        clock.advance(INTERVAL_S)
        await quotas.exchange()
    assert 30 <= hammer(quotas, "a", tokens=1) <= 31


async def test_a_tenant_that_used_half_of_its_share_gets_more_at_once(store, clock):
    """A burst that meets one of four routers: its share at once, all that is unused after a few exchanges."""
    quotas = routers(store, clock, {"a": 60}, count=4)[0]
    got = hammer(quotas, "a", tokens=1)
    assert got == 15
    assert quotas._low.is_set()
    for _ in range(12):
        await quotas.exchange()
        got += hammer(quotas, "a", tokens=1)
    assert 55 <= got <= 60


@given(
    count=st.integers(1, 4),
    limit=st.integers(1, 600),
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 300), st.sampled_from([0.0, 0.02, 0.25, 5.0, 70.0]), st.booleans()),
        max_size=40,
    ),
)
@settings(max_examples=200, deadline=None)
def test_all_routers_together_are_bounded_whatever_comes(count, limit, steps):
    """Bursts at any router, with or without exchanges: over any time from the start at most the bucket, its refill, a
    slice for each router, and (R - 1) / R of a bucket. Requests within `remaining` are admitted."""
    clock = FakeClock(100.0)
    store = MemoryStore(clock)
    all_routers = [
        SharedQuotas(lambda _: limit, now=clock.now, store=store, num_routers=lambda: count) for _ in range(count)
    ]
    got, slack = 0, limit * (count - 1) / count + count * (max(1.0, limit / 60) + 1)

    async def run():
        nonlocal got
        for which, tries, pause, asks in steps:
            quotas = all_routers[which % count]
            promised = int(quotas.headers("a")["x-ratelimit-remaining-tokens"])
            done = hammer(quotas, "a", tokens=1, tries=tries)
            assert min(tries, promised) <= done <= promised + max(1.0, limit / 60) + 1
            got += done
            if asks:
                for one in all_routers:
                    await one.exchange()
            clock.advance(pause)
            assert got <= limit * (1 + (clock.now() - 100.0) / 60.0) + slack

    asyncio.run(run())
