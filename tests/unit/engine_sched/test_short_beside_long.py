"""A short prompt does not wait for a long one: not for its computing, and not for its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.common.equal_shares import EqualShares
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import Admitted, Finished, KvMode, PrefillComplete, TokensOut

BUDGET = 16


@dataclass
class Fluid:
    """All at once, a token at a time: the model that `EqualShares` computes in closed form."""

    left: dict[tuple[str, str], float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    done: float = 0.0

    def compute(self, tokens):
        while tokens > 1e-9 and self.left:
            tenants = {tenant for tenant, _ in self.left}
            rates = {k: 1 / len(tenants) / sum(t == k[0] for t, _ in self.left) for k in self.left}
            step = min(tokens, min(left / rates[k] for k, left in self.left.items()))
            tokens, self.done = tokens - step, self.done + step
            for k, rate in rates.items():
                self.left[k] -= step * rate
            for k in [k for k, left in self.left.items() if left < 1e-6]:
                self.ended[k[1]] = self.done
                del self.left[k]


arrivals = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from("abc"), st.one_of(st.integers(1, 6), st.integers(1, 200))),
    min_size=1, max_size=12,
)  # fmt: skip


@given(arrivals)
@settings(max_examples=300, deadline=None)
def test_shares_end_when_the_fluid_does(arrivals):
    shares, fluid = EqualShares(), Fluid()
    for number, (wait, tenant, tokens) in enumerate(sorted(arrivals)):
        shares.computed(wait)
        fluid.compute(wait)
        shares.add(str(number), tenant, tokens)
        fluid.left[tenant, str(number)] = tokens
    order = sorted(map(str, range(len(arrivals))), key=shares.due)
    fluid.compute(10**6)
    ends = [fluid.ended[name] for name in order]
    assert ends == pytest.approx(sorted(ends), abs=1e-3)
    shares.computed(10**6)
    assert shares.due("0") == pytest.approx(shares.due(order[0]), abs=10**6)
    for name in order:
        shares.forget(name)
    assert len(shares) == 0


@given(arrivals, st.sampled_from("abcd"), st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_what_a_new_request_would_wait_for_is_what_the_fluid_computes_before_it(arrivals, tenant, tokens):
    """Item 2.2: the router places prompts by it."""
    shares, fluid = EqualShares(), Fluid()
    for number, (wait, whose, size) in enumerate(sorted(arrivals)):
        shares.computed(wait)
        fluid.compute(wait)
        shares.add(str(number), whose, size)
        fluid.left[whose, str(number)] = size
    before, done = shares.before(tenant, tokens), fluid.done
    fluid.left[tenant, "new"] = tokens
    fluid.compute(10**6)
    assert before + tokens == pytest.approx(fluid.ended["new"] - done, abs=1e-3)


@given(arrivals)
@settings(max_examples=100, deadline=None)
def test_nobody_is_later_than_in_equal_shares_but_for_one_step(kit, arrivals):
    """Item 2.2: mixes of long and short prompts of three tenants, arriving while others are computed. Each has its first token
    no later than if all were computed at once, but for the step that runs when it comes and the one that it ends in."""
    # Room for 12 prompts of 200 tokens: every step looks through all blocks.
    engine = kit.make_engine(num_blocks=640, max_num_batched_tokens=BUDGET, enable_prefix_caching=False)
    engine.core.scheduler.throughput.rate = 1.0  # a step that ends a prompt takes nothing of others
    fluid, computed, first = Fluid(), 0, {}
    due = sorted(arrivals, key=lambda arrival: arrival[0])
    number = step = 0
    while len(first) < len(due):
        while number < len(due) and due[number][0] <= step:
            _, tenant, tokens = due[number]
            request = kit.make_request(str(number), tokens, 1, tenant=tenant, mode=KvMode.PREFILL, want_kv=False)
            engine.send(request)
            fluid.left[tenant, str(number)] = tokens
            number += 1
        engine.core.step()
        step += 1
        now = engine.core.scheduler.outbox.totals.computed
        fluid.compute(now - computed)
        computed = now
        for event in engine.core.take_events():
            if isinstance(event, PrefillComplete):
                first[event.attempt] = computed
    fluid.compute(10**6)
    for name, at in first.items():
        # Steps that end a prompt are not filled up, so an arrival is up to a step, and chunks end on block borders.
        assert at <= fluid.ended[name] + 2 * BUDGET, (name, at, fluid.ended[name])


def test_one_token_beside_a_long_prompt_is_in_the_next_step(kit):
    for tenant in ("other", "own"):
        engine = kit.make_engine(num_blocks=512, max_num_batched_tokens=BUDGET)
        engine.send(kit.make_request("long", [9] * 1000, 1, tenant="own", mode=KvMode.PREFILL, want_kv=False))
        engine.core.step()
        engine.core.take_events()
        engine.send(kit.make_request("short", [7], 1, tenant=tenant, mode=KvMode.PREFILL, want_kv=False))
        engine.core.step()
        assert [e.attempt for e in engine.core.take_events() if isinstance(e, TokensOut)] == ["short"]


def test_a_step_that_ends_a_prompt_takes_little_of_a_long_one(kit):
    engine = kit.make_engine(num_blocks=512, max_num_batched_tokens=400)
    engine.core.scheduler.throughput.rate = 200.0  # 10 tokens in 50 ms
    engine.send(kit.make_request("long", [9] * 1000, 1))
    engine.send(kit.make_request("short", 3, 1))
    out = engine.core.scheduler
    engine.core.step()
    assert (out.requests["long"].num_computed, out.outbox.totals.computed) == (10, 3 + 10)


def grown(kit, **fields):
    """Two streams that outgrow the pool: one of them is preempted and waits."""
    engine = kit.make_engine(FakeRunner(16, kit.BLOCK), num_blocks=16, **fields)
    for name in "ab":
        engine.send(kit.make_request(name, [ord(name)] * 20, 40))
    events = []
    for _ in range(100):
        engine.core.step()
        events += engine.core.take_events()
        if engine.stats().preemptions_total:
            return engine, events
    raise AssertionError("nobody was preempted")


@pytest.mark.parametrize("tenant", ["", "other"])
def test_a_newcomer_passes_a_stream_that_lacks_blocks(kit, tenant):
    engine, _ = grown(kit)
    engine.send(kit.make_request("new", [5], 1, tenant=tenant))
    engine.core.step()
    engine.core.step()
    assert any(isinstance(e, Finished) and e.attempt == "new" for e in engine.core.take_events())
    events = kit.run_until_idle(engine)
    assert {e.attempt for e in events if isinstance(e, Finished)} == {"a", "b"}


def test_newcomers_without_end_do_not_starve_the_one_they_pass(kit):
    """They take nothing from it: it comes back at the step at which it would without them, and its tokens are the same."""
    ends = {}
    for crowd in (False, True):
        engine, events = grown(kit)
        step = 0
        while not any(isinstance(e, Finished) and e.attempt == "b" for e in events):
            if crowd:
                for i in range(2):
                    engine.send(kit.make_request(f"n{step}-{i}", [9, step % 250, i] * 3, 12, tenant="crowd"))
            engine.core.step()
            events += engine.core.take_events()
            step += 1
            assert step < 400
        ends[crowd] = (step, kit.tokens_of(events, "b"))
        if crowd:
            assert sum(isinstance(e, Admitted) for e in events) > 4
    assert ends[True][1] == ends[False][1]
    assert ends[True][0] <= 2 * ends[False][0]


def test_a_reservation_does_not_evict_what_it_is_about_to_read(kit):
    """Found by passing: blocks counted for a remote request were made room for over the host slots that it reads."""
    runner = FakeRunner(8, kit.BLOCK, num_host_blocks=3)
    engine = kit.make_engine(runner, num_blocks=8, num_host_blocks=3, initial_copy_bytes_per_s=1e12)
    wanted = kit.make_request("a", range(100, 113), 1)
    for request in (wanted, kit.make_request("b", range(500, 529), 1), kit.make_request("c", range(700, 729), 1)):
        engine.send(request)
        kit.run_until_idle(engine)
    tier = engine.core.scheduler.kv.host
    assert len(tier.keys) == 3
    request = kit.make_request("again", [*range(500, 512), *range(900, 917)], 1, mode=KvMode.REMOTE)
    engine.send(request)
    engine.core.scheduler.schedule(0.0)
    copies = engine.core.scheduler.take_copies()
    read = {c.src for c in copies if c.kind.value == "from_host"}
    written = {c.dst for c in copies if c.kind.value == "to_host"}
    assert not read & written
