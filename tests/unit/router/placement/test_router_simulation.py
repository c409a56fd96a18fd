import random
from dataclasses import replace

import numpy as np
import pytest

from diptych.bench.router.claims import AGENTS, OTHERS, compare
from diptych.bench.router.hot_prefix import FIT, STEP_S, alternating, first_to_begin
from diptych.bench.router.overload import Load, requests
from diptych.bench.router.pulls import summary as pulls_summary
from diptych.bench.router.pulls import traces
from diptych.bench.router.quality import COPIES, HINTS, PULLS, TREE, run, summary
from diptych.bench.router.simulation import SimConfig, Simulation
from diptych.bench.router.trace import BLOCK_SIZE, TraceConfig, make_trace, merged, with_adapters
from diptych.loadtest.reports.svg import bars
from diptych.router.placement import cost
from diptych.router.placement.adapters import AdapterNeed
from diptych.router.placement.policies import POLICIES, policy_by_name


@pytest.fixture(scope="module")
def trace():
    return make_trace(TraceConfig(seed=3, duration_s=8.0, sessions_per_s=3.0))


def test_the_trace_is_seeded_ordered_and_shares_prefixes(trace):
    again = make_trace(TraceConfig(seed=3, duration_s=8.0, sessions_per_s=3.0))
    assert [(r.at, r.num_tokens, r.keys) for r in again] == [(r.at, r.num_tokens, r.keys) for r in trace]
    assert [r.at for r in trace] == sorted(r.at for r in trace)
    by_session = {}
    for request in trace:
        assert len(request.keys) == request.num_tokens // BLOCK_SIZE
        before = by_session.get(request.session)
        assert before is None or request.keys[: len(before)] == before
        by_session[request.session] = request.later_keys
    assert len({request.keys[0] for request in trace}) < len(by_session)


def test_placement_by_cost_finds_the_caches_and_its_predictions_hold(trace):
    ours, chance = (summary(run(name, trace, SimConfig())) for name in ("cost", "random"))
    assert ours["hit_rate"] > chance["hit_rate"] + 0.1
    assert ours["ttft_p99_s"] * 1.5 < chance["ttft_p99_s"]
    assert ours["hit_prediction_error"] < 0.01


def test_pulls_save_compute_and_time_to_first_token(trace):
    with_pulls, without = (summary(run(name, trace, SimConfig())) for name in (PULLS, "cost"))
    assert with_pulls["hit_rate"] > without["hit_rate"]
    assert with_pulls["ttft_p50_s"] < 0.95 * without["ttft_p50_s"]
    assert with_pulls["ttft_p95_s"] <= without["ttft_p95_s"]
    assert with_pulls["hit_prediction_error"] < 0.01


def test_hints_after_answers_bring_their_kv_to_prefill_before_the_next_turn():
    trace, config = traces(1)["agents"]
    of_turns = {name: run(name, trace, config) for name in (PULLS, HINTS)}
    assert {len(outcomes) for outcomes in of_turns.values()} == {len(trace)}, "hints are no requests of the trace"
    pulls, hints = (pulls_summary(outcomes, config) for outcomes in of_turns.values())
    assert hints["later_ttft_floor_p50_s"] < hints["later_ttft_p50_s"] < 0.95 * pulls["later_ttft_p50_s"]
    assert hints["recomputed"] < 0.2 * pulls["recomputed"]


def test_requests_do_not_wait_for_kv_blocks_beside_a_worker_that_has_some(monkeypatch):
    """A small pool beside a large one: sequences alone would be spread evenly."""
    trace = requests(Load("long", prompt=(200, 6000), answer=(200, 800)), [(15.0, 6.0)], seed=1)
    config = SimConfig(num_decode=2, decode_blocks=(1500, 15_000), prefill_tokens_per_s=16_000.0)
    ours = summary(run("cost", trace, config))
    monkeypatch.setattr(cost, "TOKENS_LEFT", 0)
    without = summary(run("cost", trace, config))
    assert ours["ttft_p95_s"] < 0.4 * without["ttft_p95_s"]
    assert ours["ttft_p50_s"] <= without["ttft_p50_s"]


