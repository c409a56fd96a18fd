import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.errors import (
    InternalError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestCancelledError,
    RequestDeadlineError,
    StaleReferenceError,
    TransferError,
    WorkerLostError,
)
from diptych.router.cluster.breaker import BreakerRules, Breakers, BreakerState, is_fault
from diptych.router.requests.retry_budget import RetryBudget

POOL = ("p0", "p1", "p2", "p3")


def make(pool=POOL, **rules):
    breakers = Breakers(BreakerRules(**rules))
    breakers.set_pool("prefill", pool)
    return breakers


def fail(breakers, worker_id, times=5, now=0.0):
    return [breakers.on_outcome(worker_id, fault=True, now=now) for _ in range(times)]


@pytest.mark.parametrize(
    ("error", "fault"),
    [(kind("x"), True) for kind in (InternalError, TransferError, WorkerLostError)]
    + [
        (kind("x"), False)
        for kind in (
            InvalidRequestError,
            OverloadedError,
            RequestCancelledError,
            RequestDeadlineError,
            StaleReferenceError,
            NoWorkerError,
        )
    ],
)
def test_only_the_workers_own_faults_count(error, fault):
    assert is_fault(error) is fault
    assert is_fault(error.reason) is fault


def test_five_in_a_row_open_and_one_probe_closes():
    breakers = make()
    assert fail(breakers, "p1") == [False] * 4 + [True]
    assert "excluded for 5.0 s" in breakers.why_not("p1", 0.0)
    assert breakers.why_not("p0", 0.0) == ""
    assert breakers.num_out(1.0) == 1
    assert breakers.state("p1", 5.0) is BreakerState.HALF_OPEN
    assert breakers.why_not("p1", 5.0) == ""
    assert breakers.on_placed("p1", 5.0)
    assert "probe" in breakers.why_not("p1", 5.1)
    assert breakers.on_outcome("p1", fault=False, now=5.2)
    assert breakers.state("p1", 5.2) is BreakerState.CLOSED
    assert not breakers.on_placed("p1", 5.3)


def test_an_inconclusive_probe_makes_room_for_the_next():
    breakers = make()
    fail(breakers, "p1")
    breakers.on_placed("p1", 5.0)
    assert breakers.on_inconclusive("p1", 5.5)  # its client left
    assert breakers.why_not("p1", 5.5) == ""
    breakers.on_placed("p1", 6.0)
    assert breakers.why_not("p1", 15.9)
    assert breakers.why_not("p1", 16.0) == ""  # no further outcome
    assert not breakers.on_inconclusive("p0", 16.0)


def test_a_failed_probe_opens_for_longer_up_to_a_limit():
    breakers, now, waits = make(), 0.0, []
    fail(breakers, "p1")
    for _ in range(6):
        before = now
        while breakers.why_not("p1", now):
            now += 0.5
        waits.append(now - before)
        breakers.on_placed("p1", now)
        breakers.on_outcome("p1", fault=True, now=now)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_success_between_starts_the_row_again():
    breakers = make()
    for _ in range(20):
        breakers.on_outcome("p1", fault=True, now=0.0)
        breakers.on_outcome("p1", fault=False, now=0.0)
        for other in ("p0", "p2", "p3"):  # all fail alike: the fault is not this worker's
            breakers.on_outcome(other, fault=True, now=0.0)
            breakers.on_outcome(other, fault=False, now=0.0)
    assert breakers.num_out(0.0) == 0


def test_a_rate_far_above_the_peers_is_an_outlier():
    breakers = make()
    for i in range(30):
        breakers.on_outcome("p1", fault=i % 2 == 0, now=0.0)
        for other in ("p0", "p2", "p3"):
            breakers.on_outcome(other, fault=False, now=0.0)
    assert breakers.state("p1", 0.0) is BreakerState.OPEN


def test_at_most_half_of_a_pool_is_out_and_one_alone_never():
    breakers = make()
    for name in POOL:
        fail(breakers, name, 50)
    assert breakers.num_out(0.0) == 2
    alone = make(("p0",))
    fail(alone, "p0", 50)
    assert alone.why_not("p0", 0.0) == ""


def test_another_life_has_a_clean_record():
    breakers = make()
    fail(breakers, "p1")
    breakers.forget("p1")
    assert breakers.why_not("p1", 0.0) == ""


@given(
    st.lists(
        st.tuples(st.sampled_from(POOL), st.sampled_from(["ok", "fault", "nothing", "placed"]), st.floats(0.0, 8.0)),
        max_size=80,
    )
)
def test_no_worker_is_excluded_for_good(steps):
    breakers, now = make(), 0.0
    for name, what, pause in steps:
        now += pause
        if what == "placed":
            breakers.on_placed(name, now)
        elif what == "nothing":
            breakers.on_inconclusive(name, now)
        else:
            breakers.on_outcome(name, fault=what == "fault", now=now)
        assert sum(bool(breakers.why_not(name, now)) for name in POOL) <= 2
    later = now + 61.0
    assert not any(breakers.why_not(name, later) for name in POOL)


def test_retries_are_a_share_of_the_requests():
    budget = RetryBudget(share=0.2, burst=3)
    assert [budget.take() for _ in range(5)] == [True] * 3 + [False] * 2
    granted = 0
    for _ in range(1000):
        budget.on_request()
        granted += budget.take()
    assert 195 <= granted <= 200
    for _ in range(100):
        budget.on_request()
    assert budget.left == 3
