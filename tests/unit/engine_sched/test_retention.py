"""Claims on cached blocks: the order of evictions, their ends, the tenants' shares, sessions, and that they delay nobody."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from diptych.common.request import CacheClaim, Prompt
from diptych.engine.messages import Admitted, EndPull, Finished, PullBlocks
from diptych.engine.sched.cache.block_pool import BlockPool
from diptych.engine.sched.cache.host_tier import HostTier
from diptych.engine.sched.cache.retention import LET_GO, UNCLAIMED, Claims, EvictionOrder

ONE, OTHER = b"1" * 16, b"2" * 16


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


def cached(pool: BlockPool, numbers: range, claim: CacheClaim | None = None, tenant: str = "t") -> list[int]:
    """Blocks of keys `numbers`, used by a request that claims them and has ended."""
    blocks = pool.allocate(len(numbers))
    assert blocks is not None
    for i, block in zip(numbers, blocks, strict=True):
        pool.publish(block, key(i), tenant)
    if claim is not None:
        pool.claim(reversed(blocks), tenant, claim)
    pool.release(reversed(blocks))
    return blocks


def found(pool: BlockPool, numbers: range) -> list[int]:
    return [i for i in numbers if pool.cached_block(key(i)) is not None]


def force_out(pool: BlockPool, count: int) -> None:
    """A request without a claim and without keys takes so many blocks and ends."""
    blocks = pool.allocate(count)
    assert blocks is not None
    pool.release(blocks)


# ---- the order ----


def test_what_is_unclaimed_goes_first_and_then_the_lowest_priority():
    pool = BlockPool(6, claim_share=1.0)
    cached(pool, range(2), CacheClaim(60.0, 80))
    cached(pool, range(2, 4), CacheClaim(60.0, 20))
    cached(pool, range(4, 6))
    for left in ([0, 1, 2, 3], [0, 1]):
        blocks = pool.allocate(2)
        assert found(pool, range(6)) == left
        assert blocks is not None
        for i, block in enumerate(blocks):  # stay in use
            pool.publish(block, key(100 + len(left) + i))
    assert pool.claims.evicted == 2
    assert pool.claims.by_rank == ((0, 2),)


def test_an_expired_claim_is_worth_less_than_none():
    pool = BlockPool(4, claim_share=1.0)
    cached(pool, range(1), CacheClaim(10.0))
    pool.now = 5.0
    cached(pool, range(1, 2), CacheClaim(10.0))
    cached(pool, range(2, 4))
    pool.now = 10.0
    assert pool.claims.expired == 1
    force_out(pool, 1)
    assert found(pool, range(4)) == [1, 2, 3]
    force_out(pool, 2)  # one of them is the free block
    assert found(pool, range(4)) == [1, 2]
    pool.now = 15.0
    assert (pool.claims.expired, pool.claims.by_rank) == (2, ((0, 0),))


def test_a_claim_that_is_made_again_lasts_longer():
    pool = BlockPool(2, claim_share=1.0)
    blocks = cached(pool, range(1), CacheClaim(10.0))
    pool.now = 8.0
    pool.pin(blocks)
    pool.claim(blocks, "t", CacheClaim(10.0))
    pool.release(blocks)
    pool.now = 17.9
    assert pool.claims.by_rank == ((0, 1),)
    pool.now = 18.0
    assert (pool.claims.made, pool.claims.expired) == (1, 1)


def test_the_heap_of_ends_does_not_grow_with_claims_that_ended_early():
    claims: Claims[int] = Claims(4)
    for i in range(5000):
        claims.make([i], "t", CacheClaim(86_400.0), 0.0)
        claims.gone(i, evicted=True)
    assert len(claims._due) < 100
    assert claims.violations(lambda item: True) == []


def test_blocks_that_an_eviction_passed_over_are_counted_at_the_next_hit():
    pool = BlockPool(4, claim_share=1.0)
    kept = cached(pool, range(2), CacheClaim(60.0))
    pool.now = 1.0
    cached(pool, range(2, 4))
    assert pool.num_kept(kept) == 0
    force_out(pool, 1)
    assert pool.num_kept(kept) == 2
    pool.pin(kept)
    assert pool.num_kept(kept) == 0, "they are in use"


# ---- shares ----


def test_one_tenant_alone_may_claim_the_whole_share_and_several_an_equal_part():
    pool = BlockPool(16, claim_share=0.5)
    cached(pool, range(12), CacheClaim(60.0), "a")
    assert pool.claims.by_rank == ((0, 8),)
    assert pool.claims.over_share == 4
    cached(pool, range(100, 104), CacheClaim(60.0, rank=3), "b")
    assert pool.claims.by_rank == ((0, 4), (3, 4))
    cached(pool, range(200, 202), CacheClaim(60.0, rank=3), "b")  # evicts; b gives up its own
    assert dict(pool.claims.by_rank)[0] >= 4
    assert pool.check({}) == []


def test_over_the_share_the_head_of_the_latest_prompt_stays_claimed():
    pool = BlockPool(8, claim_share=0.5)
    cached(pool, range(6), CacheClaim(60.0))
    force_out(pool, 4)  # two were free, and the two last of the prompt are not claimed
    assert found(pool, range(6)) == [0, 1, 2, 3]


def test_the_lowest_priority_is_given_up_first():
    claims: Claims[str] = Claims(2)
    claims.make(["high"], "t", CacheClaim(60.0, 90), 0.0)
    claims.make(["low"], "t", CacheClaim(60.0, 10), 0.0)
    claims.make(["middle"], "t", CacheClaim(60.0, 50), 0.0)
    assert {item for item in ("high", "low", "middle") if item in claims} == {"high", "middle"}


def test_without_a_share_claims_have_no_effect():
    pool = BlockPool(4, claim_share=0.0)
    cached(pool, range(2), CacheClaim(60.0))
    cached(pool, range(2, 4))
    force_out(pool, 2)
    assert found(pool, range(4)) == [2, 3]


def test_a_tenants_quota_evicts_its_unclaimed_blocks_first():
    pool = BlockPool(8, tenant_quota=3, claim_share=1.0)
    cached(pool, range(2), CacheClaim(60.0))
    cached(pool, range(2, 4))
    assert found(pool, range(4)) == [0, 1, 2]
    cached(pool, range(4, 6))
    assert len(found(pool, range(6))) == 3
    assert found(pool, range(2)) == [0, 1]
    assert pool.check({}) == []


# ---- sessions ----


def test_closing_a_session_frees_what_only_it_has_claimed():
    pool = BlockPool(8, HostTier(2), claim_share=1.0)
    shared = cached(pool, range(2), CacheClaim(60.0, session=ONE))
    cached(pool, range(2, 4), CacheClaim(60.0, session=ONE))
    pool.pin(shared)
    pool.claim(shared, "t", CacheClaim(60.0, session=OTHER))
    pool.release(shared)
    pool.take_events()
    assert pool.close_session(ONE) == 2
    assert found(pool, range(4)) == [0, 1]
    assert pool.counts.free == 6
    assert pool.close_session(ONE) == 0
    assert pool.close_session(OTHER) == 0, "it was never the only one"
    assert found(pool, range(4)) == [0, 1]
    assert pool.claims.closed == 2
    assert pool.check({}) == []


def test_what_a_request_outside_has_used_survives_the_session():
    pool = BlockPool(4, claim_share=1.0)
    blocks = cached(pool, range(2), CacheClaim(60.0, session=ONE))
    pool.hit(blocks[:1], b"", 0)
    assert pool.close_session(ONE) == 1
    assert found(pool, range(2)) == [0]


def test_a_block_in_use_is_not_freed_by_the_end_of_its_session():
    pool = BlockPool(4, claim_share=1.0)
    blocks = cached(pool, range(2), CacheClaim(60.0, session=ONE))
    pool.pin(blocks)
    assert pool.close_session(ONE) == 0
    assert pool.claims.by_rank == ((0, 0),)
    pool.release(blocks)
    assert pool.counts.cached == 2


# ---- in the engine ----


def run(kit, engine, request):
    engine.clock.advance(0.1)
    engine.send(request)
    return kit.run_until_idle(engine)


def claiming(kit, attempt, prompt, session=b"", ttl_s=60.0, **fields):
    return kit.make_request(attempt, prompt, 2, claim=CacheClaim(ttl_s, session=session), **fields)


def test_a_claimed_prompt_survives_a_flood(kit):
    engine = kit.make_engine(num_blocks=24)
    for claim in (None, CacheClaim(60.0)):
        name = "plain" if claim is None else "claimed"
        run(kit, engine, kit.make_request(name, range(100, 121), 2, claim=claim))
        for i in range(8):
            run(kit, engine, kit.make_request(f"{name}{i}", range(200 + 40 * i, 230 + 40 * i), 2))
        events = run(kit, engine, kit.make_request(name + "2", range(100, 121), 2))
        [end] = kit.ends_of(events, name + "2")
        [admitted] = [e for e in events if isinstance(e, Admitted)]
        assert end.num_cached_tokens == (0 if claim is None else 20)
        assert admitted.num_kept_tokens == end.num_cached_tokens
    assert engine.stats().claims.kept == 5


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_claims_never_keep_an_unclaimed_request_from_running(kit, share):
    """The bound: with every block of the pool claimed, a request that needs them all is admitted in its first step, as in a pool
    without claims."""
    engine = kit.make_engine(num_blocks=16, claim_share=share, max_num_batched_tokens=64)
    run(kit, engine, claiming(kit, "a", range(100, 160), ONE))
    assert engine.core.scheduler.kv.pool.counts.cached == 15
    assert dict(engine.stats().claims.by_rank).get(0, 0) == int(15 * share)
    engine.send(kit.make_request("b", range(500, 561), 2))
    engine.core.step()
    assert [e.attempt for e in engine.core.take_events() if isinstance(e, Admitted)] == ["b"]
    [end] = kit.ends_of(kit.run_until_idle(engine), "b")
    assert isinstance(end, Finished)
    assert engine.stats().preemptions_total == 0
    assert dict(engine.stats().claims.by_rank).get(0, 0) == 0


def test_a_closed_session_frees_its_blocks_and_a_running_request_claims_nothing(kit):
    engine = kit.make_engine(num_blocks=32)
    run(kit, engine, claiming(kit, "a", 21, ONE))
    engine.send(claiming(kit, "b", range(500, 521), ONE))
    engine.core.step()
    assert engine.core.scheduler.live.close_session(ONE) == 20
    assert engine.core.scheduler.kv.pool.counts.cached == 0
    kit.run_until_idle(engine)
    assert dict(engine.stats().claims.by_rank) == {0: 0}
    assert engine.core.scheduler.check() == []


def test_a_pull_is_no_use_by_others(kit):
    """The session's own next turn pulls; its claims ended with their time only, for the pull had no session."""
    engine = kit.make_engine(num_blocks=32)
    run(kit, engine, claiming(kit, "a", 21, ONE))
    engine.send(PullBlocks("pull", Prompt(tuple(range(100, 140)))))
    engine.send(EndPull("pull"))
    kit.run_until_idle(engine)
    assert engine.core.scheduler.live.close_session(ONE) == 20
    assert engine.core.scheduler.check() == []


