from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from diptych.common.errors import ConfigError
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import Failed, Finished, TierEvicted, TierStored, TokensOut
from diptych.engine.sched.cache.block_pool import BlockPool
from diptych.engine.sched.cache.eviction import tier_orders
from diptych.engine.sched.cache.host_tier import HostTier


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


def engine_with_host(kit, num_blocks=8, num_host_blocks=16, **fields):
    runner = FakeRunner(num_blocks, kit.BLOCK, num_host_blocks=num_host_blocks)
    return kit.make_engine(
        runner, num_blocks=num_blocks, num_host_blocks=num_host_blocks, **{"initial_copy_bytes_per_s": 1e12, **fields}
    )


def once(kit, engine, request):
    engine.send(request)
    return kit.run_until_idle(engine)


def test_evicted_blocks_come_back_from_the_host(kit):
    engine = engine_with_host(kit)
    request = kit.make_request("a", 21, 3)
    first = once(kit, engine, request)
    once(kit, engine, kit.make_request("b", range(500, 524), 3))  # pushes it out of the pool
    computed = engine.core._executor.runner.computed_tokens
    again = once(kit, engine, kit.make_request("a2", 21, 3))
    assert kit.tokens_of(again, "a2") == kit.tokens_of(first, "a")
    assert engine.core._executor.runner.computed_tokens - computed < 21
    assert engine.stats().restored_tokens_total >= 4 * kit.BLOCK
    [end] = kit.ends_of(again, "a2")
    assert end.num_cached_tokens == 20


def test_what_is_cheaper_to_compute_is_not_restored(kit):
    engine = engine_with_host(kit, initial_copy_bytes_per_s=1e-3)
    once(kit, engine, kit.make_request("a", 21, 3))
    once(kit, engine, kit.make_request("b", range(500, 524), 3))
    engine.core.scheduler.throughput.copy_bytes_per_s = 1e-3
    once(kit, engine, kit.make_request("a2", 21, 3))
    assert engine.stats().restored_tokens_total == 0


def test_its_events_mirror_the_tier(kit):
    engine = engine_with_host(kit, num_host_blocks=5)
    mirror: set[bytes] = set()
    sequence = 0
    for i in range(6):
        for event in once(kit, engine, kit.make_request(f"r{i}", range(100 * i, 100 * i + 22), 3)):
            if isinstance(event, (TierStored, TierEvicted)):
                sequence += 1
                assert event.sequence == sequence
                assert event.tier == "host"
                (mirror.update if isinstance(event, TierStored) else mirror.difference_update)(event.keys)
    dump = engine.core.scheduler.kv.pool.dump()
    assert mirror == set(dump.tiers[1].keys)
    assert dump.tiers[1].sequence == sequence
    assert len(mirror) == 5


def test_untrusted_blocks_leave_the_host_too(kit):
    engine = engine_with_host(kit)
    once(kit, engine, kit.make_request("a", 21, 3))
    once(kit, engine, kit.make_request("b", range(500, 524), 3))
    engine.core._executor.runner.bad_attempts.add("a2")
    once(kit, engine, kit.make_request("a2", 21, 3))
    assert not set(engine.core.scheduler.requests)
    again = once(kit, engine, kit.make_request("a3", 21, 3))
    assert kit.ends_of(again, "a3")[0].num_cached_tokens == 0


def test_a_failed_copy_ends_the_requests_and_the_engine_lives(kit):
    engine = engine_with_host(kit, 7, preemption_mode="swap")
    working = engine.core._executor.runner.copy_blocks

    def broken(copies):
        raise RuntimeError("the bus is on fire")

    engine.core._executor.runner.copy_blocks = broken
    engine.send(kit.make_request("a", 6, 14))
    engine.send(kit.make_request("b", 7, 14))
    events = kit.run_until_idle(engine)
    assert any(isinstance(e, Failed) and "the bus is on fire" in e.error.message for e in events)
    engine.core._executor.runner.copy_blocks = working
    events = once(kit, engine, kit.make_request("c", 6, 4))
    assert isinstance(kit.ends_of(events, "c")[0], Finished)
    assert engine.core.scheduler.check() == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_host_blocks": 99}, "num_host_blocks"),
        ({"preemption_mode": "swap"}, "preemption_mode"),
        ({"preemption_mode": "hope"}, "preemption_mode"),
        ({"scheduling_policy": "lottery"}, "scheduling_policy"),
        ({"tenant_cache_share": 0.0}, "tenant_cache_share"),
        ({"tenant_cache_share": 1.5}, "tenant_cache_share"),
        ({"sjf_aging_tokens_per_s": float("nan")}, "sjf_aging_tokens_per_s"),
        ({"initial_copy_bytes_per_s": 0.0}, "initial_copy_bytes_per_s"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
    ],
)
def test_settings_that_cannot_be_are_refused(kit, fields, named):
    with pytest.raises(ConfigError, match=named):
        kit.make_engine(**fields)


# ---- tenants ----


def test_a_tenant_keeps_no_more_than_its_share(kit):
    engine = kit.make_engine(num_blocks=32, tenant_cache_share=0.25)
    pool = engine.core.scheduler.kv.pool
    once(kit, engine, kit.make_request("n", range(900, 913), 2, tenant="neighbour", cache_salt=b"n"))
    for i in range(6):
        once(kit, engine, kit.make_request(f"f{i}", range(50 * i, 50 * i + 22), 2, tenant="flood", cache_salt=b"f"))
        assert pool.counts.cached <= 8 + 3
    again = once(kit, engine, kit.make_request("n2", range(900, 913), 2, tenant="neighbour", cache_salt=b"n"))
    assert kit.ends_of(again, "n2")[0].num_cached_tokens == 12


