"""Item 2.2: gate, placement and workers together, in virtual time: a short request beside any mix of long ones."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diptych.bench.router.simulation import SimConfig, Simulation
from diptych.bench.router.trace import HEADER, TraceRequest
from diptych.common.block_identity import block_keys
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.policies import policy_by_name

RATE = 250.0
STEP_S = 0.5


def request(number, at, tokens, tenant):
    keys = tuple(block_keys(HEADER, [1000 * number + i for i in range(tokens)]))
    return TraceRequest(number, number, at, tokens, 1, keys, as_keys(keys), keys, tenant)


def simulated(requests, num_prefill):
    config = SimConfig(
        num_prefill=num_prefill, num_decode=1, prefill_tokens_per_s=RATE, max_step_s=STEP_S, local_prefill_max_tokens=0
    )
    simulation = Simulation(config, policy_by_name("cost"), 1)
    trace = sorted(requests, key=lambda one: one.at)
    return {outcome.request.number: outcome for outcome in simulation.run(trace)}


def bound_s(short, others):
    """Upper bound of a request's wait: the running step, its own step, and of every other prompt at most as many tokens
    as it has itself, but of another tenant's prompts no more than an equal share."""
    before = 0
    tenants = {one.tenant for one in others}
    own = short.num_tokens + sum(min(one.num_tokens, short.num_tokens) for one in others if one.tenant == short.tenant)
    for tenant in tenants - {short.tenant}:
        before += min(own, sum(one.num_tokens for one in others if one.tenant == tenant))
    return 2 * STEP_S + (own + before) / RATE + 0.3


@given(
    num_prefill=st.integers(1, 4),
    longs=st.lists(
        st.tuples(st.floats(0, 20), st.integers(1000, 8000), st.sampled_from(["me", "b", "c"])), min_size=1, max_size=10
    ),
    tokens=st.integers(1, 900),
    at=st.floats(0, 25),
)
@example(num_prefill=1, longs=[(0.0, 1000, "me"), (0.0, 1000, "me")], tokens=250, at=0.0)
@example(num_prefill=1, longs=[(0.0, 8000, "me"), (0.0, 8000, "me")], tokens=260, at=0.0)
@example(num_prefill=2, longs=[(0.0, 8000, "me")] * 4, tokens=900, at=1.0)
@settings(max_examples=20, deadline=None)
def test_a_short_request_beside_any_mix_of_long_ones(num_prefill, longs, tokens, at):
    others = [request(number, when, size, tenant) for number, (when, size, tenant) in enumerate(longs)]
    short = request(100, at, tokens, "me")
    found = simulated([*others, short], num_prefill)
    assert found[100].ttft_s <= bound_s(short, others)
    for one in others:  # and none starves: together they take no longer than on one worker
        assert found[one.number].ttft_s <= 30 + sum(o.num_tokens for o in others) / RATE * 1.5


def test_a_tenant_whose_long_prompt_passed_waits_with_its_short_ones():
    """Tenant c fills its own window on both workers and waits. The long prompt of "me" passes it and is charged. Its short
    request then waits in the router for 5.7 s until c has room, although it would take nothing from c."""
    longs = [(0.0, 6053, "c"), (0.0, 6053, "c"), (2.0, 7999, "me"), (0.0, 6053, "c")]
    others = [request(number, when, size, tenant) for number, (when, size, tenant) in enumerate(longs)]
    short = request(100, 17.0, 1, "me")
    assert simulated([*others, short], 2)[100].ttft_s <= bound_s(short, others)


@pytest.mark.parametrize("tenant", ["me", "other"])
@pytest.mark.parametrize(("num_prefill", "size"), [(1, 3000), (2, 6000)])
def test_one_token_beside_one_long_prompt(num_prefill, size, tenant):
    """11.9 s beside 3,000 tokens, 52.7 s beside 6,000 with the second prefill idle: as it was."""
    found = simulated([request(0, 0.0, size, tenant), request(1, 1.0, 1, "me")], num_prefill)
    assert found[1].ttft_s < 2 * STEP_S
