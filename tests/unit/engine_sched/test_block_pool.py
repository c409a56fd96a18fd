from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.common.tiers import TierDump
from diptych.engine.messages import BlocksEvicted, BlocksStored, CacheCleared
from diptych.engine.sched.cache.block_pool import BlockPool
from diptych.engine.stats import AGE_BUCKETS_S


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


def test_a_released_block_with_a_key_is_found_again_and_without_one_is_free():
    pool = BlockPool(3)
    a, b = pool.allocate(2) or []
    pool.publish(a, key(1))
    pool.release([b, a])
    assert pool.counts.cached == 1
    assert pool.counts.free == 2
    assert pool.find([key(1)]) == [a]
    pool.pin([a])
    assert pool.counts.running == 1
    assert pool.check({a: 1}) == []


def test_find_stops_at_the_first_gap():
    pool = BlockPool(4)
    blocks = pool.allocate(3) or []
    for i in (0, 2):
        pool.publish(blocks[i], key(i))
    assert pool.find([key(0), key(1), key(2)]) == [blocks[0]]


def test_the_least_recently_released_block_is_evicted_first():
    pool = BlockPool(2)
    a, b = pool.allocate(2) or []
    pool.publish(a, key(1))
    pool.publish(b, key(2))
    pool.release([b])
    pool.release([a])
    pool.allocate(1)
    assert pool.find([key(2)]) == []
    assert pool.find([key(1)]) == [a]


def test_a_reservation_evicts_so_that_the_law_holds_and_binding_cannot_fail():
    pool = BlockPool(4)
    blocks = pool.allocate(4) or []
    for i, block in enumerate(blocks):
        pool.publish(block, key(i))
    pool.release(reversed(blocks))
    assert pool.reserve(3)
    counts = pool.counts
    assert (counts.free, counts.running, counts.cached, counts.reserved) == (0, 0, 1, 3)
    assert pool.allocate(2) is None
    assert not pool.reserve(2)
    assert len(pool.bind(3)) == 3
    assert pool.counts.reserved == 0
    assert pool.check() == []


def test_the_first_block_of_a_key_stays_its_block():
    pool = BlockPool(2)
    a, b = pool.allocate(2) or []
    pool.publish(a, key(1))
    pool.publish(b, key(1))
    pool.release([a, b])
    assert pool.counts.cached == 1
    assert pool.counts.free == 1


def test_cache_events_keep_their_order_and_count_up():
    pool = BlockPool(1)
    (a,) = pool.allocate(1) or []
    pool.publish(a, key(1))
    pool.release([a])
    (a,) = pool.allocate(1) or []
    pool.publish(a, key(2))
    pool.release([a])
    assert pool.take_events() == [BlocksStored(1, (key(1),)), BlocksEvicted(2, (key(1),)), BlocksStored(3, (key(2),))]
    assert pool.dump().tiers[0].sequence == 3
    pool.clear()
    assert pool.take_events() == [CacheCleared(1)]
    assert (pool.dump().epoch, pool.dump().tiers[0]) == (1, TierDump(0, ()))


def test_clear_leaves_owned_blocks_with_their_owners():
    pool = BlockPool(2)
    a, b = pool.allocate(2) or []
    pool.publish(a, key(1))
    pool.publish(b, key(2))
    pool.release([b])
    pool.clear()
    assert pool.check({a: 1}) == []
    assert pool.counts.free == 1
    pool.release([a])
    assert pool.counts.free == 2


def test_releasing_more_often_than_owned_is_our_own_bug():
    pool = BlockPool(1)
    blocks = pool.allocate(1) or []
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)


def test_ages_of_cached_blocks_are_counted_by_the_callers_clock():
    pool = BlockPool(1)
    pool.ages.now = 10.0
    (a,) = pool.allocate(1) or []
    pool.publish(a, key(1))
    pool.ages.now = 11.0
    pool.release([a])
    assert pool.ages.stats() is pool.ages.stats()
    pool.ages.now = 11.25
    pool.pin([a])
    pool.pin([a])  # a second holder at once: it was not idle
    pool.release([a, a])
    pool.ages.now = 14.0
    pool.allocate(1)
    reported = pool.ages.stats()
    for ages, seconds in ((reported.reuse_gap, 0.25), (reported.lifetime, 4.0), (reported.idle_before_evict, 2.75)):
        assert sum(ages.buckets) == 1
        assert ages.sum_s == seconds
        assert ages.buckets[bisect_left(AGE_BUCKETS_S, seconds)] == 1


