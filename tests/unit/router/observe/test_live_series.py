"""The status page's series: seconds, quantiles, bounds."""

from __future__ import annotations

from diptych.router.observe.live_series import LiveSeries, quantile


def test_a_quantile_is_a_value_that_was_seen() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([float(i) for i in range(100)], 0.95) == 95.0


def test_points_are_seconds_and_the_old_ones_go() -> None:
    series = LiveSeries(span_s=10)
    series.first_token(0.2, 100.1)
    series.tokens(1, 100.1)
    series.tokens(4, 100.9, 0.05)
    series.computed(30, 16, 101.0)
    series.finished(101.0)
    series.failed(103.0)
    points = series.points(103.5)
    assert [point["age_s"] for point in points] == [3, 2, 0]
    assert (points[0]["ttft_p50"], points[0]["itl_p95"], points[0]["tokens"]) == (0.2, 0.05, 5)
    assert (points[1]["finished"], points[1]["prompt_tokens"], points[1]["cached_tokens"]) == (1, 30, 16)
    assert (points[2]["failed"], points[2]["ttft_p50"]) == (1, None)
    assert series.points(200.0) == []
    series.failed(200.0)
    assert len(series.points(200.0)) == 1


def test_a_second_of_many_tokens_keeps_a_bounded_number_of_values() -> None:
    series = LiveSeries()
    for _ in range(100):
        series.tokens(1000, 5.0, 0.01)
    (point,) = series.points(5.0)
    assert (point["tokens"], point["itl_p50"]) == (100_000, 0.01)


def test_stages_are_of_the_last_requests() -> None:
    series = LiveSeries(requests=3)
    for seconds in (9.0, 1.0, 2.0, 3.0):
        series.stage("queue", seconds)
    assert series.stages()["queue"] == {"count": 3, "p50": 2.0, "p95": 3.0}
    assert series.stages()["transfer"] == {"count": 0, "p50": None, "p95": None}