def test_turns_keep_a_tenant_with_ten_times_the_chats_from_the_others():
    trace = merged(
        {
            "greedy": make_trace(TraceConfig(seed=3, duration_s=5.0, sessions_per_s=10.0)),
            "modest": make_trace(TraceConfig(seed=4, duration_s=5.0, sessions_per_s=1.0)),
        }
    )
    assert [request.number for request in trace] == list(range(len(trace)))
    config = SimConfig(num_prefill=2, num_decode=2, prefill_tokens_per_s=800.0)
    outcomes = run("cost", trace, config)
    assert len(outcomes) == len(trace)
    p50 = {
        tenant: summary([o for o in outcomes if o.request.tenant == tenant])["ttft_p50_s"]
        for tenant in ("greedy", "modest")
    }
    assert p50["modest"] < 1.5
    assert p50["modest"] * 5 < p50["greedy"]


def test_adapters_stay_with_workers_that_have_them_and_share_their_slots(trace):
    """Nine adapters on two slots of each worker, beside the base model: by cost there are fewer loads than at random."""
    needs = [AdapterNeed(f"{i:032x}", 16, 20_000_000) for i in range(9)]
    named = with_adapters(trace, [None, *needs])
    assert {request.adapter for request in named} > {None}
    config = SimConfig(max_loras=2, max_cpu_loras=4)
    loads = {}
    for name in ("cost", "random"):
        simulation = Simulation(config, policy_by_name(name))
        outcomes = simulation.run(named)
        assert len(outcomes) == len(named)
        assert all(outcome.ttft_s > 0 and outcome.finished_s > 0 for outcome in outcomes), "none waits for ever"
        workers = simulation.adapters
        assert all(one.most_running <= 2 for one in workers)
        assert all(not any(one.counts().values()) for one in workers), "nothing is held at the end"
        assert all(one.installs <= len(named) for one in workers)
        loads[name] = sum(one.loads for one in workers)
    assert 0 < loads["cost"] < 0.7 * loads["random"], loads


@pytest.mark.parametrize("name", [*POLICIES, TREE, COPIES, PULLS])
def test_every_policy_serves_everything(name, trace):
    outcomes = run(name, trace[:40], SimConfig())
    assert len(outcomes) == 40
    assert all(outcome.ttft_s > 0 for outcome in outcomes)


def test_bars_are_drawn_for_every_name():
    picture = bars([("a < b", {"x": 1.0, "y": 2.0}), ("c", {"x": 0.0})], columns=2)
    assert picture.count("<rect") == 4
    assert "a &lt; b" in picture


def test_claims_keep_the_caches_of_agents_that_pause_and_cost_the_others_little():
    shorter = {"of_agents": replace(AGENTS, duration_s=30.0), "of_others": replace(OTHERS, duration_s=130.0)}
    without, claimed = (compare(1, share, **shorter) for share in (None, SimConfig().claim_share))
    assert claimed["agents"]["hit_rate"] > without["agents"]["hit_rate"] + 0.08
    assert claimed["agents"]["ttft_p99_s"] < 0.8 * without["agents"]["ttft_p99_s"]
    assert claimed["others"]["hit_rate"] > without["others"]["hit_rate"] - 0.02


def test_a_hot_document_waits_least_where_the_steps_of_its_workers_alternate():
    alone = [STEP_S * (1 + 3 * i) for i in range(4)]
    assert first_to_begin(alone) == pytest.approx([STEP_S] * 4)
    # One more than a step takes, just after both workers began one: it waits for the second worker, or its next step.
    burst = [0.0, 0.0, *[0.001] * (2 * FIT), 0.002]
    assert first_to_begin(burst)[-1] == pytest.approx(3 * STEP_S - 0.002)
    assert sorted(round(t, 3) for t in first_to_begin(burst)[:3]) == [0.02, 0.02, 0.039]
    assert alternating([0.001] * (FIT + 1)) == pytest.approx([*[STEP_S * 1.5 - 0.001] * FIT, 2 * STEP_S - 0.001])
    rng, at, arrivals = random.Random(1), 0.0, []
    for _ in range(20_000):
        at += rng.expovariate(2 * FIT / STEP_S / 2)
        arrivals.append(at)
    bound, known = (np.percentile(rule(arrivals), 99) / STEP_S for rule in (alternating, first_to_begin))
    assert 1.48 < bound < 1.52 < known < 1.75