def test_check_tells_of_a_leak():
    pool = BlockPool(2)
    (a,) = pool.allocate(1) or []
    assert "1 references counted, 0 held" in pool.check({})[0]
    assert pool.check({a: 1}) == []


class PoolMachine(RuleBasedStateMachine):
    """Random owners on a small pool; a replay of the cache events must give the pool's own index."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.owners: list[list[int]] = []
        self.reserved: list[int] = []
        self.mirror: set[bytes] = set()
        self.sequence = 0

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        could = count <= self.pool.available
        blocks = self.pool.allocate(count)
        assert (blocks is not None) == could
        if blocks:
            assert len(set(blocks)) == count
            self.owners.append(blocks)

    @rule(count=st.integers(0, 8))
    def reserve(self, count: int) -> None:
        if self.pool.reserve(count):
            self.reserved.append(count)

    @precondition(lambda self: self.reserved)
    @rule(bind=st.booleans())
    def end_reservation(self, bind: bool) -> None:
        count = self.reserved.pop()
        if bind:
            self.owners.append(self.pool.bind(count))
        else:
            self.pool.unreserve(count)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.owners) - 1))
        self.pool.release(reversed(self.owners.pop(i)))

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), name=st.integers(0, 9))
    def publish(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from([b for blocks in self.owners for b in blocks]))
        self.pool.publish(block, key(name))

    @rule(names=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def hit(self, names: list[int]) -> None:
        found = self.pool.find([key(i) for i in names])
        self.pool.pin(found)
        if found:
            self.owners.append(found)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.pool.discard(data.draw(st.sampled_from([o for o in self.owners if o])))

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @invariant()
    def law(self) -> None:
        owned: dict[int, int] = {}
        for blocks in self.owners:
            for block in blocks:
                owned[block] = owned.get(block, 0) + 1
        assert self.pool.check(owned) == []
        assert self.pool.counts.reserved == sum(self.reserved)
        for event in self.pool.take_events():
            if isinstance(event, CacheCleared):
                self.mirror, self.sequence = set(), 0
                continue
            self.sequence += 1
            assert event.sequence == self.sequence
            keys = set(event.keys)
            if isinstance(event, BlocksStored):
                assert not keys & self.mirror
                self.mirror |= keys
            else:
                assert keys <= self.mirror
                self.mirror -= keys
        assert self.mirror == set(self.pool.dump().tiers[0].keys)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


WRONG = {
    "a free block that is used": lambda pool: pool._free.append(1),
    "a free block that is named twice": lambda pool: pool._free.append(pool._free[0]),
    "a block that is nowhere": lambda pool: pool._free.pop(),
    "a free block with a key": lambda pool: pool._keys.__setitem__(pool._free[0], key(9)),
    "a cached block that is used": lambda pool: pool._refs.__setitem__(0, 1),
    "a cached block without a key": lambda pool: pool._keys.__setitem__(0, None),
    "a key that is another block's": lambda pool: pool._by_key.update({key(0): 1}),
    "a key that is not in the index": lambda pool: pool._by_key.pop(key(0)),
    "a key of no block": lambda pool: pool._by_key.update({key(9): 3}),
    "a reference too many": lambda pool: pool._refs.__setitem__(1, 2),
    "a reference below none": lambda pool: pool._refs.__setitem__(1, -1),
    "a wrong number of used blocks": lambda pool: setattr(pool, "_num_running", 2),
}


@pytest.mark.parametrize("quota", [None, 2])
@pytest.mark.parametrize("what", WRONG)
def test_a_walk_finds_what_is_wrong(what, quota):
    pool = BlockPool(4, tenant_quota=quota)
    used, cached = pool.allocate(2) or []
    pool.publish(cached, key(0))
    pool.release([cached])
    assert (used, cached) == (1, 0)
    assert pool.check({used: 1}) == []
    assert pool.check({}) == ["block 1: 1 references counted, 0 held by requests"]
    assert pool.check({used: 1, 3: 1}) == ["block 3: 0 references counted, 1 held by requests"]
    WRONG[what](pool)
    assert pool.check({used: 1})
