"""Admission in the simulated cluster, whose every decision is the router's code: five times what it can serve."""

import dataclasses

import pytest

from diptych.bench.router.overload import LOADS, MODEST, capacity, is_good, requests, run, wrong_refusals

NAMES = {load.name: load for load in LOADS}


@pytest.mark.parametrize("name", NAMES)
def test_no_refused_request_would_have_been_in_time(name):
    load = NAMES[name]
    rate = capacity(load)
    trace = requests(load, [(1.0, 0.5 * rate), (4.0, 5.0 * rate)], 11)
    outcomes = run(load, trace)
    assert any(outcome.refused for outcome in outcomes)
    assert wrong_refusals(load, trace, outcomes, 2, 11) == []


def test_the_check_finds_a_wrong_refusal(monkeypatch):
    """It can fail: with a bound four times as high, requests are refused that would have been in time."""
    monkeypatch.setattr("diptych.router.fairness.prompt_speeds.HEADROOM", 0.1)
    load = NAMES["target"]
    trace = requests(load, [(3.0, 0.5 * capacity(load)), (5.0, 1.5 * capacity(load))], 11)
    assert wrong_refusals(load, trace, run(load, trace), 20, 11) != []


def test_accepted_requests_keep_their_target_and_a_modest_tenant_is_unharmed():
    load = NAMES["target, a modest tenant"]
    rate = capacity(load)
    trace = requests(load, [(4.0, 0.5 * rate), (10.0, 5.0 * rate)], 12)

    def part(outcomes, tenant):
        found = [o for o in outcomes if (o.request.tenant == MODEST) == tenant and o.request.at > 6.0]
        return sum(is_good(load, o) for o in found), sum(o.ttft_s > 0 for o in found), len(found)

    on, off = run(load, trace), run(load, trace, admission="off")
    good, accepted, _ = part(on, False)
    assert good >= 0.9 * accepted
    assert good >= 0.9 * rate * 8.0  # of what the workers can compute in that time
    assert good > 2 * part(off, False)[0]
    good, _, sent = part(on, True)
    assert good == sent


def test_19_requests_on_standby_harm_no_longer_one():
    """Prompts of 32 to 8,000 tokens: short ones that will be late anyway do not pass long ones that are placed."""
    load = NAMES["target, mixed lengths"]
    rate = capacity(load)
    trace = requests(load, [(10.0, 0.5 * rate), (20.0, 5.0 * rate), (20.0, 0.5 * rate)], 1)
    outcomes = run(load, trace, surge_ends=30.0)
    accepted = [o for o in outcomes if o.ttft_s > 0 and 15.0 <= o.request.at < 30.0]
    assert len(accepted) > 40
    assert sum(is_good(load, o) for o in accepted) >= 0.95 * len(accepted)


def test_shadow_refuses_none():
    load = NAMES["target"]
    trace = requests(load, [(6.0, 5.0 * capacity(load))], 13)
    outcomes = run(load, trace, admission="shadow")
    assert not any(outcome.refused for outcome in outcomes)
    assert sum(outcome.ttft_s > 0 for outcome in outcomes) == len(trace)


def test_requests_without_a_near_deadline_wait_and_are_never_refused():
    load = dataclasses.replace(NAMES["target"], target_s=0.0)
    trace = requests(load, [(6.0, 5.0 * capacity(load))], 14)
    on, off = run(load, trace), run(load, trace, admission="off")
    assert [(o.request.number, o.ttft_s) for o in on] == [(o.request.number, o.ttft_s) for o in off]
