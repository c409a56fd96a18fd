import random

import pytest

from diptych.bench.router.decision import BLOCK_SIZE, HEADER, make_record
from diptych.common.clock import FakeClock
from diptych.common.request import Prompt
from diptych.common.store.memory import MemoryStore
from diptych.common.tiers import TierDump
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.index import BlockIndex
from diptych.router.placement.pending import PendingShare
from diptych.router.placement.placer import Candidate, Placer, PromptBlocks
from diptych.router.placement.reservations import Reservation, Reservations
from diptych.router.placement.types import PlacementRequest
from diptych_tests.records import worker_record


@pytest.fixture
def clock():
    return FakeClock(100.0)


def share(store, clock, name):
    reservations = Reservations()
    return PendingShare(store, reservations, name, clock=clock), reservations


def seen(reservations, *names):
    tokens, requests = reservations.at(reservations.columns(names))
    return list(zip(tokens.tolist(), requests.tolist(), strict=True))


async def test_sums_of_others_are_added_and_go_when_they_go(clock):
    store = MemoryStore(clock)
    (a, mine), (b, yours), (c, theirs) = (share(store, clock, name) for name in "abc")
    mine.reserve("1", Reservation("p0", "d0", 100))
    yours.reserve("1", Reservation("p0", "d1", 50))
    for one in (a, b, c):
        await one.exchange()
    await a.exchange()
    assert seen(mine, "p0", "d0", "d1") == [(150, 2), (0, 1), (0, 1)]
    assert seen(theirs, "p0", "d0", "d1") == [(150, 2), (0, 1), (0, 1)]
    assert mine.tokens("p0") == 100
    yours.release("1")
    await b.exchange()
    await a.exchange()
    assert seen(mine, "p0", "d1") == [(100, 1), (0, 0)]
    clock.advance(1.6)
    await a.exchange()  # renews its row
    clock.advance(1.6)
    await c.exchange()
    assert seen(theirs, "p0") == [(100, 1)]
    clock.advance(3.1)  # router a has died
    await c.exchange()
    assert seen(theirs, "p0", "d0") == [(0, 0), (0, 0)]


async def test_a_store_that_is_away_is_survived(clock):
    store = MemoryStore(clock)
    (a, mine), (b, yours) = (share(store, clock, name) for name in "ab")
    yours.reserve("1", Reservation("p0", "d0", 7))
    await b.exchange()
    await a.exchange()
    store.available = False
    await a.exchange()
    assert seen(mine, "p0") == [(7, 1)]
    clock.advance(3.5)
    await a.exchange()
    assert seen(mine, "p0") == [(0, 0)]
    store.available = True
    await b.exchange()
    await a.exchange()
    assert seen(mine, "p0") == [(7, 1)]


def test_columns_of_workers_long_gone_are_forgotten():
    reservations = Reservations()
    reservations.reserve("kept", Reservation("old-7", "d0", 5))
    for i in range(3000):
        reservations.reserve("x", Reservation(f"old-{i}", "d0", 5))
        reservations.release("x")
    assert seen(reservations, "d0", "old-7") == [(0, 1), (5, 1)]
    assert len(reservations._columns) < 10
    reservations.release("kept")
    assert seen(reservations, "d0", "old-7") == [(0, 0), (0, 0)]
    assert reservations.mine() == {}


class Replica:
    """A router with only its placer."""

    def __init__(self, store, clock, name, records, keys):
        self.share, self.reservations = share(store, clock, name)
        index = BlockIndex()
        self.placer = Placer(index, self.reservations, random.Random(name))
        for record in records:
            index.register(record.worker_id, "i", 0, 0)
        index.load_snapshot("p0", "i", epoch=0, tiers=[TierDump(1, keys)])
        at = [Candidate(record, 0.0, HEADER) for record in records]
        self.placer.set_workers(at[:4], at[4:], {}, {})
        self.count = 0

    def place(self, keys):
        prompt = PromptBlocks(Prompt(range(len(keys) * BLOCK_SIZE + 40)))
        prompt.know(HEADER, as_keys(keys))
        chosen = self.placer.place(PlacementRequest(len(prompt.prompt.token_ids), 0), prompt, 1000.0).chosen
        self.count += 1
        tokens = len(prompt.prompt.token_ids) - chosen.prefill.hit_tokens
        self.reservations.reserve(
            str(self.count), Reservation(chosen.prefill.worker_id, chosen.decode.worker_id, tokens)
        )


