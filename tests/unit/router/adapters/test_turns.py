"""Turns for adapter slots: at most as many adapters in use as there are slots, in order, and none for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.clock import FakeClock
from diptych.common.errors import OverloadedError, RequestDeadlineError
from diptych.common.store.worker_record import WorkerLoad
from diptych.router.adapters import turns as turns_module
from diptych.router.adapters.in_use import OWN_S, AdaptersInUse
from diptych.router.adapters.turns import LATE_S, TURN_S, AdapterTurns
from diptych.router.placement.adapters import AdapterNeed
from diptych_tests.records import worker_record

NAMES = "abcdefgh"


def need(name: str, rank: int = 8) -> AdapterNeed:
    return AdapterNeed(name * 32, rank, 1000)


class Slots:
    """Workers with two slots each, the requests that run there, and the turns."""

    def __init__(self, num_workers: int = 1) -> None:
        self.clock = FakeClock()
        self.records = [worker_record(f"d{i}", max_loras=2, max_lora_rank=16) for i in range(num_workers)]
        self.in_use = AdaptersInUse(self.clock.now)
        self.refused = 0
        self.turns = AdapterTurns(
            lambda: self.records, self.in_use.running, self.in_use.own, self.clock.now, self._refused
        )
        self.in_use.on_free = self.turns.let_in

    def _refused(self) -> None:
        self.refused += 1

    def place(self, name: str) -> str:
        """As the placement: where it runs, else where a slot is free."""
        name = need(name).adapter_id
        holders = [r for r in self.records if name in self.in_use.running(r)]
        free = [r for r in self.records if len(self.in_use.running(r)) < r.max_loras]
        assert holders or free, "a request that has its turn finds a slot"
        worker_id = (holders or free)[0].worker_id
        self.in_use.add(worker_id, name)
        return worker_id

    def enter(self, name: str, tenant: str = "t", left_s: float = 1000.0) -> asyncio.Task[str]:
        async def run() -> str:
            await self.turns.enter(need(name), tenant, left_s)
            worker_id = self.place(name)
            self.turns.leave(need(name))
            return worker_id

        return asyncio.create_task(run())

    def end(self, worker_id: str, name: str) -> None:
        self.in_use.remove(worker_id, need(name).adapter_id)


async def rest() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_adapters_beyond_the_slots_wait_in_order_and_enter_together() -> None:
    slots = Slots()
    running = [slots.enter(name) for name in "ab"]
    await rest()
    assert all(task.done() for task in running)
    third, fourth, again = slots.enter("c"), slots.enter("d"), slots.enter("c")
    await rest()
    assert (len(slots.turns), third.done(), fourth.done()) == (3, False, False)
    slots.end("d0", "a")
    await rest()
    assert (third.done(), again.done(), fourth.done()) == (True, True, False)
    slots.end("d0", "b")
    await rest()
    assert fourth.done()
    assert not slots.turns._of_tenant
    assert not slots.turns._entering


async def test_a_running_adapter_passes_until_another_has_waited_for_a_turn() -> None:
    slots = Slots()
    for name in "ab":
        await slots.enter(name)
    waits = slots.enter("c")
    await rest()
    assert slots.turns.may_pass(need("a"))
    await slots.enter("a")
    slots.clock.advance(TURN_S)
    assert not slots.turns.may_pass(need("a"))
    late = slots.enter("a")
    await rest()
    assert not late.done()
    slots.end("d0", "a")
    await rest()
    assert not waits.done(), "its other request runs still"
    slots.end("d0", "a")
    await rest()
    assert waits.done()
    assert not late.done()
    slots.end("d0", "b")
    await rest()
    assert late.done()


async def test_waiting_ends_by_the_deadline_the_bound_or_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots()
    for name in "ab":
        await slots.enter(name)
    with pytest.raises(RequestDeadlineError):
        await slots.turns.enter(need("c"), "t", 0.001)
    monkeypatch.setattr(turns_module, "MAX_WAIT_S", 0.001)
    with pytest.raises(OverloadedError):
        await slots.turns.enter(need("c"), "t", 100.0)
    monkeypatch.setattr(turns_module, "MAX_WAITING", 0)
    with pytest.raises(OverloadedError):
        await slots.turns.enter(need("c"), "t", 100.0)
    assert (len(slots.turns), slots.refused) == (0, 2)
    gone = slots.enter("a")
    await rest()
    assert gone.done()


async def test_a_request_that_leaves_holds_nothing() -> None:
    slots = Slots()
    for name in "ab":
        await slots.enter(name)
    waits, behind = slots.enter("c"), slots.enter("d")
    await rest()
    waits.cancel()
    slots.end("d0", "a")
    await rest()
    assert waits.cancelled()
    assert behind.done()
    assert not slots.turns._entering


async def test_workers_that_cannot_serve_it_hold_no_request_up() -> None:
    slots = Slots()
    slots.records = [worker_record("d0"), worker_record("d1", max_loras=2, max_lora_rank=4)]
    assert slots.turns.may_pass(need("a")), "the placement says what is wrong"
    assert slots.turns.may_pass(need("a", rank=4))


async def test_a_waiter_for_large_ranks_holds_up_nobody_who_fits_elsewhere() -> None:
    """Once an adapter waited, only those that ran could pass, though it needed a worker that they do not need."""
    slots = Slots()
    slots.records = [
        worker_record("small", max_loras=2, max_lora_rank=8),
        worker_record("big", max_loras=1, max_lora_rank=16),
    ]
    turns = slots.turns
    slots.in_use.add("big", need("a").adapter_id)
    waits = asyncio.create_task(turns.enter(need("w", 16), "t", 1000.0))
    await rest()
    slots.clock.advance(TURN_S)
    assert (len(turns), waits.done()) == (1, False)
    for name in "cd":
        assert await turns.enter(need(name), "t", 1000.0) == 0.0, "it had to wait"
        slots.in_use.add("small", need(name).adapter_id)
        turns.leave(need(name))
    assert turns.may_pass(need("c")), "it runs where the waiter cannot"
    assert not turns.may_pass(need("a")), "it runs where the waiter's slot is to come from"
    assert not turns.may_pass(need("e")), "the small worker is full, and the big one is the waiter's"
    behind = asyncio.create_task(turns.enter(need("e"), "t", 1000.0))
    await rest()
    slots.in_use.remove("big", need("a").adapter_id)
    await rest()
    assert (waits.done(), behind.done()) == (True, False)
    assert not turns.may_pass(need("v", 16)), "its slot is given, though nobody runs there yet"
    slots.in_use.remove("small", need("c").adapter_id)
    await rest()
    assert behind.done(), "the large one that enters takes nothing of the small worker"
    turns.leave(need("w", 16))
    turns.leave(need("e"))
    assert not turns._entering
    assert not turns._needs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=40), st.integers(1, 3))
def test_never_more_adapters_in_use_than_slots_and_all_are_served(moves: list[tuple[str, bool]], workers: int) -> None:
    async def run() -> None:
        slots = Slots(workers)
        entered: list[tuple[str, asyncio.Task[str]]] = []
        for name, ends in moves:
            done = [(one, task) for one, task in entered if task.done()]
            if ends and done:
                entered.remove(done[0])
                slots.end(done[0][1].result(), done[0][0])
            else:
                entered.append((name, slots.enter(name)))
            await rest()
            slots.clock.advance(0.3)
            assert all(len(slots.in_use.running(record)) <= 2 for record in slots.records)
        for _ in range(len(entered) + 1):
            for one in [pair for pair in entered if pair[1].done()]:
                entered.remove(one)
                slots.end(one[1].result(), one[0])
            await rest()
        assert not entered
        assert not slots.turns._entering

    asyncio.run(run())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=30), st.integers(1, 2), st.integers(3, len(NAMES)))
def test_no_adapter_starves_while_all_are_wanted_all_the_time(
    order: list[str], num_workers: int, num_names: int
) -> None:
    """More adapters than slots, and each has a request that runs or waits, whichever of them ends next."""

    async def run() -> None:
        slots, names = Slots(num_workers), NAMES[:num_names]
        asked = {name: slots.enter(name) for name in names}
        since, ended = dict.fromkeys(names, 0), 0
        for name in (*order, *NAMES * 3):
            await rest()
            running = [one for one in names if asked[one].done()]
            assert running, "a slot is always in use"
            late = {one: ended - since[one] for one in names if one not in running}
            assert max(late.values(), default=0) <= num_names, "each end gives its slot to the one that waits longest"
            one = name if name in running else running[0]
            at, ended = asked[one].result(), ended + 1
            slots.clock.advance(TURN_S)
            asked[one], since[one] = slots.enter(one), ended  # its next user asks while it runs
            slots.end(at, one)
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)

    asyncio.run(run())


async def test_slots_that_another_router_always_holds_do_not_starve_this_ones_requests() -> None:
    """They waited until the 529: the other router's requests know nothing of them and never stop."""
    slots = Slots()
    foreign = WorkerLoad(adapters={need(name).adapter_id: 4 for name in "xy"})
    slots.records = [worker_record("d0", load=foreign, max_loras=2, max_lora_rank=16)]
    turns = slots.turns
    tasks = [asyncio.create_task(turns.enter(need(name), "t", 1000.0)) for name in "abc"]
    await rest()
    slots.clock.advance(LATE_S - 0.1)
    turns.let_in()
    await rest()
    assert not any(task.done() for task in tasks)
    slots.clock.advance(0.2)
    turns.let_in()
    await rest()
    assert [task.done() for task in tasks] == [True, True, False], "as many as the worker has slots"
    for name in "ab":
        slots.in_use.add("d0", need(name).adapter_id)
        turns.leave(need(name))
    turns.let_in()
    await rest()
    assert not tasks[2].done()
    slots.in_use.remove("d0", need("a").adapter_id)
    await rest()
    assert tasks[2].done()
    turns.leave(need("c"))


def test_the_lease_counts_for_what_other_routers_run_and_not_for_what_has_just_ended_here() -> None:
    clock = FakeClock()
    in_use = AdaptersInUse(clock.now)

    def record(**adapters: int) -> Any:
        load = WorkerLoad(adapters={name * 32: count for name, count in adapters.items()})
        return worker_record("d0", load=load, max_loras=2, max_lora_rank=8)

    assert in_use.running(record(a=1, b=0)) == {"a" * 32}
    in_use.add("d0", "c" * 32)
    assert in_use.running(record(a=1)) == {"a" * 32, "c" * 32}
    in_use.remove("d0", "c" * 32)
    assert in_use.running(record(a=1, c=1)) == {"a" * 32}, "the lease is older than the end"
    clock.advance(OWN_S + 0.1)
    assert in_use.running(record(a=1, c=1)) == {"a" * 32, "c" * 32}, "another router's"
