import asyncio
import random

import msgspec
import pytest

from diptych.bench.router.decision import make_record
from diptych.common.errors import OverloadedError, RequestDeadlineError
from diptych.common.request import Prompt
from diptych.common.store.worker_record import WorkerLoad
from diptych.router.fairness.capacity_gate import CapacityGate
from diptych.router.fairness.fair_queue import SLACK, FairQueue, Share
from diptych.router.fairness.wait_queue import WaitQueue
from diptych.router.placement.index import BlockIndex
from diptych.router.placement.placer import Candidate, Placer, PromptBlocks
from diptych.router.placement.reservations import Reservation, Reservations
from diptych.router.placement.types import PlacementRequest


def drained(turns):
    order = []
    while (entry := turns.take()) is not None:
        order.append(entry)
    return order


def test_within_a_tenant_priority_then_age():
    turns = FairQueue()
    for item, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0)):
        turns.add("t", 10, item, share=Share(), priority=priority)
    assert [entry.item for entry in drained(turns)] == ["c", "a", "d", "b"]
    assert len(turns) == 0


def test_a_lower_rank_goes_first_and_removed_ones_cost_nothing():
    turns = FairQueue()
    turns.add("batch", 1, "late", share=Share(rank=1))
    left = turns.add("t", 10**6, "left", share=Share())
    turns.add("t", 1, "first", share=Share())
    turns.remove(left)
    turns.remove(left)
    assert len(turns) == 2
    assert [entry.item for entry in drained(turns)] == ["first", "late"]


def test_ten_times_as_many_requests_get_no_more():
    turns = FairQueue()
    for i in range(1000):
        turns.add("greedy", 300, i, share=Share())
    for i in range(100):
        turns.add("modest", 300, i, share=Share())
    first = [turns.take().tenant for _ in range(200)]
    assert abs(first.count("modest") - 100) <= 2  # its bound: 2 x 300 / 300
    assert first.count("modest") + first.count("greedy") == 200


@pytest.mark.parametrize("seed", range(20))
def test_the_published_bound_holds_over_every_stretch(seed):
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": rng.choice([0.5, 2.0, 3.0]), "c": rng.choice([1.0, 10.0])}
    largest = rng.choice([50, 2000, 100_000])
    turns = FairQueue()
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
        assert max(ahead) - min(ahead) <= largest / weights[one] + largest / weights[other]


def test_answers_count_as_prompts_do():
    turns = FairQueue()
    for i in range(200):
        turns.add("writer", 100, i, share=Share())
        turns.add("reader", 100, i, share=Share())
    served = dict.fromkeys(("writer", "reader"), 0)
    for _ in range(150):
        entry = turns.take()
        served[entry.tenant] += entry.tokens
        if entry.tenant == "writer":
            turns.charge("writer", 400, share=Share())
            served["writer"] += 400
    assert abs(served["writer"] - served["reader"]) <= 2 * 100 + 400
    assert turns.take().tenant


def test_a_debt_outlasts_an_empty_queue_but_not_the_time_in_which_a_request_waits():
    turns = FairQueue()

    def add(tenant, count=1):
        for i in range(count):
            turns.add(tenant, 100, i, share=Share())

    add("writer")
    add("other", 8)
    assert turns.take().tenant == "writer"
    turns.charge("writer", 450, share=Share())  # nothing of it waits
    add("writer", 2)
    assert [turns.take().tenant for _ in range(7)] == ["other"] * 6 + ["writer"]
    assert {entry.tenant for entry in drained(turns)} == {"writer", "other"}
    turns.charge("writer", 10**6, share=Share())  # none waits: idle time costs nothing
    add("other", 3)
    add("writer", 1)
    assert "writer" in [turns.take().tenant for _ in range(2)]


def test_others_catch_up_with_a_tenant_while_it_is_away():
    """Item 2.2: else a tenant whose few requests always pass is in debt for good while another always waits."""
    turns = FairQueue()
    for i in range(40):
        turns.add("greedy", 100, i, share=Share())
    for i in range(10):
        modest = turns.add("modest", 100, i, share=Share())
        assert turns.next().tenant == "modest" or modest in turns.may_pass(turns.next())
        turns.take(modest, before=turns.next())
        for _ in range(2):
            assert turns.take().tenant == "greedy"
    assert len(turns) == 20


