"""The source of a preempted request's KV: chosen by measured times only."""

from __future__ import annotations

import pytest

from diptych.decode.refetch_policy import PrefillRates, choose_refetch_source, refetch_time_s
from diptych.worker.refs import WorkerRef

P0, P1 = WorkerRef("p0", "i", "a:1"), WorkerRef("p1", "i", "a:2")


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([], None),
        ([(P0, None), (P1, None)], None),
        ([(P0, 2.0)], None),
        ([(P0, 1.0)], None),  # no gain, no move
        ([(P0, 0.9)], P0),
        ([(P0, 0.9), (P1, 0.5)], P1),
        ([(P0, 0.5), (P1, 0.5)], P0),
        ([(P0, None), (P1, 0.5)], P1),
    ],
)
def test_the_fastest_that_is_faster_than_here(candidates, chosen):
    assert choose_refetch_source(1.0, candidates) == chosen


def test_queue_prefill_and_link_add_up():
    rates = PrefillRates()
    rates.observe("p0", 500, compute_s=0.5, queue_s=0.25)
    assert rates.compute_s("p0", 2000) == 2.25
    assert refetch_time_s(rates, 1e6, "p0", num_tokens=2000, kv_bytes=500_000) == 2.75


def test_what_was_never_measured_is_not_known():
    rates = PrefillRates()
    assert refetch_time_s(rates, 1e6, "p0", num_tokens=20, kv_bytes=10) is None
    rates.observe("p0", 500, compute_s=0.5, queue_s=0.0)
    assert refetch_time_s(rates, None, "p0", num_tokens=20, kv_bytes=10) is None
    assert refetch_time_s(rates, 0.0, "p0", num_tokens=20, kv_bytes=10) is None
    assert refetch_time_s(rates, 1e6, "p1", num_tokens=20, kv_bytes=10) is None


def test_readings_that_say_nothing_are_left_out_and_others_weigh_in():
    rates = PrefillRates(alpha=0.5)
    rates.observe("p0", 3, compute_s=0.5, queue_s=0.0)
    rates.observe("p0", 300, compute_s=0.0, queue_s=0.0)
    assert rates.compute_s("p0", 10) is None
    rates.observe("p0", 100, compute_s=1.0, queue_s=0.0)
    rates.observe("p0", 300, compute_s=1.0, queue_s=1.0)
    assert rates.compute_s("p0", 200) == 0.5 + 1.0