def test_over_its_quota_a_tenants_oldest_goes():
    pool = BlockPool(8, tenant_quota=2)
    blocks = pool.allocate(4)
    for i, block in enumerate(blocks):
        pool.publish(block, key(i), "x" if i < 3 else "y")
    pool.release(blocks)
    assert pool.find([key(0)]) == []
    assert len(pool.find([key(1), key(2), key(3)])) == 3
    assert pool.check({}) == []
    pool.pin([blocks[1]])
    other = pool.allocate(1)
    pool.publish(other[0], key(9), "x")
    pool.release(other)
    pool.release([blocks[1]])
    assert pool.find([key(2)]) == []
    assert pool.check({}) == []


def test_copies_are_timed_without_a_trace(kit):
    class SlowCopies(FakeRunner):
        def copy_blocks(self, copies):
            super().copy_blocks(copies)
            clock.advance(0.5)

    runner = SlowCopies(8, kit.BLOCK, num_host_blocks=4)
    engine = kit.make_engine(runner, num_blocks=8, num_host_blocks=4)
    clock = engine.clock
    request = kit.make_request("a", 21, 3)
    want = kit.tokens_of(once(kit, engine, request))
    assert engine.core.measure_copies() > 0
    blocks = min(4, engine.core.scheduler.kv.pool.counts.free)
    assert engine.stats().copy_bytes_per_s == 2 * blocks * kit.BLOCK * runner.kv_bytes_per_token / 0.5
    assert engine.core.scheduler.check() == []
    assert engine.core.scheduler.kv.host.num_held == 0
    again = kit.make_request("b", 21, 3)
    assert kit.tokens_of(once(kit, engine, again), "b") == want
    assert kit.make_engine().core.measure_copies() == 0.0


# ---- the tier's books, at random ----


class Books(RuleBasedStateMachine):
    eviction = "lru"

    def __init__(self):
        super().__init__()
        self.tier, self.use = HostTier(6, tier_orders(self.eviction, 20)[1]), 0
        self.held: list[list[int]] = []
        self.mirror: set[bytes] = set()
        self.protected: set[bytes] = set()
        self.sequence = 0

    @rule(name=st.integers(0, 11))
    def store(self, name):
        known = key(name) in self.tier.keys
        slot = self.tier.store(key(name), self.use, name)
        if known or slot is None:
            assert (slot is None) == (known or slot is None)
        else:
            assert self.tier.find([key(name)]) == [slot]

    @rule(names=st.lists(st.integers(0, 11), max_size=4, unique=True))
    def use_again(self, names):
        self.use += 1
        self.tier.used([key(name) for name in names], self.use)

    @rule(count=st.integers(1, 7))
    def take(self, count):
        slots = self.tier.take(count)
        if slots is not None:
            assert len(set(slots)) == count
            self.held.append(slots)

    @rule(data=st.data())
    def give(self, data):
        if self.held:
            self.tier.give(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(name=st.integers(0, 11))
    def discard(self, name):
        self.tier.discard(key(name))
        self.protected.discard(key(name))

    @rule(names=st.lists(st.integers(0, 11), max_size=3))
    def protect(self, names):
        self.protected = {key(n) for n in names} & set(self.tier.keys)
        self.tier.protect(self.protected)

    @rule()
    def clear(self):
        self.tier.protect(())
        self.protected = set()
        self.tier.clear()
        self.mirror.clear()  # the pool's CacheCleared says so for both tiers
        self.sequence = 0

    @invariant()
    def the_law_holds(self):
        assert self.tier.check([slot for slots in self.held for slot in slots]) == []
        assert self.protected <= set(self.tier.keys)
        for event in self.tier.take_events():
            self.sequence += 1
            assert event.sequence == self.sequence
            (self.mirror.update if isinstance(event, TierStored) else self.mirror.difference_update)(event.keys)
        assert self.mirror == set(self.tier.keys)


class BooksByValue(Books):
    eviction = "value"


@pytest.mark.parametrize("books", [Books, BooksByValue])
def test_books_at_random(books):
    run_state_machine_as_test(books, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


def test_random_load_on_pool_and_host_keeps_every_token(kit):
    """Many prompts that share prefixes, pool and host tier both too small: hits, restores, evictions and swaps mix."""
    import random

    rng = random.Random(4)
    engine = engine_with_host(kit, 14, 9)
    requests = []
    for i in range(60):
        shared = range(1000 - 4 * (i % 5), 1000 - 4 * (i % 5) + 4 * rng.randrange(0, 4))
        own = [rng.randrange(1000) for _ in range(rng.randrange(1, 12))]
        requests.append(kit.make_request(f"r{i}", [t % 1000 for t in shared] + own, rng.randrange(1, 16), seed=i))
    events = []
    for request in requests:
        engine.send(request)
        for _ in range(rng.randrange(0, 6)):
            events += engine.step()
    events += kit.run_until_idle(engine, 5000)
    want = kit.undisturbed(requests)
    for request in requests:
        assert kit.tokens_of(events, request.attempt) == want[request.attempt]
    assert engine.stats().restored_tokens_total > 0
    assert engine.stats().preemptions_total > 0
    assert all(isinstance(e, TokensOut) or not isinstance(e, Failed) for e in events)
