"""Grammars that spell half a surrogate pair, which no answer could hold."""

from __future__ import annotations

import json

import pytest

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import Grammar, GrammarKind, check_escapes, choices_of
from diptych.router.preprocess.structured import grammar_request, plain_grammar, schema_grammar
from diptych.rpc.convert import grammar_from_proto, grammar_to_proto

HALF = "\\ud83d"


@pytest.mark.parametrize("source", [f'["a", "{HALF}"]', '["\\ude00\\ud83d"]'])
def test_choices_are_texts(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        choices_of(source)


def test_a_pair_is_one_character() -> None:
    assert choices_of('["\\ud83d\\ude00"]') == ["\U0001f600"]


@pytest.mark.parametrize("source", [HALF, "a\\uDFFFb", "\\x{00D800}", "\\u{dabc}", "\\U0000D800", "\\\\\\ud800"])
def test_escapes_of_regexes_and_grammars(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        check_escapes(source)


@pytest.mark.parametrize("source", ["\\xd800", "\\\\ud800", "ud800", "\\u00d8", "\\ue000", "\\x{d8000}"])
def test_what_only_looks_like_one(source: str) -> None:
    check_escapes(source)


@pytest.mark.parametrize("kind", [GrammarKind.REGEX, GrammarKind.EBNF, GrammarKind.CHOICE])
def test_the_field_is_named(kind: GrammarKind) -> None:
    source = f'["{HALF}"]' if kind is GrammarKind.CHOICE else f'root ::= "{HALF}"'
    with pytest.raises(InvalidRequestError, match="guided_it.*surrogate") as caught:
        plain_grammar(Grammar(kind, source), "guided_it")
    assert caught.value.param == "guided_it"


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["\ud800"]},
        {"properties": {"\udfff": {}}},
        {"properties": {"a": {"type": "string", "pattern": HALF}}},
        {"patternProperties": {HALF: {"type": "string"}}},
    ],
)
def test_schemas(schema: dict) -> None:
    for given in (schema, json.dumps(schema)):
        with pytest.raises(InvalidRequestError) as caught:
            schema_grammar(given, "response_format")
        assert caught.value.param == "response_format"


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "compact"),
    [
        ({"response_format": SCHEMA}, False),
        ({"response_format": SCHEMA, "structured_outputs": {"disable_any_whitespace": True}}, True),
        ({"response_format": SCHEMA, "structured_outputs": {"disable_any_whitespace": False}}, False),
        ({"guided_json": {"type": "object"}, "structured_outputs": {"disable_any_whitespace": True}}, True),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, True),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, False),
    ],
)
def test_compact_json_is_asked_for_beside_any_format(fields: dict, compact: bool) -> None:
    wanted = grammar_request(fields)
    assert wanted is not None
    assert wanted.grammar.compact is compact
    assert grammar_from_proto(grammar_to_proto(wanted.grammar)) == wanted.grammar


def test_it_alone_is_no_format_and_must_be_a_switch() -> None:
    assert grammar_request({"structured_outputs": {"disable_any_whitespace": True}}) is None
    with pytest.raises(InvalidRequestError, match="true or false"):
        grammar_request({"structured_outputs": {"disable_any_whitespace": "yes"}})