def test_a_tenant_with_prompts_placed_beforehand_is_not_ahead_of_a_newcomer_nor_behind():
    """Item 2.2: what a tenant has placed when it begins to wait counts, as what it is let in later does."""
    placed = {"full": 3000.0}
    turns = FairQueue(lambda tenant, above=0: placed.get(tenant, 0.0))
    turns.add("full", 1000, "first", share=Share())
    for i in range(5):
        turns.add("new", 1000, i, share=Share())
    assert [turns.take().tenant for _ in range(4)] == ["new", "new", "new", "full"]


def test_a_long_prompt_counts_against_a_shorter_one_of_its_tenant_as_far_as_it_is_computed():
    """Item 2.2."""
    placed = {"me": 0.0}
    turns = FairQueue(lambda tenant, above=0: max(0.0, placed.get(tenant, 0.0) - above))
    stuck = turns.add("other", 100, "stuck", share=Share())
    turns.take(turns.add("me", 5000, "long", share=Share()), before=stuck)
    placed["me"] = 5000.0
    for computed, tokens, may in (
        (0, 600, True),
        (0, 620, False),
        (500, 112, True),
        (500, 113, False),
        (613, 1, False),
    ):
        placed["me"] = 5000.0 - computed
        entry = turns.add("me", tokens, "short", share=Share())
        assert (entry in turns.may_pass(stuck)) is may  # 100 and 512 tokens may be computed before it
        turns.remove(entry)


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_holds_with_answers(seed):
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": rng.choice([0.5, 3.0])}
    largest, longest = rng.choice([50, 2000]), rng.choice([10, 5000])
    turns, served, owed = FairQueue(), dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0)
    for tenant in weights:
        for _ in range(400):
            turns.add(tenant, rng.randint(1, largest), tenant, share=Share(weights[tenant]))
    left, ahead, most = dict.fromkeys(weights, 400), [0.0], dict.fromkeys(weights, 0)
    while min(left.values()) > 0:
        entry = turns.take()
        left[entry.tenant] -= 1
        owed[entry.tenant] = 0
        served[entry.tenant] += entry.tokens
        for tenant in weights:  # several answers are under way
            written = rng.randint(0, longest) if rng.random() < 0.5 else 0
            turns.charge(tenant, written, share=Share(weights[tenant]))
            served[tenant] += written
            owed[tenant] += written
            most[tenant] = max(most[tenant], owed[tenant])
        ahead.append(served["a"] / weights["a"] - served["b"] / weights["b"])
    bound = sum((largest + most[tenant]) / weights[tenant] for tenant in weights)
    assert max(ahead) - min(ahead) <= bound


def test_a_huge_request_takes_no_endless_rounds():
    turns = FairQueue()
    for tenant in "ab":
        turns.add(tenant, 10**9, tenant, share=Share(0.001))
    assert len(drained(turns)) == 2


class Pool:
    """RoomCheck of a pool in which every tenant is given `size` tokens at most."""

    def __init__(self, size):
        self.left = size

    def __call__(self, window_s, tenant, tokens, beside=0.0, *, doubtful=False):
        return self.left > beside


async def enter(gate, tenant, tokens, done, pool, **more):
    await gate.enter(tenant, tokens, priority=0, left_s=more.get("left_s", 5.0))
    pool.left -= tokens
    done.append(tenant)


