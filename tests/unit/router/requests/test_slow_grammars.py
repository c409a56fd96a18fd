from diptych.common.grammar import Grammar, GrammarKind
from diptych.router.requests.slow_grammars import _LATEST, _MAX_GRAMMARS, SLOW_S, SlowGrammars

GRAMMAR = Grammar(GrammarKind.REGEX, "a{1,200}b")
D = [(f"d{i}", "i1") for i in range(5)]


def test_a_quick_grammar_is_nobody_elses_business():
    known = SlowGrammars()
    assert known.on_accepted(GRAMMAR, D[0], 0.9 * SLOW_S, D) == []
    assert known.compiled_at(GRAMMAR) == frozenset()


def test_two_others_compile_a_slow_one_and_every_router_asks_the_same():
    one, other = SlowGrammars(), SlowGrammars()
    first = one.on_accepted(GRAMMAR, D[0], SLOW_S, D)
    assert len(first) == 2
    assert D[0] not in first
    assert other.on_accepted(GRAMMAR, D[0], SLOW_S, list(reversed(D))) == first
    assert one.compiled_at(GRAMMAR) == {D[0], *first}
    assert one.on_accepted(GRAMMAR, first[0], 0.0, D) == [], "enough have it"


def test_those_that_ended_are_replaced():
    known = SlowGrammars()
    first = known.on_accepted(GRAMMAR, D[0], SLOW_S, D)
    left = [one for one in D if one != D[0] and one != first[0]]
    assert set(known.on_accepted(GRAMMAR, first[1], 0.0, left)) == {one for one in left if one != first[1]}
    assert known.compiled_at(GRAMMAR) == set(left)
    assert known.on_accepted(GRAMMAR, D[0], 0.0, [D[0]]) == []


def test_one_that_comes_back_is_asked_at_once_for_the_latest_ones():
    known = SlowGrammars()
    grammars = [Grammar(GrammarKind.REGEX, f"a{{{number}}}") for number in range(_LATEST + 1)]
    for grammar in grammars:
        known.on_accepted(grammar, D[0], SLOW_S, D[:3])
    known.on_accepted(Grammar(GrammarKind.REGEX, "quick"), D[0], 0.9 * SLOW_S, D[:3])
    back = (D[2][0], "i2")
    assert known.on_change(D[:2]) == []
    assert known.on_change([*D[:2], back]) == [(grammar, back) for grammar in reversed(grammars[1:])]
    assert known.on_change([*D[:2], back]) == [], "it was asked"
    assert known.compiled_at(grammars[-1]) == {*D[:2], back}


def test_it_is_bounded():
    known = SlowGrammars()
    for number in range(_MAX_GRAMMARS + 1):
        known.on_accepted(Grammar(GrammarKind.REGEX, f"a{{{number}}}"), D[0], SLOW_S, D)
    assert known.compiled_at(Grammar(GrammarKind.REGEX, "a{0}")) == frozenset()
    assert known.compiled_at(Grammar(GrammarKind.REGEX, "a{1}"))
