import pytest

from diptych.common.errors import (
    IncompatibleWorkersError,
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
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.router.requests.messages import ValidatedRequest
from diptych.router.requests.migration import AnswerSoFar, MoveOutcome, Moves, Verdict

LOST = WorkerLostError("gone")
REFUSALS = [
    StaleReferenceError("old"),
    NoWorkerError("draining"),
    OverloadedError("full"),
    IncompatibleWorkersError("old"),
]
FINAL = [
    InvalidRequestError("bad"), InternalError("bug"), RequestDeadlineError("late"), RequestCancelledError("left"),
    TransferError("cut"),
]  # fmt: skip


def judge(moves, error, *, accepted=True, num_tokens=0, continuable=True):
    return moves.judge(error, accepted=accepted, num_tokens=num_tokens, continuable=continuable)


def request(**changes):
    sampling = SamplingParams(**{"max_tokens": 8, "seed": 3} | changes.pop("sampling", {}))
    plain = {
        "request_id": "r", "label": "", "model": "m", "prompt": Prompt((1, 2)), "sampling": sampling, "explain": False,
        "local_prefill_max_tokens": 0, "failure_policy": 0, "arrived": 0.0, "deadline": 1.0,
    }  # fmt: skip
    return ValidatedRequest(**(plain | changes))


@pytest.mark.parametrize(("accepted", "num_tokens"), [(False, 0), (True, 0), (True, 5)])
def test_a_lost_worker_moves_its_request_in_every_state(accepted, num_tokens):
    assert judge(Moves(3), LOST, accepted=accepted, num_tokens=num_tokens) is Verdict.MOVE


@pytest.mark.parametrize("error", FINAL, ids=lambda error: error.reason)
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_what_would_fail_everywhere_or_was_the_callers_end_does_not_move(error, num_tokens):
    assert judge(Moves(3), error, num_tokens=num_tokens) is Verdict.FAIL


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.reason)
def test_a_refused_request_is_placed_again_once(error):
    moves = Moves(3)
    assert judge(moves, error, accepted=False) is Verdict.REPLACE
    assert judge(moves, error, accepted=False) is Verdict.FAIL
    assert judge(Moves(3), error, num_tokens=1) is Verdict.FAIL


@pytest.mark.parametrize("error", [*REFUSALS, InvalidRequestError("no room here")], ids=lambda error: error.reason)
def test_a_refusal_on_the_way_is_a_part_of_the_move(error):
    moves = Moves(2)
    assert judge(moves, LOST, num_tokens=5) is Verdict.MOVE
    assert judge(moves, error, accepted=False, num_tokens=5) is Verdict.MOVE
    assert judge(moves, error, accepted=False, num_tokens=5) is MoveOutcome.ATTEMPTS
    assert judge(moves, error, accepted=True, num_tokens=5) is Verdict.FAIL


def test_a_request_that_no_worker_has_run_may_be_invalid():
    moves = Moves(2)
    assert judge(moves, LOST, accepted=False) is Verdict.MOVE
    assert judge(moves, InvalidRequestError("bad grammar"), accepted=False) is Verdict.FAIL


def test_moves_without_a_new_token_are_few_and_all_are_bounded():
    moves = Moves(2)
    for _ in range(2):
        assert judge(moves, LOST, num_tokens=5) is Verdict.MOVE
    assert judge(moves, LOST, num_tokens=5) is MoveOutcome.ATTEMPTS
    for number in range(6):
        assert judge(moves, LOST, num_tokens=6 + number) is Verdict.MOVE
    assert judge(moves, LOST, num_tokens=100) is MoveOutcome.ATTEMPTS


def test_a_policy_or_a_setting_that_forbids_it():
    assert judge(Moves(3, allowed=False), LOST) is MoveOutcome.FORBIDDEN
    assert judge(Moves(3, allowed=False), REFUSALS[0], accepted=False) is Verdict.FAIL
    off = Moves(0)
    assert judge(off, LOST, num_tokens=1) is MoveOutcome.FORBIDDEN
    assert judge(off, LOST) is Verdict.REPLACE
    assert judge(off, LOST) is Verdict.FAIL


def test_an_answer_that_cannot_go_on_moves_only_before_its_first_token():
    assert judge(Moves(3), LOST, continuable=False) is Verdict.MOVE
    assert judge(Moves(3), LOST, num_tokens=1, continuable=False) is MoveOutcome.NOT_CONTINUABLE


@pytest.mark.parametrize(
    ("sampling", "may"),
    [({}, True), ({"n": 2}, True), ({"n": 2, "best_of": 2}, True), ({"best_of": 2}, False), ({"beam_width": 1}, False)],
)
def test_choices_that_are_sent_while_they_are_drawn_go_on(sampling, may):
    answer = AnswerSoFar(request(sampling=sampling))
    for choice in range(2):
        answer.extend(choice, [5])
    assert answer.continuable is may


def test_a_continuation_has_the_tokens_and_asks_for_nothing_twice():
    first = request(sampling={"prompt_logprobs": 1, "logprobs": 2}, resume_after=(7,), repeated=SamplingParams(8))
    answer = AnswerSoFar(first)
    answer.extend(0, (8, 9))
    ((choice, rest),) = answer.continuations(first).items()
    assert (choice, rest.resume_after) == (0, (7, 8, 9))
    assert (rest.sampling.prompt_logprobs, rest.sampling.logprobs, rest.sampling.seed) == (None, 2, 3)
    assert rest.repeated is None
    assert first.resume_after == (7,)


def test_choices_that_have_ended_do_not_go_on():
    first = request(sampling={"n": 3, "best_of": 3})
    answer = AnswerSoFar(first)
    answer.extend(0, [5])
    assert not answer.continuable, "a choice without tokens would be drawn alone"
    for choice, ids in ((1, [6]), (2, [7, 8]), (0, [9])):
        answer.extend(choice, ids)
    answer.end(1)
    parts = answer.continuations(first)
    assert {choice: part.resume_after for choice, part in parts.items()} == {0: (5, 9), 2: (7, 8)}
    assert {(part.sampling.n, part.sampling.best_of, part.sampling.num_choices) for part in parts.values()} == {
        (1, 0, 1)
    }
    assert answer.num_ended_tokens == 1
    answer.end(0)
    answer.end(2)
    assert not answer.continuable, "nothing is left to continue"
