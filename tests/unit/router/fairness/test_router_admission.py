import math
import random

import pytest

from diptych.common.errors import ConfigError
from diptych.router.fairness.admission import Admission, Calibration, Verdict


def calibrated(admission, ratio=2.0, times=60, spread=0.0):
    chance = random.Random(1)
    for _ in range(times):
        seen_s = 0.1 * ratio * math.exp(spread * chance.gauss(0, 1))
        admission.ttft.on_seen(0.1, seen_s)
        admission.tpot.on_seen(0.01, 0.01 * ratio)
    return admission


def judge(admission, ttft_s=1.0, tpot_s=0.01, allowed_s=60.0, seed=3):
    return admission.judge(ttft_s, tpot_s, allowed_s, random.Random(seed))


def test_the_band_follows_what_is_seen():
    calibration = Calibration()
    assert calibration.band(1.0) == (0.0, math.inf)
    chance = random.Random(2)
    for _ in range(3000):
        calibration.on_seen(0.2, 0.6 * math.exp(0.3 * chance.gauss(0, 1)))
    low, high = calibration.band(1.0)
    inside = sum(low <= 3.0 * math.exp(0.3 * chance.gauss(0, 1)) <= high for _ in range(2000)) / 2000
    assert low < 3.0 < high
    assert 0.85 < inside < 1.0
    for _ in range(200):  # the cluster became twice as fast
        calibration.on_seen(0.2, 0.3)
    assert calibration.band(1.0)[1] < 3.0


def test_nothing_is_refused_before_enough_was_seen():
    admission = Admission("on", max_ttft_s=0.001)
    assert judge(admission).verdict is Verdict.ADMITTED


def test_what_cannot_come_in_time_is_refused_early_with_advice():
    admission = calibrated(Admission("on", max_ttft_s=1.5))
    assert judge(admission, ttft_s=0.5).verdict is Verdict.ADMITTED
    refused = judge(admission, ttft_s=3.0)
    assert refused.verdict is Verdict.REFUSED
    assert refused.error is not None
    assert refused.error.http_status == 529
    assert refused.error.retry_after_s == pytest.approx(6.0 - 1.5)
    assert judge(admission, ttft_s=300.0).error.retry_after_s == 30.0


def test_without_a_target_the_deadline_is_one():
    admission = calibrated(Admission("on"))
    assert judge(admission, ttft_s=1.0, allowed_s=3.0).verdict is Verdict.ADMITTED
    assert judge(admission, ttft_s=1.0, allowed_s=1.0).verdict is Verdict.REFUSED


def test_the_pace_has_a_target_too():
    admission = calibrated(Admission("on", max_tpot_s=0.05))
    assert judge(admission, tpot_s=0.02).verdict is Verdict.ADMITTED
    refused = judge(admission, tpot_s=0.03)
    assert "a token every" in refused.error.message
    assert judge(admission, tpot_s=0.0).verdict is Verdict.ADMITTED  # nothing is known of it


def test_doubt_admits():
    """A wide band reaches below the target: the low end counts."""
    admission = calibrated(Admission("on", max_ttft_s=1.5), spread=0.8)
    assert judge(admission, ttft_s=2.0).verdict is Verdict.ADMITTED


def test_shadow_mode_refuses_no_request_and_counts_false_rejections():
    admission = calibrated(Admission("shadow", max_ttft_s=1.0))
    judgement = judge(admission, ttft_s=2.0)
    assert judgement.verdict is Verdict.WOULD_REFUSE
    assert admission.on_first_token(judgement, 0.9) is True
    assert admission.on_first_token(judge(admission, ttft_s=2.0), 5.0) is False
    assert admission.on_first_token(judge(admission, ttft_s=0.1), 0.2) is None


def test_off_says_nothing():
    admission = calibrated(Admission("off", max_ttft_s=0.1))
    assert judge(admission, ttft_s=9.0).verdict is Verdict.ADMITTED


def test_a_few_refusals_are_tried():
    admission = calibrated(Admission("on", max_ttft_s=1.0))
    rng = random.Random(4)
    verdicts = [admission.judge(9.0, 0.0, 60.0, rng).verdict for _ in range(1000)]
    assert 20 < verdicts.count(Verdict.WOULD_REFUSE) < 90


def test_an_unknown_mode_is_named():
    with pytest.raises(ConfigError, match="admission"):
        Admission("maybe")
