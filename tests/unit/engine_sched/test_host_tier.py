from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from diptych.common.block_identity import block_keys
from diptych.common.errors import ConfigError
from diptych.common.request import CacheClaim
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import Admitted, Failed, Finished, TierEvicted, TierStored, TokensOut
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


# ---- claims ----

PROMPT, SESSION = range(100, 141), b"s" * 16


def claimed(kit, attempt, prompt=PROMPT, ttl_s=60.0, session=b"", **fields):
    return kit.make_request(attempt, prompt, 3, claim=CacheClaim(ttl_s, session=session), **fields)


def flood(kit, engine, first=0, count=6):
    """Prompts of ten blocks each, which nobody claims and nobody sends again."""
    for number in range(first, first + count):
        engine.clock.advance(0.1)
        once(kit, engine, kit.make_request(f"flood {number}", range(200 + 45 * number, 241 + 45 * number), 3))


@pytest.mark.parametrize("eviction", ["lru", "value"])
@pytest.mark.parametrize(("ttl_s", "kept"), [(None, 0), (0.05, 0), (3600.0, 40)])
def test_a_claimed_prompt_stays_in_host_memory_while_others_leave(kit, ttl_s, kept, eviction):
    """Its claim had ended when it left the pool, and it left host memory as any other."""
    engine = engine_with_host(kit, 16, 48, tier_eviction=eviction)
    request = kit.make_request("a", PROMPT, 3) if ttl_s is None else claimed(kit, "a", ttl_s=ttl_s)
    first = once(kit, engine, request)
    flood(kit, engine, count=8)
    again = once(kit, engine, kit.make_request("a2", PROMPT, 3))
    [admitted] = [event for event in again if isinstance(event, Admitted)]
    # of the pool a quarter is claimed, too: four of its blocks
    assert (admitted.num_cached_tokens, dict(admitted.tiers)) == (kept, {"host": kept - 16} if kept else {})
    assert kit.tokens_of(again, "a2") == kit.tokens_of(first, "a")
    assert engine.core.scheduler.check() == []


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_claims_in_host_memory_keep_no_request_from_running(kit, share):
    """The bound: with every slot claimed, what leaves the pool is stored, and a request that is swapped out gets its slots."""
    engine = engine_with_host(kit, 16, 12, claim_share=share, preemption_mode="swap")
    host = engine.core.scheduler.kv.host
    for number in range(3):
        once(kit, engine, claimed(kit, f"c{number}", range(300 * number, 300 * number + 41)))
    assert (len(host.keys), len(host._claims)) == (12, 12 * share)
    before = set(host.keys)
    flood(kit, engine, count=2)
    assert set(host.keys) - before
    for number in range(3):
        once(kit, engine, claimed(kit, f"d{number}", range(300 * number, 300 * number + 41)))
    engine.send(kit.make_request("a", 6, 40))
    engine.send(kit.make_request("b", range(500, 507), 40))
    events = kit.run_until_idle(engine)
    assert engine.stats().preemptions_total > 0
    assert {type(kit.ends_of(events, name)[0]) for name in "ab"} == {Finished}
    assert engine.core.scheduler.check() == []


def test_claims_in_host_memory_have_a_share_of_what_is_there(kit):
    engine = engine_with_host(kit, 16, 24)
    for number in range(4):
        once(kit, engine, claimed(kit, f"{number}", range(300 * number, 300 * number + 41)))
    assert len(engine.core.scheduler.kv.host._claims) == 6
    assert len(engine.core.scheduler.kv.host.keys) == 24


def test_the_end_of_a_session_frees_its_blocks_in_host_memory(kit):
    engine = engine_with_host(kit, 16, 48, claim_share=0.5)
    kv = engine.core.scheduler.kv
    keys = block_keys(kit.IDENTITY, PROMPT[:40])
    for attempt in ("a", "b"):  # its own next turn is no use by others
        once(kit, engine, claimed(kit, attempt, session=SESSION))
        flood(kit, engine, 3)
    assert set(keys) <= {*kv.host.keys, *(key for key in keys if kv.pool.cached_block(key) is not None)}
    assert set(kv.host.keys) & set(keys)
    assert engine.core.scheduler.live.close_session(SESSION) == 40
    assert not set(kv.host.keys) & set(keys)
    assert kv.num_cached_blocks(keys) == 0
    assert engine.core.scheduler.check() == []


def test_what_others_use_survives_the_session_in_host_memory(kit):
    engine = engine_with_host(kit, 16, 48)
    kv, keys = engine.core.scheduler.kv, block_keys(kit.IDENTITY, PROMPT[:40])
    once(kit, engine, claimed(kit, "a", session=SESSION))
    flood(kit, engine, 0, 3)
    once(kit, engine, kit.make_request("other", PROMPT[:25], 3))
    assert not kv.pool.has(keys[6])
    engine.core.scheduler.live.close_session(SESSION)
    # four are claimed in the pool, too
    assert (kv.num_cached_blocks(keys), set(keys) & set(kv.host.keys)) == (6, set(keys[4:6]))


# ---- the tier's books, at random ----


class Books(RuleBasedStateMachine):
    eviction = "lru"

    def __init__(self):
        super().__init__()
        self.tier, self.use = HostTier(6, tier_orders(self.eviction, 20)[1], claim_share=0.5), 0
        self.now = 0.0
        self.held: list[list[int]] = []
        self.mirror: set[bytes] = set()
        self.protected: set[bytes] = set()
        self.sequence = 0

    @rule(name=st.integers(0, 11))
    def store(self, name):
        known = key(name) in self.tier.keys
        room = len(self.tier.keys) - len(self.protected) + self.tier.num_free
        slot = self.tier.store(key(name), self.use, name)
        if known or slot is None:
            assert known or not room, "a claim kept a block out"
        else:
            assert self.tier.find([key(name)]) == [slot]

    @rule(names=st.lists(st.integers(0, 11), max_size=4, unique=True))
    def use_again(self, names):
        self.use += 1
        self.tier.used([key(name) for name in names], self.use, b"")

    @rule(count=st.integers(1, 7))
    def take(self, count):
        room = len(self.tier.keys) - len(self.protected) + self.tier.num_free
        slots = self.tier.take(count)
        assert (slots is None) == (count > room), "a claim kept a request from running"
        if slots is not None:
            assert len(set(slots)) == count
            self.held.append(slots)

    @rule(data=st.data())
    def give(self, data):
        if self.held:
            self.tier.give(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(
        names=st.lists(st.integers(0, 11), max_size=4, unique=True),
        tenant=st.sampled_from("tu"),
        ttl_s=st.integers(1, 9),
        priority=st.integers(0, 2),
        session=st.sampled_from((b"", SESSION)),
    )
    def claim(self, names, tenant, ttl_s, priority, session):
        wanted = CacheClaim(float(ttl_s), priority, session)
        self.tier.claim([key(name) for name in names], tenant, wanted, self.now)

    @rule()
    def expire(self):
        self.now += 1.0
        self.tier.expire(self.now)

    @rule()
    def close(self):
        self.protected.difference_update(self.tier.close_session(SESSION))

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
