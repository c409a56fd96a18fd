"""What is left to xgrammar, and what goes to the backend that refuses by name what it cannot do."""

from __future__ import annotations

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind, Tag, Tags, check_grammar, choices_of
from diptych.engine.grammar.backends import choose
from diptych.engine.grammar.schema_support import follows

FOLLOWED = [
    True,
    {"type": "object", "properties": {"not": {"type": "integer", "multipleOf": 3}}, "required": ["not"]},
    {"$defs": {"a": {"type": ["string", "null"], "pattern": "^a+$"}}, "$ref": "#/$defs/a", "title": "x"},
    {"anyOf": [{"const": 1}, {"enum": ["a"], "type": "string"}]},
    {"allOf": [{"type": "integer"}], "description": "x"},
    {"type": "string", "minLength": 1, "maxLength": 3},
]
NOT_FOLLOWED = [
    {"not": {"type": "integer"}},
    {"type": "array", "uniqueItems": True},
    {"allOf": [{"type": "integer"}, {"minimum": 3}]},
    {"anyOf": [{"type": "integer"}], "minimum": 3},
    {"properties": {"a": {"if": {}}}},
    {"type": "object", "required": ["z"]},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "a", "maxLength": 3},
    {"items": {"prefixItems": [{"contains": {}}]}},
    3,
]


def test_follows() -> None:
    assert all(follows(schema) for schema in FOLLOWED)
    assert not any(follows(schema) for schema in NOT_FOLLOWED)


def test_the_choice_of_backend() -> None:
    sound, odd = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "null"}'), Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}')
    assert choose("auto", sound) == "xgrammar"
    assert choose("auto", odd) == "llguidance"
    assert choose("xgrammar", odd) == "xgrammar"
    assert choose("auto", Grammar(GrammarKind.TAGS, Tags((Tag("a", '{"not": {}}', "b"),)).dump())) == "llguidance"
    for instead, name in (('{"not": {}}', "llguidance"), ('{"type": "null"}', "xgrammar")):
        tags = Tags((Tag("a", '{"type": "null"}', "b"),), instead=instead)
        assert choose("auto", Grammar(GrammarKind.TAGS, tags.dump())) == name
    with pytest.raises(InvalidRequestError, match="no JSON|not JSON"):
        choose("auto", Grammar(GrammarKind.JSON_SCHEMA, "{"))


def test_tags_are_what_earlier_workers_read_unless_they_have_an_instead() -> None:
    tag = Tag("a", "{}", "b")
    assert "instead" not in Tags((tag,)).dump()
    for tags in (Tags((tag,)), Tags((tag,), instead="{}")):
        assert Tags.load(tags.dump()) == tags
    with pytest.raises(InvalidRequestError):
        Tags.load(Tags((tag,), instead="{}", trigger="a").dump())


@pytest.mark.parametrize("source", ["", "[]", "{}", '{"tags": []}', '{"tags": [{"begin": 1}]}', "[" * 5000])
def test_tags_that_nobody_wrote(source) -> None:
    with pytest.raises(InvalidRequestError):
        Tags.load(source)


@pytest.mark.parametrize("grammar", [Grammar(GrammarKind.REGEX, ""), Grammar(GrammarKind.REGEX, "a" * 600_000),
                                     Grammar(GrammarKind.REGEX, "\ud800"), "text"])  # fmt: skip
def test_grammars_that_are_refused_at_once(grammar) -> None:
    with pytest.raises(InvalidRequestError):
        check_grammar(grammar)


@pytest.mark.parametrize("source", ["{}", "[]", '[""]', "[1]", "[", '["a"' + ', "a"' * 1024 + "]"])
def test_choices_that_are_none(source) -> None:
    with pytest.raises(InvalidRequestError):
        choices_of(source)
