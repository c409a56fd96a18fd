"""Random lives of requests over the slots of adapters, without an engine: every row has its own adapter at every step, the
account is right, and no request waits longer than for what was there before it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from diptych.engine.fake_runner import FakeAdapter
from diptych.engine.sched.adapters import AdapterSlots

NAMES = tuple("abcdef")


class Machine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 3))
    def begin(self, num_slots):
        self.slots = AdapterSlots(num_slots, lambda request: (request.arrival,), most_in_turn=2)
        self.num_slots = num_slots
        self.device: dict[int, str] = {}
        self.waiting: list[SimpleNamespace] = []
        self.running: list[SimpleNamespace] = []
        self.known: set[str] = set()
        self.arrivals = 0
        for name in NAMES[:4]:
            self.keep(name)

    def arrive(self, name, arrival=None):
        self.arrivals += 1
        request = SimpleNamespace(
            attempt=f"r{self.arrivals}",
            arrival=self.arrivals if arrival is None else arrival,
            adapter=name,
            seq=SimpleNamespace(adapter=-1),
        )
        self.slots.enter(request)
        return request

    @rule(name=st.sampled_from(NAMES))
    def keep(self, name):
        self.slots.keep(FakeAdapter(name, num_bytes=3, num_parts=3))
        self.known.add(name)

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name):
        self.slots.drop(name)
        self.known.discard(name)

    @rule(data=st.data(), count=st.integers(1, 4))
    def add(self, data, count):
        for _ in range(count):
            name = data.draw(st.sampled_from(["", *sorted(self.known)]))
            self.slots.check(name)
            self.waiting.append(self.arrive(name))

    @rule(room=st.integers(0, 5), budget=st.sampled_from([None, 0, 1, 4]))
    def step(self, room=5, budget=None):
        """As Scheduler.admit, in the order of arrival."""
        self.slots.begin_step(budget)
        while room:
            request = next((one for one in self.waiting if not self.slots.is_stuck(one)), None)
            if request is None:
                break
            if not self.slots.may_run(request):
                assert self.slots.is_stuck(request)
                continue
            room -= 1
            self.slots.take(request)
            self.waiting.remove(request)
            self.running.append(request)
        installs = self.slots.take_installs()
        assert budget is None or sum(one.num_bytes for one in installs) <= max(budget, 1)
        for one in installs:
            held = self.device.get(one.slot, "") if one.parts.start else ""
            assert held == one.adapter.id * one.parts.start, "part after part"
            self.device[one.slot] = one.adapter.id * one.parts.stop
        for request in self.running:
            adapter = request.adapter
            assert (request.seq.adapter >= 0) == bool(adapter)
            assert not adapter or self.device[request.seq.adapter] == adapter * 3

    @rule(data=st.data())
    def fork(self, data):
        if self.running:
            parent = data.draw(st.sampled_from(self.running))
            other = self.arrive(parent.adapter, parent.arrival)
            self.slots.fork(parent, other)
            self.running.append(other)

    @rule(data=st.data())
    def end(self, data):
        if alive := self.waiting + self.running:
            request = data.draw(st.sampled_from(alive))
            self.slots.leave(request)
            (self.waiting if request in self.waiting else self.running).remove(request)

    @rule(data=st.data())
    def preempt(self, data):
        if self.running:
            request = data.draw(st.sampled_from(self.running))
            self.slots.give(request)
            self.running.remove(request)
            self.waiting = sorted([*self.waiting, request], key=lambda one: one.arrival)

    @rule(data=st.data())
    def nobody_waits_for_those_behind_it(self, data):
        """While younger requests for what is resident keep coming, the first that waits starts: once those that ran, and those of
        the turns, have ended."""
        self.step()
        if not self.waiting:
            return
        first = self.waiting[0]
        for _ in range(2 * (len(self.running) + len(self.waiting)) + 4 * self.num_slots):
            if self.running:
                self.slots.leave(self.running.pop(0))
            for name in self.slots.stats().resident:
                if name in self.known:
                    self.waiting.append(self.arrive(name))
            self.step(budget=data.draw(st.sampled_from([None, 1])))
            if first in self.running:
                return
        for _ in range(3 * self.num_slots):
            self.step(budget=1)  # until it is installed
        assert first in self.running, (first, self.slots.stats())

    @invariant()
    def the_account_is_right(self):
        if not hasattr(self, "slots"):
            return
        assert self.slots.violations([*self.waiting, *self.running], self.running) == []
        stats = self.slots.stats()
        assert len(stats.resident) <= self.num_slots
        assert sum(count for _, count in stats.running) == sum(bool(r.adapter) for r in self.running)
        if (wants := self.slots._wanting) and not set(wants) <= {
            claim.adapter for claim in self.slots._claims.values()
        }:
            assert len(self.slots._claims) == self.num_slots, (
                "those that want a slot claim one, as long as there are any"
            )
        for name in set(self.slots._stuck):
            first = next((one for one in self.waiting if one.adapter == name), None)
            if first is not None:
                awake = copy.deepcopy(self.slots)
                assert not awake.may_run(first), f"{first.attempt} was not asked again"
        named = {request.adapter for request in self.waiting + self.running}
        assert set(stats.resident) <= self.known | named, "what was dropped and is not used is gone"

    def teardown(self):
        if not hasattr(self, "slots"):
            return
        for _ in range(len(self.waiting) + len(self.running) + 1):
            self.step()
            for request in self.running:
                self.slots.leave(request)
            self.running.clear()
        assert not self.waiting, "with nothing running the first that waits may run"
        for name in NAMES:
            self.slots.drop(name)
        assert self.slots.stats().resident == ()


def test_slots_and_waiting_requests_over_random_lives():
    run_state_machine_as_test(Machine, settings=settings(max_examples=80, stateful_step_count=40, deadline=None))


def test_a_free_slot_waits_for_the_older_adapter_that_has_claimed_it():
    """Whatever order the policy asks in."""
    machine = Machine()
    machine.begin(num_slots=1)
    running, older, younger = (machine.arrive(name) for name in "abc")
    machine.slots.begin_step(None)
    assert machine.slots.may_run(running)
    machine.slots.take(running)
    assert not machine.slots.may_run(older)
    machine.slots.leave(running)
    assert not machine.slots.may_run(younger)
    assert machine.slots.may_run(older)
    machine.slots.leave(older)
    assert not machine.slots.is_stuck(younger)
    assert machine.slots.may_run(younger), "the claim has gone with it"


def test_a_turn_serves_those_that_waited_when_the_slot_was_given():
    """Drill: with 64 adapters on 8 slots every request had its adapter installed for itself, and 8 ran at a time."""
    machine = Machine()
    machine.begin(num_slots=1)
    machine.waiting = [machine.arrive(name) for name in "abaaca"]
    machine.step(room=2)
    late = machine.arrive("a")
    machine.waiting.append(late)
    machine.step()
    assert [one.attempt for one in machine.running] == ["r1", "r3", "r4"], "the first, and two past b's claim"
    for request in machine.running:
        machine.slots.leave(request)
    machine.running.clear()
    machine.step()
    assert [one.attempt for one in machine.running] == ["r2"]
    assert machine.slots.stats().installs == 2
