"""What is left to xgrammar, and what goes to the backend that refuses by name what it cannot do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind, Tag, Tags, check_grammar, choices_of, count_properties
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


def named(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def test_properties_are_counted_in_one_pass() -> None:
    assert count_properties(named(300)) == 300
    assert count_properties({"$defs": {"a": named(3)}, "anyOf": [named(2), {"items": named(4)}]}) == 9
    assert count_properties({"patternProperties": {"^a": named(2)}, "properties": {"properties": {"const": 1}}}) == 5
    assert count_properties({"properties": [1], "patternProperties": None}) == 0
    deep: Any = named(1)
    for _ in range(100_000):  # as deep as it may be: no recursion
        deep = [deep]
    assert count_properties(deep) == 1


@pytest.mark.parametrize(
    ("count", "name"), [(64, "xgrammar"), (65, "llguidance"), (300, "llguidance"), (1024, "llguidance")]
)
def test_a_schema_of_many_properties_goes_to_llguidance(count: int, name: str) -> None:
    source = json.dumps(named(count))
    assert choose("auto", Grammar(GrammarKind.JSON_SCHEMA, source)) == name
    assert choose("auto", Grammar(GrammarKind.TAGS, Tags((Tag("a", source, "b"),)).dump())) == name
    split = Tags((Tag("a", json.dumps(named(count - 1)), "b"),), instead=json.dumps(named(1)))
    assert choose("auto", Grammar(GrammarKind.TAGS, split.dump())) == name


def test_a_schema_of_too_many_properties_is_refused_before_compilation() -> None:
    """300 optional properties took xgrammar the 5 s of its cap, and a process."""
    source = json.dumps(named(300))
    triggered = Grammar(GrammarKind.TAGS, Tags((Tag("<a", source, "b"),), trigger="<a").dump())
    bare = Grammar(GrammarKind.TAGS, Tags((Tag("{", source, "}"),), instead="{}").dump())
    for backend, grammar in (
        ("xgrammar", Grammar(GrammarKind.JSON_SCHEMA, source)),
        ("auto", triggered),
        ("auto", bare),
        ("llguidance", Grammar(GrammarKind.JSON_SCHEMA, json.dumps(named(1025)))),
    ):
        with pytest.raises(InvalidRequestError, match="properties are more than the (256|1024) that"):
            choose(backend, grammar)


def test_tags_are_what_earlier_workers_read_unless_they_have_an_instead() -> None:
    tag = Tag("a", "{}", "b")
    assert "instead" not in Tags((tag,)).dump()
    for tags in (Tags((tag,)), Tags((tag,), instead="{}")):
        assert Tags.load(tags.dump()) == tags
    with pytest.raises(InvalidRequestError):
        Tags.load(Tags((tag,), instead="{}", trigger="a").dump())


@pytest.mark.parametrize("source", ["", "[]", "{}", '{"tags": []}', '{"tags": [{"begin": 1}]}', "[" * 5000])
def test_tags_that_were_not_written(source) -> None:
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
