import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.errors import ConfigError
from diptych.router.fairness.admission import SLACK_S, Admission, Calibration, FirstTokenLimit, Verdict
from diptych.router.fairness.capacity_gate import CapacityGate
from diptych.router.fairness.prompt_speeds import HEADROOM, MIN_SEEN, PromptSpeeds


def calibrated(admission, ratio=2.0, times=60, spread=0.0):
    chance = random.Random(1)
    for _ in range(times):
        admission.ttft.on_seen(0.1, 0.1 * ratio * math.exp(spread * chance.gauss(0, 1)))
        admission.tpot.on_seen(0.01, 0.01 * ratio)
    return admission


def test_the_band_follows_what_is_seen():
    calibration = Calibration()
    assert calibration.band(1.0) == (0.0, math.inf)
    assert calibration.safely(1.0) == 1.0
    chance = random.Random(2)
    for _ in range(3000):
        calibration.on_seen(0.2, 0.6 * math.exp(0.3 * chance.gauss(0, 1)))
    low, high = calibration.band(1.0)
    inside = sum(low <= 3.0 * math.exp(0.3 * chance.gauss(0, 1)) <= high for _ in range(2000)) / 2000
    assert low < 3.0 < high == calibration.safely(1.0)
    assert 0.85 < inside < 1.0
    for _ in range(200):  # the cluster became twice as fast
        calibration.on_seen(0.2, 0.3)
    assert calibration.band(1.0)[1] < 3.0


def test_only_the_bound_refuses_never_the_prediction():
    admission = calibrated(Admission("on"))
    assert admission.judge(0.9, 100.0, 1.0).verdict is Verdict.ADMITTED
    refused = admission.judge(1.1, 0.0, 1.0, retry_s=7.0)
    assert refused.verdict is Verdict.REFUSED
    assert (refused.error.http_status, refused.error.grpc_code, refused.error.retry_after_s) == (529, 8, 7.0)
    assert admission.judge(900.0, 0.0, 1.0).error.retry_after_s == 30.0
    assert admission.judge(1.1, 0.0, 1.0).error.retry_after_s == 0.5


def test_a_limit_is_the_target_or_the_deadline_and_leaves_time_for_the_answer():
    admission = Admission("on", max_ttft_s=2.0)
    assert admission.limit(10.0, 70.0, 100) == FirstTokenLimit(12.0, 12.0)
    assert admission.limit(10.0, 11.0, 100) == FirstTokenLimit(11.0, 11.0)
    plain = Admission("on")
    judgement = plain.judge(0.0, 0.0, 1.0)
    for _ in range(200):
        plain.on_answer(judgement, 51, 5.0)
    limit = plain.limit(10.0, 70.0, 100)
    assert (limit.at, limit.aim) == (70.0, pytest.approx(70.0 - 5.1))
    assert plain.limit(10.0, 70.0, 10).aim == pytest.approx(69.0)
    assert Admission("off").limit(10.0, 70.0, 100) is None


def test_the_pace_has_a_target_too():
    admission = calibrated(Admission("on", max_tpot_s=0.05))
    assert admission.judge(0.0, 0.1, 60.0, 0.02).verdict is Verdict.ADMITTED
    refused = admission.judge(0.0, 0.1, 60.0, 0.03)
    assert "a token every" in refused.error.message
    assert admission.judge(0.0, 0.1, 60.0, 0.0).verdict is Verdict.ADMITTED  # nothing is known of it


def test_shadow_mode_refuses_no_request_and_counts_wrong_refusals():
    admission = Admission("shadow")
    judgement = admission.judge(2.0, 2.0, 1.0, is_over=True)
    assert judgement.verdict is Verdict.WOULD_REFUSE
    assert admission.on_first_token(judgement, 0.9) is True
    assert admission.on_first_token(admission.judge(2.0, 2.0, 1.0), 5.0) is False
    assert admission.on_first_token(admission.judge(0.1, 0.1, 1.0), 0.2) is None


