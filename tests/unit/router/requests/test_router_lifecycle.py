import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.router.placement.reservations import Reservation, Reservations
from diptych.router.requests.lifecycle import IllegalMoveError, Lifecycle, Move, State


def after(*moves):
    life = Lifecycle()
    for move in moves:
        life.on(move)
    return life


def test_an_answer():
    life = after(Move.SUBMIT, Move.ACCEPT)
    life.on_tokens(0, 1)
    life.on_tokens(1, 3)
    life.on(Move.END)
    assert (life.state, life.num_tokens, life.ended) == (State.FINISHED, 4, True)


@pytest.mark.parametrize("moves", [(Move.SUBMIT,), (Move.SUBMIT, Move.ACCEPT)])
def test_another_attempt_begins_at_the_beginning(moves):
    life = after(*moves, Move.REPLACE, Move.SUBMIT, Move.ACCEPT)
    life.on_tokens(0, 1)
    assert (life.state, life.num_replacements) == (State.STREAMING, 1)


def test_another_attempt_continues_where_the_lost_one_ended():
    life = after(Move.SUBMIT, Move.ACCEPT)
    life.on_tokens(0, 3)
    for move in (Move.REPLACE, Move.SUBMIT, Move.ACCEPT):
        life.on(move)
    with pytest.raises(IllegalMoveError, match="expected offset 3"):
        life.on_tokens(0, 3)
    life.on_tokens(3, 1)
    assert (life.num_tokens, life.num_replacements) == (4, 1)


@pytest.mark.parametrize(("offset", "count"), [(1, 1), (5, 1)])
def test_a_hole_or_a_repeat_is_illegal(offset, count):
    life = after(Move.SUBMIT, Move.ACCEPT)
    life.on_tokens(0, 2)
    with pytest.raises(IllegalMoveError, match="expected offset 2"):
        life.on_tokens(offset, count)


@pytest.mark.parametrize("end", [Move.END, Move.FAIL, Move.CANCEL])
def test_nothing_follows_an_end(end):
    life = after(Move.SUBMIT, Move.ACCEPT, end)
    for move in Move:
        with pytest.raises(IllegalMoveError):
            life.on(move)


@pytest.mark.parametrize("moves", [(), (Move.SUBMIT,)])
@pytest.mark.parametrize("move", [Move.TOKENS, Move.END])
def test_nothing_is_streamed_before_accepted(moves, move):
    with pytest.raises(IllegalMoveError):
        after(*moves).on(move)


def test_reservations_follow_a_request():
    open_ = Reservations()
    open_.reserve("a", Reservation("p0", "d0", 100))
    open_.reserve("b", Reservation("d0", "d0", 30))
    assert (open_.tokens("p0"), open_.tokens("d0")) == (100, 30)
    assert (open_.requests("p0"), open_.requests("d0")) == (1, 2)
    open_.prompt_computed("a")
    open_.prompt_computed("b")
    assert (open_.tokens("p0"), open_.requests("p0"), open_.tokens("d0"), open_.requests("d0")) == (0, 0, 0, 2)
    open_.release("a")
    open_.release("a")
    open_.release("never")
    assert (open_.requests("d0"), len(open_)) == (1, 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["computed", "release"]))))
def test_reservations_end_at_zero(calls):
    open_ = Reservations()
    for attempt, (prefill, decode) in {"a": ("p0", "d0"), "b": ("d0", "d0"), "c": ("p0", "d1")}.items():
        open_.reserve(attempt, Reservation(prefill, decode, 7))
    for attempt, call in [*calls, *((attempt, "release") for attempt in "abc")]:
        open_.prompt_computed(attempt) if call == "computed" else open_.release(attempt)
        assert all(open_.tokens(w) >= 0 and open_.requests(w) >= 0 for w in ("p0", "d0", "d1"))
    assert not any(open_.tokens(w) or open_.requests(w) for w in ("p0", "d0", "d1"))
