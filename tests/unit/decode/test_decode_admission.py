"""Where a prompt is computed, and what follows a failed remote prefill: every branch of both decisions."""

from __future__ import annotations

import itertools

import pytest

from diptych.common.errors import (
    InvalidRequestError,
    NoWorkerError,
    PromptTooLongError,
    TransferError,
    WorkerLostError,
)
from diptych.decode.admission import (
    FailurePolicy,
    GiveUp,
    Local,
    Placement,
    Remote,
    choose_route,
    most_own_tokens,
    next_after_failure,
)
from diptych.worker.refs import WorkerRef

D = WorkerRef("d0", "1", "h:1")
P0, P1 = WorkerRef("p0", "1", "h:2"), WorkerRef("p1", "1", "h:3")


def place(*prefill: WorkerRef, local: bool = False, limit: int = 64) -> Placement:
    return Placement(D, prefill, local, limit)


def test_planned_routes_need_no_note() -> None:
    assert choose_route(place(P0, P1), 500, FailurePolicy.RETRY) == Remote((P0, P1))
    assert choose_route(place(P0, local=True), 64, FailurePolicy.RETRY) == Local()
    assert choose_route(place(local=True), 1, FailurePolicy.FAIL) == Local()


def test_local_over_the_limit_is_overruled_while_a_candidate_exists() -> None:
    route = choose_route(place(P0, local=True), 65, FailurePolicy.RETRY)
    assert isinstance(route, Remote)
    assert route.candidates == (P0,)
    assert route.note == "local prefill overruled: 65 tokens uncached, limit 64"


@pytest.mark.parametrize(
    ("placement", "most"),
    [
        (place(), 500),
        (place(local=True), 500),
        (place(P0), 0),
        (place(P0, local=True), 64),
        (place(P0, local=True, limit=0), 0),
    ],
)
def test_what_decode_computes_at_most_is_what_the_route_allows(placement: Placement, most: int) -> None:
    assert most_own_tokens(placement, 500) == most
    for uncached in (1, 64, 65, 500):
        local = isinstance(choose_route(placement, uncached, FailurePolicy.RETRY), Local)
        assert local is (uncached <= most)


@pytest.mark.parametrize("local", [True, False])
def test_limit_zero_means_remote_even_for_one_token(local: bool) -> None:
    route = choose_route(place(P0, local=local, limit=0), 1, FailurePolicy.RETRY)
    assert isinstance(route, Remote)


def test_without_candidates_policy_decides() -> None:
    route = choose_route(place(), 500, FailurePolicy.RECOMPUTE)
    assert isinstance(route, Local)
    assert "no prefill worker" in route.note
    route = choose_route(place(), 500, FailurePolicy.FAIL)
    assert isinstance(route, GiveUp)
    assert isinstance(route.error, NoWorkerError)


def test_local_is_never_chosen_over_the_limit_while_a_candidate_exists() -> None:
    for local, limit, uncached, policy in itertools.product(
        (True, False), (0, 1, 64), (1, 2, 64, 65, 9999), FailurePolicy
    ):
        route = choose_route(place(P0, local=local, limit=limit), uncached, policy)
        assert isinstance(route, Remote) or uncached <= limit


def test_retry_takes_the_next_candidate_then_computes_here() -> None:
    lost = WorkerLostError("gone")
    step = next_after_failure(FailurePolicy.RETRY, P0, lost, (P1,))
    assert step == Remote((P1,), "prefill p0 failed (WORKER_LOST: gone): trying p1")
    step = next_after_failure(FailurePolicy.RETRY, P1, lost, ())
    assert step == Local("prefill p1 failed (WORKER_LOST: gone): local prefill")


def test_recompute_and_fail() -> None:
    damaged = TransferError("damaged")
    assert isinstance(next_after_failure(FailurePolicy.RECOMPUTE, P0, damaged, (P1,)), Local)
    assert next_after_failure(FailurePolicy.FAIL, P0, damaged, (P1,)) == GiveUp(damaged)


def test_a_prompt_beyond_a_prefill_pool_is_computed_here() -> None:
    too_long = PromptTooLongError("this worker's KV pool holds 64", param="prompt")
    assert next_after_failure(FailurePolicy.RETRY, P0, too_long, (P1,)) == Remote(
        (P1,), "prefill p0 failed (PROMPT_TOO_LONG: this worker's KV pool holds 64): trying p1"
    )
    assert isinstance(next_after_failure(FailurePolicy.RETRY, P1, too_long, ()), Local)
    assert isinstance(next_after_failure(FailurePolicy.RECOMPUTE, P0, too_long, (P1,)), Local)
    assert next_after_failure(FailurePolicy.FAIL, P0, too_long, (P1,)) == GiveUp(too_long)


def test_a_faulty_request_is_not_tried_again() -> None:
    bad = InvalidRequestError("no", param="top_p")
    assert next_after_failure(FailurePolicy.RETRY, P0, bad, (P1,)) == GiveUp(bad)