def test_off_says_nothing():
    assert Admission("off").judge(9.0, 9.0, 0.1).verdict is Verdict.ADMITTED


def test_one_refusal_is_tried_for_a_hundred_admitted_and_no_longer_than_its_limit():
    admission = Admission("on")
    assert admission.judge(9.0, 0.0, 1.0).verdict is Verdict.REFUSED
    for _ in range(100):
        admission.on_first_token(admission.judge(0.1, 0.1, 1.0), 0.1)
    assert admission.judge(9.0, 0.0, 1.0, is_over=True).verdict is Verdict.REFUSED
    assert admission.judge(9.0, 0.0, 1.0).verdict is Verdict.WOULD_REFUSE
    assert admission.judge(9.0, 0.0, 1.0).verdict is Verdict.REFUSED
    assert admission.judge(9.0, 0.0, 1.0, excused=True).verdict is Verdict.WOULD_REFUSE


def test_an_unknown_mode_is_named():
    with pytest.raises(ConfigError, match="admission"):
        Admission("maybe")


# ---- the least times ----------------------------------------------------------------------------------------------------


def seen(speeds, tokens, seconds, times=MIN_SEEN, worker="p0"):
    for _ in range(times):
        speeds.on_computed(worker, tokens, seconds)


def test_a_cold_predictor_has_no_bound():
    speeds = PromptSpeeds()
    assert (speeds.least_s(10**6), speeds.least_queue_s(10**9, 10, 2.0), speeds.expected_s(100)) == (0.0, 0.0, 0.0)
    speeds.set_rates({"p0": 1000.0}, {"p0": 1000.0, "d0": 500.0})
    assert speeds.least_s(10**6) == 0.0  # no prompt was seen yet
    seen(speeds, 100, 0.1)
    assert speeds.least_s(10**6) == 0.0  # none of this length
    assert speeds.least_s(100) == pytest.approx(0.1 / HEADROOM)
    seen(speeds, 10_000, 10.0)
    assert speeds.least_s(9_000) == pytest.approx(9.0 / HEADROOM)


def test_the_fastest_that_was_seen_counts_and_not_what_is_reported_now():
    speeds = PromptSpeeds()
    speeds.set_rates({"p0": 1000.0}, {"p0": 1000.0})
    seen(speeds, 1000, 2.0)  # most of it in a queue
    before = speeds.least_s(1000)
    speeds.set_rates({"p0": 10.0}, {"p0": 10.0})
    assert speeds.least_s(1000) == before == pytest.approx(1.0 / HEADROOM)
    speeds.on_computed("p0", 1000, 0.1)
    assert speeds.least_s(1000) == pytest.approx(0.1 / HEADROOM)
    speeds.set_rates({}, {})  # it may come back
    assert speeds.least_s(1000) == pytest.approx(0.1 / HEADROOM)


def test_a_queue_takes_at_least_what_all_workers_compute_beyond_their_windows():
    speeds = PromptSpeeds()
    speeds.set_rates({"p0": 1000.0, "p1": 1000.0}, {"p0": 1000.0, "p1": 1000.0})
    assert speeds.least_queue_s(5000, 500, 2.0) == 0.0
    assert speeds.least_queue_s(35_000, 500, 2.0) == pytest.approx(30_000 / 2000 / HEADROOM)


@given(
    rates=st.lists(st.floats(10.0, 1e5), min_size=1, max_size=4),
    tokens=st.integers(1, 50_000),
    slower=st.floats(1.0, 50.0),
    faster=st.floats(1.0, HEADROOM * 0.999),
)
def test_no_worker_beats_the_bound(rates, tokens, slower, faster):
    """However slow the prompts seen so far were, one that is computed up to HEADROOM faster is not below the bound."""
    speeds = PromptSpeeds()
    names = {f"p{i}": rate for i, rate in enumerate(rates)}
    speeds.set_rates(names, names)
    for name, rate in names.items():
        seen(speeds, tokens, slower * tokens / rate, worker=name)
    assert speeds.least_s(tokens) <= tokens / (max(rates) * faster)


