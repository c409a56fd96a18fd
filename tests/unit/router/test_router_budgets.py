import random

import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import QuotaExceededError
from diptych.common.store_memory import MemoryStore
from diptych.router.budgets import INTERVAL_S, SharedQuotas

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
    """`demand`: (tenant, tokens wanted a router and interval). Tokens let in by tenant."""
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
    bound = LIMIT * (1 + 120 / 60) + ROUTERS * (SLICE + 10)
    assert 0.9 * LIMIT * 3 < got["a"] <= bound


async def test_ten_times_the_requests_take_nothing_from_another_tenant(store, clock):
    limits = {"greedy": 12_000, "modest": 12_000}
    modest, greedy = 10, 100  # a router and interval: 120 and 1,200 tokens a second in all, where 200 are allowed
    got = await minutes(routers(store, clock, limits), clock, 120, [("greedy", greedy), ("modest", modest)])
    assert got["modest"] == ROUTERS * modest * 120 / INTERVAL_S  # all that it asked for
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
    assert 0.8 * LIMIT < got["a"] <= LIMIT + ROUTERS * (SLICE + 10)
    store.available = True
    again = await minutes(routers(store, clock), clock, 60, [("a", 2000)])
    assert again["a"] <= 2 * LIMIT + ROUTERS * (SLICE + 10)


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
