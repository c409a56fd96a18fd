from __future__ import annotations

import math
from dataclasses import replace

import pytest

from diptych.common.sampling import SamplingParams
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import Admitted, Finished, KvMode
from diptych.engine.sched.lifecycle.swap_cost import (
    Rates,
    break_even_copy_bytes_per_s,
    break_even_tokens,
    describe,
    restore_is_cheaper,
    swap_is_cheaper,
)


def submit(engine, *requests):
    for request in requests:
        engine.send(request)


def order_of(events, kind=Admitted):
    return [e.attempt for e in events if isinstance(e, kind)]


def test_priority_goes_first_and_equals_come_in_turn(kit):
    engine = kit.make_engine(scheduling_policy="priority", max_num_seqs=1)
    requests = [kit.make_request(f"{p}{i}", 6, 2, priority=p) for i, p in enumerate([5, 1, 5, 0, 1])]
    submit(engine, *requests)
    assert order_of(kit.run_until_idle(engine)) == ["03", "11", "14", "50", "52"]


def test_fcfs_does_not_look_at_priorities(kit):
    engine = kit.make_engine(scheduling_policy="fcfs", max_num_seqs=1)
    submit(engine, *[kit.make_request(f"{p}", 6, 2, priority=p) for p in (5, 1, 3)])
    assert order_of(kit.run_until_idle(engine)) == ["5", "1", "3"]


@pytest.mark.parametrize("shortage", ["blocks", "places"])
def test_a_more_important_request_takes_what_a_lesser_one_holds(kit, shortage):
    limits = {"num_blocks": 8} if shortage == "blocks" else {"max_num_seqs": 1}
    engine = kit.make_engine(scheduling_policy="priority", **limits)
    slow = kit.make_request("slow", 20, 10, priority=9)
    submit(engine, slow)
    for _ in range(3):
        engine.step()
    submit(
        engine, kit.make_request("equal", 20, 2, priority=9), kit.make_request("urgent", range(500, 520), 2, priority=1)
    )
    events = kit.run_until_idle(engine)
    assert order_of(events, Finished)[0] == "urgent"
    assert order_of(events) == ["urgent", "equal"]
    assert engine.stats().preemptions_total >= 1
    [alone] = kit.make_engine().generate([slow])
    assert kit.tokens_of(events, "slow") == alone.token_ids[3:]


def test_what_cannot_help_is_not_preempted(kit):
    engine = kit.make_engine(scheduling_policy="priority", num_blocks=8)
    submit(engine, kit.make_request("same", 20, 4, priority=1), kit.make_request("low", 4, 4, priority=5))
    engine.step()
    submit(engine, kit.make_request("big", 24, 4, priority=1))
    kit.run_until_idle(engine)
    assert engine.stats().preemptions_total == 0


def test_shortest_job_first_and_nothing_starves(kit):
    engine = kit.make_engine(scheduling_policy="sjf", sjf_aging_tokens_per_s=10.0, max_num_seqs=1)
    clock = engine.clock
    submit(engine, kit.make_request("runs", 4, 4))
    engine.step()
    submit(engine, kit.make_request("long", 40, 10), kit.make_request("short", 5, 5))
    clock.advance(5.0)  # worth 50 tokens: more than the 40 that a newcomer's job is shorter
    submit(engine, kit.make_request("late", 5, 5))
    assert order_of(kit.run_until_idle(engine)) == ["short", "long", "late"]


def test_fair_share_serves_tenants_by_tokens_not_by_requests(kit):
    engine = kit.make_engine(scheduling_policy="fair", max_num_seqs=1)
    flood = [kit.make_request(f"f{i}", 10, 5, tenant="flood") for i in range(6)]
    submit(engine, *flood)
    engine.step()
    submit(engine, kit.make_request("q0", 10, 5, tenant="quiet"), kit.make_request("q1", 10, 5, tenant="quiet"))
    order = order_of(kit.run_until_idle(engine))
    assert order.index("q0") <= 1
    assert order.index("q1") <= 3


def test_a_tenant_that_was_away_has_not_saved_up(kit):
    engine = kit.make_engine(scheduling_policy="fair", max_num_seqs=1)
    submit(engine, kit.make_request("early", 4, 2, tenant="away"))
    kit.run_until_idle(engine)
    submit(engine, *[kit.make_request(f"f{i}", 40, 5, tenant="busy") for i in range(4)])
    for _ in range(12):
        engine.step()
    submit(engine, *[kit.make_request(f"w{i}", 40, 5, tenant="away") for i in range(4)])
    order = order_of(kit.run_until_idle(engine))
    assert order != sorted(order, key=lambda name: name[0] != "w")  # not all of its own first
    share = engine.core.scheduler.policy.share
    assert abs(share("busy", None) - share("away", None)) <= 2 * 50