# ---- the gate -----------------------------------------------------------------------------------------------------------


class Pool:
    """One worker with `speed`, and what each tenant has placed there."""

    def __init__(self, speed=1000.0):
        self.speed, self.placed, self.now = speed, {}, 0.0
        self.speeds = PromptSpeeds()
        self.speeds.set_rates({"p0": speed}, {"p0": speed})
        self.admission = Admission("on")
        self.let_in = []
        self.gate = CapacityGate(
            self.room,
            self.admit,
            window_s=2.0,
            placed=lambda tenant, above=0: self.placed.get(tenant, 0.0),
            tenants=lambda: [name for name, tokens in self.placed.items() if tokens],
            wait_s=lambda tenant, tokens, beside=0.0: (self.placed.get(tenant, 0.0) + beside + tokens) / self.speed,
            admission=self.admission,
            speeds=self.speeds,
            now=lambda: self.now,
        )

    def room(self, window_s, tenant, tokens, beside=0.0, *, doubtful=False):
        return self.placed.get(tenant, 0.0) + beside < window_s * self.speed

    def admit(self, entry):
        self.let_in.append(entry.item)
        return True

    def limit(self, within_s, certain=0):
        return FirstTokenLimit(self.now + within_s, self.now + within_s, certain)

    def wait(self, item, tokens, within_s, *, certain=0, tenant="t"):
        entry, decision = self.gate.wait(
            tenant, tokens, item, priority=0, limit=self.limit(within_s, certain), arrived=self.now
        )
        return entry, decision


def test_one_that_would_be_late_waits_though_there_is_room():
    pool = Pool()
    pool.placed["t"] = 1500.0
    assert pool.gate.may_pass("t", 100, pool.limit(2.0))
    assert not pool.gate.may_pass("t", 100, pool.limit(1.0))
    assert pool.gate.may_pass("t", 100)
    entry, _ = pool.wait("late", 100, 1.0)
    assert entry.standby
    pool.gate.let_in()
    assert pool.let_in == []
    pool.placed["t"] = 800.0  # it is in time after all
    pool.gate.let_in()
    assert pool.let_in == ["late"]


def test_one_on_standby_keeps_a_worker_from_being_idle():
    pool = Pool()
    pool.placed["t"] = 1500.0
    pool.wait("hopeless", 5000, 1.0)
    pool.gate.let_in()
    assert pool.let_in == []
    pool.placed["t"] = 0.0
    pool.gate.let_in()
    assert pool.let_in == ["hopeless"]


def test_19_a_worker_that_computes_a_longer_prompt_is_not_idle():
    """A short request on standby would be computed first, and be late all the same: the longer one would be late, too."""
    pool = Pool()
    long = 1500

    def room(window_s, tenant, tokens, beside=0.0, *, doubtful=False):
        before = pool.placed.get(tenant, 0.0) if tokens >= long else 0.0
        return before + beside < window_s * pool.speed

    pool.gate._room = room
    pool.placed["t"] = float(long)
    assert not pool.gate.may_pass("t", 100, pool.limit(0.05))
    assert pool.wait("short", 100, 0.05)[0].standby
    pool.gate.let_in()
    assert pool.let_in == []
    pool.placed["t"] = 0.0
    pool.gate.let_in()
    assert pool.let_in == ["short"]


def test_standby_goes_after_the_others_and_the_one_with_the_most_time_first():
    pool = Pool()
    pool.placed["t"] = 2000.0
    for item, within_s in (("a", 0.5), ("b", 1.5), ("c", 1.0)):
        assert pool.wait(item, 100, within_s)[0].standby
    assert not pool.wait("firm", 100, 60.0)[0].standby
    pool.placed["t"] = 0.0
    pool.gate.let_in()
    assert pool.let_in == ["firm", "b", "c", "a"]