async def burst(clock, *, shared):
    """Three routers, one prefix held only by p0, 80 requests each, exchanged after every fourth."""
    store = MemoryStore(clock)
    records = [make_record(f"{role[0]}{i}", role, random.Random(0)) for role in ("prefill", "decode") for i in range(4)]
    keys = [b"%16d" % i for i in range(32)]
    routers = [Replica(store, clock, f"r{i}", records, keys) for i in range(3)]
    for step in range(80):
        for router in routers:
            router.place(keys)
        if shared and step % 4 == 3:
            for router in routers * 2:
                await router.share.exchange()
    return [sum(router.reservations.tokens(f"p{i}") for router in routers) for i in range(4)]


async def test_three_routers_do_not_stampede_the_worker_that_holds_the_prefix(clock):
    alone, together = await burst(clock, shared=False), await burst(clock, shared=True)
    assert max(together) < 1.35 * sum(together) / 4
    assert together[0] < alone[0]


def test_a_burst_does_not_go_where_its_kv_has_no_room(clock):
    """Leases have not said anything yet: what this router placed counts, until it ends."""
    records = [worker_record("p0", block_size=BLOCK_SIZE, incarnation="i")]
    records += [
        worker_record(name, block_size=BLOCK_SIZE, incarnation="i", num_blocks=num_blocks)
        for name, num_blocks in (("d0", 100), ("d1", 1000))
    ]
    index, reservations = BlockIndex(), Reservations()
    for record in records:
        index.register(record.worker_id, "i", 0, 0)
    placer = Placer(index, reservations, random.Random(0))
    at = [Candidate(record, 0.0, HEADER) for record in records]
    placer.set_workers(at[:1], at[1:], {}, {})
    prompt, placed = PromptBlocks(Prompt(range(640))), []

    def place():
        chosen = placer.place(PlacementRequest(640, 0), prompt, 0.0).chosen.decode.worker_id
        placed.append(chosen)
        reservations.reserve(str(len(placed)), Reservation("p0", chosen, 640, kv_tokens=640))

    for _ in range(12):
        place()
    assert placed.count("d0") == 2  # 40 blocks each
    for number, name in enumerate(placed, 1):
        if name == "d0":
            reservations.release(str(number))
    place()
    assert placed[-1] == "d0"


async def test_what_is_doubtful_counts_where_workers_are_compared_and_nowhere_else(clock):
    store = MemoryStore(clock)
    (a, mine), (b, theirs) = (share(store, clock, name) for name in "ab")

    def certain():
        """(certain tokens, doubtful tokens)"""
        size = 10**6
        sure = [mine.backlog.before(name, "", size) for name in ("p0", "d0")]
        return sum(sure), sum(mine.backlog.before(name, "", size, doubtful=True) for name in ("p0", "d0")) - sum(sure)

    mine.reserve("sure", Reservation("p0", "d0", 100))
    mine.reserve("1", Reservation("p0", "d0", 30), doubtful=True)
    mine.reserve("2", Reservation("d0", "d0", 7), doubtful=True)
    assert seen(mine, "p0", "d0") == [(130, 2), (7, 3)]
    assert certain() == (100, 37)
    for one in (a, b):
        await one.exchange()
    assert [tokens for tokens, _ in seen(theirs, "p0", "d0")] == [100, 0]
    mine.settle("1")
    mine.settle("1")
    assert certain() == (130, 7)
    assert mine.release("2") == Reservation("d0", "d0", 7)
    assert mine.release("2") is None
    assert certain() == (130, 0)
    mine.reserve("3", Reservation("p0", "d0", 5), doubtful=True)
    mine.prompt_computed("3")
    assert certain() == (130, 0)
    for number in range(200):  # other columns, and a wider table
        mine.reserve(f"w{number}", Reservation(f"w{number}", f"w{number}", 1), doubtful=True)
    assert certain() == (130, 0)