def test_a_claim_ends_by_the_engines_clock(kit):
    engine = kit.make_engine(num_blocks=32)
    run(kit, engine, claiming(kit, "a", 21))
    assert dict(engine.stats().claims.by_rank) == {0: 5}
    engine.clock.advance(60.0)
    engine.core.step()  # the step thread does so at least once a minute
    assert (dict(engine.stats().claims.by_rank), engine.stats().claims.expired) == ({0: 0}, 5)


# ---- at random ----


class Pools(RuleBasedStateMachine):
    """Two pools get the same requests, one of them without claims: what could be allocated is the same at every moment."""

    def __init__(self):
        super().__init__()
        self.pools = [BlockPool(12, claim_share=share) for share in (0.5, 0.0)]
        self.held = 0
        self.owned = [[], []]

    @rule(first=st.integers(0, 5), length=st.integers(1, 4), tenant=st.sampled_from("ab"), wants=st.booleans(),
          priority=st.integers(0, 100), session=st.sampled_from((b"", ONE, OTHER)), ttl=st.integers(1, 9))  # fmt: skip
    def request(self, first, length, tenant, wants, priority, session, ttl):
        took = []
        for pool in self.pools:
            keys = [tenant.encode() + key(first * 10 + i) for i in range(length)]
            hits = pool.find(keys)
            pool.pin(hits)
            blocks = pool.allocate(length - len(hits))
            took.append(blocks is not None)
            blocks = [*hits, *(blocks or [])]
            if took[-1]:
                for block, name in zip(blocks, keys, strict=True):
                    pool.publish(block, name, tenant)
                if wants:
                    pool.claim(reversed(blocks), tenant, CacheClaim(float(ttl), priority, session))
            pool.release(reversed(blocks))
        assert took[0] == took[1], "a claim kept a request from running"

    @rule(count=st.integers(1, 12))
    def hold(self, count):
        took = [pool.allocate(count) for pool in self.pools]
        assert (took[0] is None) == (took[1] is None), "a claim kept a request from running"
        for mine, blocks in zip(self.owned, took, strict=True):
            mine.extend(blocks or [])

    @rule()
    def release(self):
        for pool, mine in zip(self.pools, self.owned, strict=True):
            pool.release(mine)
            mine.clear()

    @rule(session=st.sampled_from((ONE, OTHER)))
    def close(self, session):
        for pool in self.pools:
            pool.close_session(session)

    @rule(seconds=st.integers(1, 5))
    def passes(self, seconds):
        for pool in self.pools:
            pool.now += seconds

    @invariant()
    def laws_hold(self):
        for pool, mine in zip(self.pools, self.owned, strict=True):
            assert pool.check(dict.fromkeys(mine, 1)) == []
        assert self.pools[0].available == self.pools[1].available
        assert not self.pools[1].claims.by_rank or set(dict(self.pools[1].claims.by_rank).values()) == {0}


def test_claims_change_no_count_at_random():
    run_state_machine_as_test(Pools, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def test_levels_of_the_order():
    order: EvictionOrder[str] = EvictionOrder()
    for item, level in (("c", 51), ("u", UNCLAIMED), ("l", LET_GO), ("d", 11), ("v", UNCLAIMED)):
        order.add(item, level)
    assert list(order) == ["l", "u", "v", "d", "c"]
    order.remove("u")
    assert (len(order), "u" in order, next(iter(order))) == (4, False, "l")