def test_a_tenant_with_late_requests_only_holds_back_no_other_and_gets_no_credit():
    pool = Pool()
    pool.placed["late"] = pool.placed["other"] = 2500.0
    pool.wait("late", 4000, 1.0, tenant="late")
    for i in range(20):
        pool.wait(i, 1000, 600.0, tenant="other")
    pool.placed["other"] = 0.0
    pool.gate.let_in()
    assert pool.let_in == [0, 1]  # what passes counts against the window
    for entry in list(pool.gate._passing):
        pool.gate.arrived(entry)
    pool.gate.let_in()
    pool.placed["late"] = 0.0
    pool.wait("firm", 1000, 600.0, tenant="late")
    turn = pool.gate._turns.next()
    assert turn.tenant == "other" or turn.item == "firm"
    received = {name: flow.received for name, flow in pool.gate._turns._ranks[0].flows.items()}
    assert received["late"] >= received["other"] - 2000


def test_certain_work_before_it_refuses_and_unknown_work_does_not():
    pool = Pool()
    pool.placed["t"] = 2000.0
    for i in range(30):
        pool.wait(i, 1000, 600.0, certain=1000)
    entry, decision = pool.wait("cold", 1000, 5.0, certain=1000)
    assert decision.verdict is Verdict.ADMITTED  # no prompt of this length was computed yet
    pool.gate.leave(entry)
    seen(pool.speeds, 1000, 1.0)
    entry, decision = pool.wait("certainly late", 1000, 5.0, certain=1000)
    assert entry is None
    # 30,000 tokens less a window of 2 s and one prompt at 1.5 x 1000 a second, and its own second, less the slack
    assert decision.bound_s == pytest.approx((30_000 - 3000) / 1500 + 1000 / 1500 - SLACK_S)
    assert decision.error.retry_after_s == 30.0
    entry, decision = pool.wait("perhaps", 1000, 25.0, certain=1000)
    assert entry.standby
    assert decision.verdict is Verdict.ADMITTED


def test_shared_prefixes_are_no_certain_work():
    pool = Pool()
    pool.placed["t"] = 2000.0
    seen(pool.speeds, 1000, 1.0)
    for i in range(30):
        pool.wait(i, 1000, 600.0, certain=16)
    entry, _ = pool.wait("perhaps", 1000, 5.0, certain=16)
    assert entry.standby


def test_those_behind_are_refused_as_soon_as_newer_ones_fill_their_time():
    pool = Pool()
    pool.placed["t"] = 2000.0
    seen(pool.speeds, 1000, 1.0)
    entries = []
    for i in range(40):
        pool.now = i * 0.01
        entries.append(pool.wait(i, 1000, 2.0, certain=1000)[0])
    assert all(entries)
    refused = {entry.item for entry, _ in pool.gate.refusals()}
    assert refused == set(range(34))  # 6 have time: 3 s of work and what the worker is given beforehand
    for entry, decision in pool.gate.refusals():
        assert decision.bound_s > 2.0
        pool.gate.leave(entry)
    assert not pool.gate.refusals()
    assert pool.gate.too_late_at(entries[-1].limit) == pytest.approx(entries[-1].limit.at - (1000 / 1500 - SLACK_S))


def test_an_excused_one_is_refused_when_its_time_is_over():
    pool = Pool()
    pool.admission.probes = 1.0
    seen(pool.speeds, 1000, 1.0)
    pool.placed["t"] = 5000.0
    entry, decision = pool.wait("tried", 1000, 0.1, certain=1000)
    assert (decision.verdict, entry.limit.excused) == (Verdict.WOULD_REFUSE, True)
    assert pool.gate.too_late_at(entry.limit) == entry.limit.at
    pool.now = 0.2
    assert pool.gate.judge_again(entry).verdict is Verdict.REFUSED
    assert pool.gate.too_late_at(entry.limit) == math.inf