@pytest.mark.parametrize("policy", ["sojourn", "fcfs", "priority", "sjf", "fair"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_seven_blocks_and_two_that_grow_make_progress(kit, policy, mode):
    host = 8 if mode == "swap" else 0
    engine = kit.make_engine(
        FakeRunner(7, kit.BLOCK, num_host_blocks=host),
        num_blocks=7,
        num_host_blocks=host,
        preemption_mode=mode,
        scheduling_policy=policy,
    )
    requests = [kit.make_request("a", 9, 18, tenant="x"), kit.make_request("b", [7] * 9, 18, tenant="y", priority=-1)]
    submit(engine, *requests)
    events = kit.run_until_idle(engine, 400)
    assert sorted(order_of(events, Finished)) == ["a", "b"]
    for request in requests:
        assert kit.tokens_of(events, request.attempt) == kit.undisturbed([request])[request.attempt]
    assert engine.core.scheduler.kv.pool.counts.running == 0


@pytest.mark.parametrize("policy", ["sojourn", "fcfs", "priority", "sjf", "fair"])
def test_remote_requests_wait_in_the_same_order(kit, policy):
    engine = kit.make_engine(scheduling_policy=policy, max_num_seqs=1)
    submit(engine, kit.make_request("local", 6, 2), kit.make_request("remote", 6, 2, mode=KvMode.REMOTE))
    events = kit.run_until_idle(engine)
    assert order_of(events) == ["local", "remote"]


def test_a_long_prompt_leaves_room_for_others(kit):
    engine = kit.make_engine(long_prefill_token_threshold=4, max_num_batched_tokens=16)
    submit(engine, kit.make_request("long", 40, 2), kit.make_request("short", 8, 2))
    events = kit.run_until_idle(engine)
    assert order_of(events, Finished) == ["short", "long"]


# ---- recompute or swap ----


RATES = Rates(prefill_tokens_per_s=1000.0, copy_bytes_per_s=1e9, kv_bytes_per_token=50_000)


def test_the_break_even_is_where_the_choice_flips():
    tokens = break_even_tokens(RATES)
    assert not swap_is_cheaper(math.floor(tokens), RATES)
    assert swap_is_cheaper(math.floor(tokens) + 1, RATES)
    rate = break_even_copy_bytes_per_s(RATES)
    assert rate == 2 * 50_000 * 1000
    assert not swap_is_cheaper(10**6, replace(RATES, copy_bytes_per_s=rate * 0.99))
    assert swap_is_cheaper(10**6, replace(RATES, copy_bytes_per_s=rate * 1.01))
    assert break_even_tokens(replace(RATES, copy_bytes_per_s=rate)) == math.inf
    assert restore_is_cheaper(10**6, replace(RATES, copy_bytes_per_s=rate * 0.6))


@pytest.mark.parametrize(
    ("copy_rate", "mode", "words"),
    [
        (1e9, "auto", "swapped out from"),
        (1e7, "auto", "a swap would pay above 0.10 GB/s"),
        (1e9, "swap", "preemption_mode=swap"),
        (1e9, "recompute", "preemption_mode=recompute"),
        (0.0, "auto", "no host tier"),
    ],
)
def test_the_choice_is_told_in_words(copy_rate, mode, words):
    assert words in describe(replace(RATES, copy_bytes_per_s=copy_rate), mode=mode)


@pytest.mark.parametrize(("copy_rate", "swaps"), [(1.0, False), (1e12, True)])
def test_measured_cost_decides(kit, copy_rate, swaps):
    engine = kit.make_engine(
        FakeRunner(7, kit.BLOCK, num_host_blocks=16),
        num_blocks=7,
        num_host_blocks=16,
        initial_copy_bytes_per_s=copy_rate,
    )
    submit(engine, kit.make_request("a", 6, 14), kit.make_request("b", 7, 14))
    kit.run_until_idle(engine)
    stats = engine.stats()
    assert stats.preemptions_total > 0
    assert (stats.swaps_total > 0) is swaps


def test_a_full_host_tier_means_recompute(kit):
    engine = kit.make_engine(
        FakeRunner(7, kit.BLOCK, num_host_blocks=1), num_blocks=7, num_host_blocks=1, preemption_mode="swap"
    )
    requests = [kit.make_request("a", 6, 14), kit.make_request("b", 7, 14)]
    submit(engine, *requests)
    events = kit.run_until_idle(engine)
    assert engine.stats().swaps_total == 0
    for request in requests:
        assert kit.tokens_of(events, request.attempt) == kit.undisturbed([request])[request.attempt]


def test_nan_fails_its_own_request_with_all_its_choices(kit):
    runner = FakeRunner(64, kit.BLOCK)
    engine = kit.make_engine(runner)
    several = SamplingParams(max_tokens=9, ignore_eos=True, n=3)
    submit(engine, kit.make_request("bad", 6, sampling=several), kit.make_request("good", 6, 9))
    engine.step()
    engine.step()
    runner.bad_attempts.add("bad")
    events = kit.run_until_idle(engine)
    [end] = kit.ends_of(events, "bad")
    assert "unusable" in end.error.message
    assert isinstance(kit.ends_of(events, "good")[0], Finished)
    assert engine.core.scheduler.requests == {}
    assert engine.core.scheduler.live.num_groups == 0
    assert engine.core.scheduler.kv.pool.counts.running == 0
