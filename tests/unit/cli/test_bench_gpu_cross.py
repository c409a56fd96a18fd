"""Evaluation of measurements in bench/gpu/cross.py; needs no GPU."""

from __future__ import annotations

import pytest

from diptych.bench.gpu.cross import FIRST_S, FIRST_TOKEN_S, GAP_S, crossover, is_good, summary


def stream(first_s, gap_s, count=128):
    return [first_s + i * gap_s for i in range(count)]


@pytest.mark.parametrize(
    ("first_s", "gap_s", "late", "good"),
    [
        (FIRST_S, GAP_S / 2, 0, True),
        (FIRST_S + 1000 * FIRST_TOKEN_S, GAP_S / 2, 0, True),
        (FIRST_S + 1001 * FIRST_TOKEN_S, GAP_S / 2, 0, False),
        (0.1, GAP_S * 1.01, 0, False),
        (0.1, GAP_S / 2, 1, True),  # one gap of 127 is less than a hundredth
        (0.1, GAP_S / 2, 2, False),
    ],
)
def test_good_is_a_timely_first_token_and_no_more_than_one_late_gap_in_a_hundred(first_s, gap_s, late, good):
    times = stream(first_s, gap_s)
    for i in range(late):
        at = 50 + 20 * i
        times = [*times[:at], *(t + 1.0 for t in times[at:])]
    assert is_good(0.0, times, 1000) is good


def test_a_summary_counts_what_was_good_over_the_time_of_arrivals():
    results = [("a", 5.0, stream(5.1, 0.005)), ("b", 6.0, stream(9.0, 0.005))]
    row = summary(results, 256, 4.0)
    assert (row["requests"], row["good"], row["goodput_per_s"]) == (2, 0.5, 0.25)
    assert row["itl_ms"]["p99"] == pytest.approx(5.0)
    assert row["ttft_ms"]["p99"] == pytest.approx(3000.0)


def row(length, ours, theirs):
    sides = {"disaggregated": ours, "colocated": theirs}
    return {"prompt_tokens": length, **{k: {"itl_ms": {"p99": v}, "good": 1 / v} for k, v in sides.items()}}


def test_the_crossover_is_where_disaggregated_stays_ahead_from():
    rows = [row(256, 5, 9), row(1024, 9, 5), row(4096, 5, 9), row(8192, 5, 5)]
    assert crossover(rows, "itl") == crossover(rows, "good") == 4096
    assert crossover([row(256, 9, 5)], "itl") is None