def test_a_pool_that_has_become_idle_is_not_given_all_that_waits():
    reservations, let_in = Reservations(), []
    placer = Placer(BlockIndex(), reservations, random.Random(0))
    record = msgspec.structs.replace(
        make_record("p0", "prefill", random.Random(0)), load=WorkerLoad(prefill_tokens_per_s=100.0)
    )
    placer.set_workers([Candidate(record, 0.0, None)], [], {}, {})
    assert placer.has_room(2.0, "t", 90, 199.0)
    assert not placer.has_room(2.0, "t", 90, 200.0)
    gate = CapacityGate(placer.has_room, lambda entry: not let_in.append(entry), window_s=2.0)
    for i in range(20):
        gate.wait("t", 90, i, priority=0)
    gate.let_in()
    assert len(let_in) == 3  # the last of them begins while there is room
    for entry in let_in:
        reservations.reserve(str(entry.item), Reservation("p0", "d0", entry.tokens, "t"))
        gate.arrived(entry)
    gate.let_in()
    assert (len(let_in), gate.passing) == (3, 0)
    reservations.release("0")
    gate.let_in()
    assert len(let_in) == 4


async def test_no_request_waits_while_there_is_room():
    pool = Pool(100)
    gate, done = WaitQueue(pool, window_s=1.0), []
    await enter(gate, "a", 1000, done, pool)
    assert done == ["a"]
    assert not gate.may_pass("a", 1)
    unlimited = WaitQueue(pool, window_s=0.0)
    assert unlimited.may_pass("a", 10**6)
    gate.close()


async def test_a_tenant_with_ten_times_the_requests_gets_its_share_of_the_room():
    pool = Pool(0)
    gate, done = WaitQueue(pool, window_s=1.0), []
    tasks = [asyncio.create_task(enter(gate, "greedy", 512, done, pool)) for _ in range(200)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(enter(gate, "modest", 512, done, pool)) for _ in range(20)]
    await asyncio.sleep(0)
    assert len(gate) == 220
    for _ in range(10):  # a prompt of each is computed
        pool.left = 1
        gate.let_in()
        gate.let_in()  # room that was given away is not given twice
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert (done.count("modest"), done.count("greedy")) == (10, 10)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(gate) == 0
    gate.close()


async def test_what_answers_write_counts_in_their_tenants_turns():
    pool = Pool(0)
    gate, done = WaitQueue(pool, window_s=1.0), []
    gate.written("writer", 10**9)  # while none waits
    tasks = [
        asyncio.create_task(enter(gate, tenant, 512, done, pool)) for _ in range(9) for tenant in ("writer", "reader")
    ]
    await asyncio.sleep(0)
    wrote = 0
    for _ in range(8):
        pool.left = 1
        gate.let_in()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        while wrote < done.count("writer"):
            gate.written("writer", 1024)
            wrote += 1
    bound = (512 + 1024) + 512 + (SLACK + 512)  # of fair_queue.py; the last is what it may pass
    assert 8 * 512 <= done.count("writer") * (512 + 1024) <= 8 * 512 + bound
    assert done.count("reader") == 8
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gate.close()


async def test_who_leaves_or_is_too_late_gives_the_place_back():
    pool = Pool(0)
    gate, done = WaitQueue(pool, window_s=1.0, most=2), []
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
        await gate.enter("a", 10, priority=0, left_s=1.0)
    assert refused.value.retry_after_s == 1.0
    pool.left = 11
    gate.let_in()
    await asyncio.gather(*waiting)
    assert done == ["a", "a"]
    assert gate.passing == 0
    gate.close()


class RoomByTenant:
    """RoomCheck of each tenant: how much of its own may still be placed."""

    def __init__(self):
        self.left = {}

    def __call__(self, window_s, tenant, tokens, beside=0.0, *, doubtful=False):
        return self.left.get(tenant, 0) > beside


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_whichever_worker_has_room(seed):
    """Item 2.2: others may pass the next request when it has no room; the service stays in proportion to the weights."""
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": rng.choice([0.5, 2.0, 3.0])}
    largest = rng.choice([50, 2000, 20_000])
    room, served, ahead, let_in = RoomByTenant(), dict.fromkeys(weights, 0), [0.0], []
    gate = CapacityGate(
        room, lambda entry: not let_in.append(entry), window_s=1.0, share=lambda tenant: Share(weights[tenant])
    )
    left = dict.fromkeys(weights, 400)
    for tenant in weights:
        for i in range(400):
            gate.wait(tenant, rng.randint(1, largest), i, priority=0)
    favoured = "a"
    while min(left.values()) > 1:
        if rng.random() < 0.02:
            favoured = "b" if favoured == "a" else "a"
        for tenant in weights:
            room.left[tenant] = 1 if tenant == favoured or rng.random() < 0.1 else 0
        gate.let_in()
        while let_in:
            entry = let_in.pop(0)
            gate.arrived(entry)
            left[entry.tenant] -= 1
            served[entry.tenant] += entry.tokens
            ahead.append(served["a"] / weights["a"] - served["b"] / weights["b"])
    assert max(ahead) - min(ahead) <= 4 * SLACK + 4 * sum(largest / weight for weight in weights.values())


