"""How a grammar joins the other constraints of a draw. The grammar is a toy: the matcher knows what may follow each prefix."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.common.sampling import SamplingParams
from diptych.engine import constraints
from diptych.engine.constraints import Constraint
from diptych.engine.grammar.program import NOT_ALLOWED, SLOW, AfterText, FirstToken, allowed_ids, first_mask, mask_of

VOCAB = 70
EOS = (2, 69)


class Toy:
    """Allows 10 11 12, then an end; or 10 and an end. `stuck`: accepting takes too long."""

    size_bytes = 1
    follows = {(): [10], (10,): [11, *EOS], (10, 11): [12], (10, 11, 12): [*EOS]}

    def __init__(self, stuck: bool = False) -> None:
        self.num_words = 3
        self.slow = False
        self.stuck = stuck
        self.seen: tuple[int, ...] = ()

    def matcher(self):
        return Toy(self.stuck)

    def accept(self, token_id: int) -> bool:
        allowed = token_id in self.follows.get(self.seen, ())
        self.seen += (token_id,)
        self.slow = self.stuck
        return allowed

    def fill(self, mask) -> None:
        mask[:] = mask_of(self.follows.get(self.seen, []), VOCAB)


def allowed(outputs, program=None, prompt=(5, 6), **sampling) -> set[int]:
    constraint = Constraint(SamplingParams(max_tokens=9, **sampling), EOS, program or Toy())
    return after(constraint, prompt, outputs)


def after(constraint, prompt, outputs) -> set[int]:
    constraint.advance([*prompt, *outputs], len(prompt))
    logits = np.zeros(VOCAB, dtype=np.float32)
    constraints.apply(logits, constraint)
    return set(np.flatnonzero(logits > -np.inf).tolist())


def test_the_mask_is_what_may_follow_the_outputs() -> None:
    assert allowed([]) == {10}
    assert allowed([10]) == {11, *EOS}
    assert allowed([10, 11, 12]) == set(EOS)


def test_a_state_that_grew_is_the_state_that_was_rebuilt() -> None:
    grown = Constraint(SamplingParams(max_tokens=9), EOS, Toy())
    for n in range(4):
        assert after(grown, (5,), [10, 11, 12][:n]) == allowed([10, 11, 12][:n], prompt=(5,))


def test_min_tokens_keeps_the_answer_going_while_the_grammar_lets_it() -> None:
    assert allowed([10], min_tokens=2) == {11}
    assert allowed([10, 11, 12], min_tokens=9) == set(EOS)


def test_ignore_eos_gives_way_only_where_nothing_else_may_follow() -> None:
    assert allowed([10], ignore_eos=True) == {11}
    assert allowed([10, 11, 12], ignore_eos=True) == set(EOS)


def test_other_limits_still_count() -> None:
    assert allowed([10], allowed_token_ids=(11, 12)) == {11}
    assert allowed([], allowed_token_ids=(11,)) == set()
    assert allowed([10], bad_words=((11,),)) == set(EOS)


@pytest.mark.parametrize(("program", "why"), [(Toy(), NOT_ALLOWED), (Toy(stuck=True), SLOW)])
def test_a_token_that_cannot_be_and_a_grammar_that_is_too_slow_end_it(program, why) -> None:
    constraint = Constraint(SamplingParams(max_tokens=9), EOS, program)
    assert after(constraint, (5,), [33]) == set()
    assert constraint.trouble == why
    assert after(constraint, (5,), [33, 10]) == set()


def test_the_first_token_is_drawn_under_a_mask_that_came_from_elsewhere() -> None:
    assert allowed([], FirstToken(first_mask(Toy()))) == {10}


def test_after_a_text_the_grammar_holds_and_before_it_only_an_end_is_forbidden() -> None:
    texts = {20: b"I </th", 21: b"ink>", 22: b"</think> so"}
    program = AfterText(Toy(), "</think>", lambda token: texts.get(token, b"x"), VOCAB, EOS)
    anything = set(range(VOCAB)) - set(EOS)
    assert allowed([], program) == anything
    assert allowed([20, 20], program) == anything
    assert allowed([20, 21], program) == {10}
    assert allowed([22], program) == {10}
    assert allowed([20, 21, 10, 11], program) == {12}


def test_masks_and_ids_are_inverse() -> None:
    ids = [0, 31, 32, 63, 69]
    assert allowed_ids(mask_of(ids, VOCAB), VOCAB).tolist() == ids
