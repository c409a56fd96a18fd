from __future__ import annotations

import pytest

from diptych.common.errors import ConfigError
from diptych.loadtest.figures.record import Outcome, ServerFacts, share_out
from diptych.loadtest.figures.slo import attainment, parse_slo
from diptych.loadtest.figures.stats import by_group, summarise
from diptych.loadtest.reports.svg import Axis, Series, cdf, chart
from diptych.loadtest.runs.compare import compare
from diptych.loadtest.runs.sweep import Point, next_rate
from diptych.loadtest.runs.sweep_spec import SweepSpec

SLO = parse_slo("ttft:150,tpot:25")


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        (10, [1, 4, 4], [2, 4, 4]),
        (2, [1, 1, 1], [1, 1, 0]),
        (7, [0, 0], [4, 3]),
        (0, [3], [0]),
        (5, [], []),
        (3, [9, 1, 1], [1, 1, 1]),
    ],
)
def test_share_out(total, weights, shares):
    assert share_out(total, weights) == shares


def test_a_record_counts_tokens_and_not_chunks(record):
    one = record(chunks=(1, 4, 4, 2))
    assert one.ttft_s == pytest.approx(0.1)
    assert one.tpot_s == pytest.approx(0.02)
    assert one.first_gap_s == pytest.approx(0.02)
    assert one.e2e_s == pytest.approx(0.3)
    assert [tokens for _, tokens in one.gaps()] == [4, 4, 2]
    assert all(gap == pytest.approx(0.02) for gap, _ in one.gaps())
    alone = record(chunks=(1,))
    assert (alone.tpot_s, alone.first_gap_s, alone.gaps()) == (None, None, [])
    assert record(chunks=(3, 1)).first_gap_s is None


def test_server_times_split_the_ttft(record):
    facts = ServerFacts(kv_bytes=10, reserved_s=0.03, first_token_s=0.09, kv_complete_s=0.11)
    one = record(server=facts)
    assert (one.queue_s, one.prefill_s, one.transfer_s) == pytest.approx((0.03, 0.06, 0.02))
    assert record(server=ServerFacts()).transfer_s is None


def test_slo_and_goodput(record):
    late = record(at=1.0)
    late.intended_s = 0.8  # ttft 300 ms
    cut = record(at=2.0, outcome=Outcome.CUT, error="broke")
    left = record(at=2.0, outcome=Outcome.CANCELLED)
    records = [record(), late, cut, left]
    assert attainment(records, SLO) == pytest.approx(1 / 3)
    summary = summarise(records, SLO, workers=2)
    assert summary.goodput == pytest.approx(1 / summary.duration_s)
    assert summary.output_tokens == 36
    assert summary.output_rate_per_worker == pytest.approx(summary.output_rate / 2)
    assert summary.errors == {"cut: broke": 1}
    assert summary.peak_concurrency == 2


def test_itl_objective_is_the_longest_gap(record):
    one = record(chunks=(1, 1, 1))
    one.chunk_times[-1] += 0.5
    assert not parse_slo("itl:100").kept_by(one)
    assert parse_slo("tpot:1000").kept_by(one)


@pytest.mark.parametrize("text", ["ttft", "foo:1", "ttft:-1", "ttft:x"])
def test_bad_slo(text):
    with pytest.raises(ConfigError, match="slo"):
        parse_slo(text)


def test_nothing_measured_is_zero_and_not_an_error():
    summary = summarise([], SLO)
    assert (summary.requests, summary.goodput, summary.ttft.count, summary.hit_rate) == (0, 0.0, 0, None)


def test_groups(record):
    records = [record(tenant="a"), record(tenant="b"), record(tenant="b")]
    assert {name: s.requests for name, s in by_group(records, "tenant", SLO).items()} == {"a": 1, "b": 2}
    assert by_group(records[:1], "tenant", SLO) == {}


def test_ratios_are_taken_within_a_round(record):
    def summary(factor):
        one = record()
        one.intended_s = 0.1 - 0.1 * factor
        return summarise([one], SLO)

    found = compare([summary(1), summary(10)], [summary(2), summary(20)], ("a", "b"))
    ttft = next(ratio for ratio in found.ratios if ratio.name == "TTFT p50")
    assert (ttft.ratio, ttft.low, ttft.high) == pytest.approx((2.0, 2.0, 2.0))
    empty = compare([summarise([], SLO)], [summarise([], SLO)], ("a", "b"))
    assert all(ratio.ratio is None for ratio in empty.ratios if ratio.name != "SLO attainment")


def swept(spec, breaks_at):
    points: list[Point] = []
    while (rate := next_rate(spec, points)) is not None:
        points.append(Point(rate, 1.0 if rate < breaks_at else 0.5, 0, 0, 0, 0, 0, 0, 0))
    return [point.rate for point in points]


def test_a_sweep_climbs_until_the_slo_breaks_and_bisects():
    assert swept(SweepSpec(start=1.0, step=2.0, refine=2), breaks_at=5.0) == [1.0, 2.0, 4.0, 8.0, 6.0, 5.0]
    assert swept(SweepSpec(start=1.0, step=2.0, refine=1), breaks_at=0.7) == [1.0, 0.5]
    assert swept(SweepSpec(start=1.0, step=2.0, max_points=3), breaks_at=1e9) == [1.0, 2.0, 4.0]
    assert swept(SweepSpec(rates=(3.0, 1.0)), breaks_at=2.0) == [3.0, 1.0]


def test_axis_ticks_are_round_numbers():
    assert Axis(0, 97, 0, 100).ticks() == pytest.approx([0, 20, 40, 60, 80])
    assert Axis(0.5, 2000, 0, 100, log=True).ticks() == [1, 10, 100, 1000]
    assert Axis(99, 650, 0, 100, log=True).ticks() == [100, 200, 500]
    assert Axis(99, 107, 0, 100, log=True).ticks() == pytest.approx([100, 102, 104, 106])
    assert Axis(0, 10, 0, 100).at(5) == 50


def test_charts_of_nothing_and_of_one_point():
    assert chart("t", [Series("a", [])], x="x", y="y") == ""
    assert chart("t", [Series("a<b", [(1.0, 0.0)])], x="x", y="y").count("a&lt;b") == 1
    assert cdf([3.0, 1.0, 2.0, 4.0]) == [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75), (4.0, 1.0)]
    assert len(cdf([float(i) for i in range(5000)])) == 400