def test_a_short_one_passes_a_long_one_of_its_own_and_of_others():
    """Item 2.2."""
    now, let_in = [0.0], []
    reservations = Reservations(lambda: now[0])
    placer = Placer(BlockIndex(), reservations, random.Random(0))
    records = [
        msgspec.structs.replace(
            make_record(f"p{i}", "prefill", random.Random(0)), load=WorkerLoad(prefill_tokens_per_s=250.0)
        )
        for i in range(2)
    ]
    placer.set_workers([Candidate(record, 0.0, None) for record in records], [], {}, {})
    gate = CapacityGate(placer.has_room, lambda entry: not let_in.append(entry.item), window_s=2.0)
    for i in range(2):
        assert gate.may_pass("a", 6000)  # a worker of which the tenant has nothing
        reservations.reserve(f"long{i}", Reservation(f"p{i}", "d0", 6000, "a"))
    assert not gate.may_pass("a", 6000)
    assert gate.may_pass("a", 1)
    assert gate.may_pass("b", 6000)
    gate.wait("a", 6000, "third", priority=0)
    gate.let_in()
    assert let_in == []
    gate.wait("a", 1, "own short", priority=0)
    gate.let_in()
    gate.wait("b", 300, "other", priority=0)
    gate.let_in()
    assert let_in == ["own short", "other"]
    now[0] = 5700 / 250.0  # room returns as they are computed, not with the first token
    gate.let_in()
    assert let_in[-1] == "third"


def test_short_ones_without_end_do_not_keep_a_long_one_out():
    now, let_in = [0.0], []
    reservations = Reservations(lambda: now[0])
    placer = Placer(BlockIndex(), reservations, random.Random(0))
    record = msgspec.structs.replace(
        make_record("p0", "prefill", random.Random(0)), load=WorkerLoad(prefill_tokens_per_s=250.0)
    )
    placer.set_workers([Candidate(record, 0.0, None)], [], {}, {})
    gate = CapacityGate(placer.has_room, lambda entry: not let_in.append(entry), window_s=2.0)
    reservations.reserve("first", Reservation("p0", "d0", 6000, "a"))
    gate.wait("a", 6000, "long", priority=0)
    count = shorts = 0
    while not any(entry.item == "long" for entry in let_in):
        now[0] += 0.1
        assert now[0] < 120.0
        reservations.backlog.before("p0", "a", 1)
        computed = reservations.backlog._workers["p0"].shares  # the worker does as is expected of it
        for name in [f"s{i}" for i in range(count + 1)] + ["first"]:
            if not computed.left(name):
                reservations.release(name)
        for _ in range(3):  # 1,500 tokens a second for a worker of 250
            count += 1
            gate.wait("a", 50, f"s{count}", priority=0)
        gate.let_in()
        for entry in let_in:
            if (name := str(entry.item)) != "long":
                gate.arrived(entry)
                shorts += 1
                reservations.reserve(name, Reservation("p0", "d0", 50, "a"))
        let_in[:] = [entry for entry in let_in if entry.item == "long"]
    assert shorts > 50
    # They pass it until they got what it gets, a quantum, and one of them: with the first one that is what is computed.
    assert now[0] * 250.0 <= 6000 + 6000 + SLACK + 50 + 2 * 500


