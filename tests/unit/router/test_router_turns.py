import asyncio
import random

import pytest

from diptych.common.errors import OverloadedError, RequestDeadlineError
from diptych.router.turns import QUANTUM, Share, Turns
from diptych.router.turnstile import Turnstile


def drained(turns):
    order = []
    while (entry := turns.take()) is not None:
        order.append(entry)
    return order


def test_within_a_tenant_priority_then_age():
    turns = Turns()
    for item, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0)):
        turns.add("t", 10, item, share=Share(), priority=priority)
    assert [entry.item for entry in drained(turns)] == ["c", "a", "d", "b"]
    assert len(turns) == 0


def test_a_lower_rank_goes_first_and_removed_ones_cost_nothing():
    turns = Turns()
    turns.add("batch", 1, "late", share=Share(rank=1))
    left = turns.add("t", 10**6, "left", share=Share())
    turns.add("t", 1, "first", share=Share())
    turns.remove(left)
    turns.remove(left)
    assert len(turns) == 2
    assert [entry.item for entry in drained(turns)] == ["first", "late"]


def test_ten_times_as_many_requests_get_no_more():
    turns = Turns()
    for i in range(1000):
        turns.add("greedy", 300, i, share=Share())
    for i in range(100):
        turns.add("modest", 300, i, share=Share())
    first = [turns.take().tenant for _ in range(200)]
    assert abs(first.count("modest") - 100) <= 4  # its bound: (quantum + 2 x 300) / 300
    assert first.count("modest") + first.count("greedy") == 200


@pytest.mark.parametrize("seed", range(20))
def test_the_published_bound_holds_over_every_stretch(seed):
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": rng.choice([0.5, 2.0, 3.0]), "c": rng.choice([1.0, 10.0])}
    largest = rng.choice([50, 2000, 100_000])
    turns = Turns()
    for tenant, weight in weights.items():
        for _ in range(rng.randint(200, 400)):
            turns.add(tenant, rng.randint(1, largest), tenant, share=Share(weight))
    waiting = dict.fromkeys(weights, 0)
    served = dict.fromkeys(weights, 0)
    history = [dict(served)]
    for entry in (order := drained(turns)):
        waiting[entry.tenant] += 1
    last = {t: max(i for i, e in enumerate(order) if e.tenant == t) for t in weights}
    for entry in order:
        served[entry.tenant] += entry.tokens
        history.append(dict(served))
    until = min(last.values())  # as long as all of them have something waiting
    for one, other in (("a", "b"), ("b", "c"), ("a", "c")):
        ahead = [history[i][one] / weights[one] - history[i][other] / weights[other] for i in range(until + 1)]
        assert max(ahead) - min(ahead) < QUANTUM + largest / weights[one] + largest / weights[other]


def test_a_huge_request_takes_no_endless_rounds():
    turns = Turns(quantum=1)
    for tenant in "ab":
        turns.add(tenant, 10**9, tenant, share=Share(0.001))
    assert len(drained(turns)) == 2


class Pool:
    """Room of a pool that is given `size` tokens at most."""

    def __init__(self, size):
        self.left = size

    def __call__(self, window_s):
        return self.left


async def enter(gate, tenant, tokens, done, pool, **more):
    await gate.enter(tenant, tokens, priority=0, left_s=more.get("left_s", 5.0))
    pool.left -= tokens
    done.append(tenant)


async def test_nobody_waits_while_there_is_room():
    pool = Pool(100)
    gate, done = Turnstile(pool, window_s=1.0), []
    await enter(gate, "a", 1000, done, pool)
    assert done == ["a"]
    assert not gate.may_pass()
    unlimited = Turnstile(pool, window_s=0.0)
    assert unlimited.may_pass()
    gate.close()


async def test_a_tenant_with_ten_times_the_requests_gets_its_share_of_the_room():
    pool = Pool(0)
    gate, done = Turnstile(pool, window_s=1.0), []
    tasks = [asyncio.create_task(enter(gate, "greedy", 512, done, pool)) for _ in range(200)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(enter(gate, "modest", 512, done, pool)) for _ in range(20)]
    await asyncio.sleep(0)
    assert len(gate) == 220
    for _ in range(40):  # one prompt is computed after the other
        pool.left = 1
        gate.let_in()
        gate.let_in()  # room that was given away is not given twice
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(done) == 40
    assert abs(done.count("modest") - 20) <= 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(gate) == 0
    gate.close()


async def test_who_leaves_or_is_too_late_gives_the_place_back():
    pool = Pool(0)
    gate, done = Turnstile(pool, window_s=1.0, most=2), []
    gone = asyncio.create_task(enter(gate, "a", 10, done, pool))
    await asyncio.sleep(0)
    with pytest.raises(RequestDeadlineError):
        await gate.enter("a", 10, priority=0, left_s=0.0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert len(gate) == 0
    waiting = [asyncio.create_task(enter(gate, "a", 10, done, pool)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as refused:
        await gate.enter("b", 10, priority=0, left_s=1.0)
    assert refused.value.retry_after_s == 1.0
    pool.left = 11
    gate.let_in()
    await asyncio.gather(*waiting)
    assert done == ["a", "a"]
    assert gate._passing == 0
    gate.close()