def test_a_prompt_is_placed_where_its_tenants_share_is_free():
    """Item 2.2: p0 has fewer prompts of others, but one of the tenant; it would take two thirds of three prompts there,
    and half of two on p1."""
    reservations = Reservations()
    placer = Placer(BlockIndex(), reservations, random.Random(0))
    prefill, decode = (
        [Candidate(make_record(f"{role[0]}{i}", role, random.Random(0)), 0.0, None) for i in range(2)]
        for role in ("prefill", "decode")
    )
    placer.set_workers(prefill, decode, {}, {})
    reservations.reserve("own", Reservation("p0", "d0", 3000, "me"))
    reservations.reserve("long", Reservation("p0", "d0", 8000, "greedy"))
    for i in range(4):
        reservations.reserve(f"other{i}", Reservation("p1", "d0", 3000, "greedy"))
    prompt = PromptBlocks(Prompt(range(3000)))

    def chosen(tenant):
        return placer.place(PlacementRequest(3000, 0, tenant=tenant), prompt, 1000.0).chosen.prefill.worker_id

    assert chosen("me") == "p1"
    assert chosen("greedy") == "p0"
    backlog = reservations.backlog
    assert backlog.later("p1", "me", 3000) == 12_000 - 3000
    assert backlog.later("p0", "me", 3000) == 3000 + 8000 - (3000 + 6000)
    assert backlog.later("p0", "me", 1) == 3000 + 8000 - (1 + 2)
    for name in ("own", "long", *(f"other{i}" for i in range(4))):
        reservations.release(name)
    assert not backlog.has_others("me")


def test_what_a_tenant_was_computed_before_its_share_counts_where_its_next_is_placed():
    """Item 2.2: a worker that computed a prompt before equal shares would have done so owes the other tenants that."""
    now = [0.0]
    reservations = Reservations(lambda: now[0])
    reservations.reserve("other", Reservation("p0", "d0", 8000, "greedy"))
    reservations.backlog.set_rates({"p0": 100.0})
    reservations.reserve("own", Reservation("p0", "d0", 1000, "me"))
    reservations.prompt_computed("own")
    assert reservations.backlog.later("p0", "me", 1000) == 8000 - (1000 + 2000)
    reservations.reserve("gone", Reservation("p0", "d0", 1000, "me"))
    reservations.release("gone")  # cancelled: it received nothing
    assert reservations.backlog.later("p0", "me", 1000) == 8000 - (1000 + 2000)
    now[0] = 20.0  # in equal shares 2,000 tokens are those of both prompts
    assert reservations.backlog.later("p0", "me", 1000) == 8000 - (0 + 1000)
    reservations.reserve("early", Reservation("p0", "d0", 1000, "me"))
    reservations.release("other")
    reservations.prompt_computed("early")
    assert not len(reservations.backlog._workers["p0"].shares)  # none is pending: it starts anew


def test_a_worker_that_stands_still_is_not_given_more_and_more():
    now = [0.0]
    reservations = Reservations(lambda: now[0])
    placer = Placer(BlockIndex(), reservations, random.Random(0))
    record = msgspec.structs.replace(
        make_record("p0", "prefill", random.Random(0)), load=WorkerLoad(prefill_tokens_per_s=100.0)
    )
    placer.set_workers([Candidate(record, 0.0, None)], [], {}, {})
    for number in range(1000):
        now[0] += 10.0
        if placer.has_room(2.0, "t", 40):
            reservations.reserve(str(number), Reservation("p0", "d0", 40, "t"))
    assert len(reservations) == 80  # 16 windows
    for number in range(80):
        reservations.release(str(number))
    assert reservations.backlog.before("p0", "t", 40) == 0.0


async def test_no_tenant_is_refused_for_requests_of_others():
    pool = Pool(0)
    gate, done = WaitQueue(pool, window_s=1.0, most=8), []
    tasks = [asyncio.create_task(enter(gate, "greedy", 10, done, pool)) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await gate.enter("greedy", 10, priority=0, left_s=1.0)
    tasks += [asyncio.create_task(enter(gate, "modest", 10, done, pool)) for _ in range(4)]
    await asyncio.sleep(0)
    assert len(gate) == 12
    for tenant in ("modest", "greedy"):
        with pytest.raises(OverloadedError):
            await gate.enter(tenant, 10, priority=0, left_s=1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not gate._gate._turns._by_tenant
    gate.close()
