"""From response formats and structured outputs of the APIs to a Grammar. Pure: checks everything that needs no
compiler.

    response_format     {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}      chat, completions
    text.format         the same, flat                                                                        responses
    structured_outputs  {"json" | "regex" | "choice" | "grammar" | "json_object": ...}, and guided_*: vLLM's  both
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema_rs

from diptych.common.errors import InvalidRequestError
from diptych.common.grammar import (
    MAX_PROPERTIES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    Grammar,
    GrammarKind,
    check_escapes,
    choices_of,
    count_properties,
)

_ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_VLLM_OPTIONS = ("disable_fallback", "disable_additional_properties", "whitespace_pattern")
_COMPACT = "disable_any_whitespace"


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """`field`: the field that requested it; for later errors."""

    grammar: Grammar
    field: str


def grammar_request(fields: Mapping[str, Any]) -> GrammarRequest | None:
    """The grammar requested by the fields. `fields`: any of response_format, text, structured_outputs, guided_*; None:
    not given. Raises: InvalidRequestError naming the field, also when two of them are given."""
    found: list[GrammarRequest] = []
    outputs, compact = _compact(fields.get("structured_outputs"))
    if (form := fields.get("response_format")) is not None:
        found += _of_format(form, "response_format", nested=True)
    if (text := fields.get("text")) is not None and text.get("format") is not None:
        found += _of_format(text["format"], "text", nested=False)
    if outputs is not None:
        found += _of_outputs(outputs)
    for name, kind in _GUIDED.items():
        if fields.get(name) is not None:
            found.append(GrammarRequest(_grammar(kind, fields[name], name), name))
    if len(found) > 1:
        names = " and ".join(one.field for one in found)
        raise InvalidRequestError(f"{found[1].field}: only one of {names} may be given", param=found[1].field)
    if not found or not compact or found[0].grammar.kind is not GrammarKind.JSON_SCHEMA:
        return found[0] if found else None
    return replace(found[0], grammar=replace(found[0].grammar, compact=True))


def _compact(outputs: object) -> tuple[object, bool]:
    """(structured_outputs without that option, whether JSON has restricted white space): the option also applies to a
    format in another field. Raises: InvalidRequestError."""
    if not isinstance(outputs, Mapping) or outputs.get(_COMPACT) is None:
        return outputs, False
    if not isinstance(outputs[_COMPACT], bool):
        raise InvalidRequestError(f"structured_outputs.{_COMPACT} must be true or false", param="structured_outputs")
    return {name: value for name, value in outputs.items() if name != _COMPACT}, outputs[_COMPACT]


def schema_grammar(schema: object, field: str) -> Grammar:
    """Raises: InvalidRequestError naming `field`."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{field}: the schema is not JSON: {error}", param=field) from None
    check_schema(schema, field)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def check_schema(schema: object, param: str) -> None:
    """Raises: InvalidRequestError when it is too large or deep, not a JSON schema, or refers to another document."""
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{param}: a schema must be an object", param=param)
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        for value in level:
            if isinstance(value, dict):
                _check_references(value, param)
                _check_patterns(value, param)
            _check_integers(value.values() if isinstance(value, dict) else value, param)
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, (dict, list))
        ]
        if not level:
            break
    else:
        raise InvalidRequestError(f"{param}: a schema is nested more than {MAX_SCHEMA_DEPTH} levels deep", param=param)
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
    except ValueError:  # NaN, or a lone surrogate
        raise InvalidRequestError(f"{param}: a schema contains a value that is not JSON", param=param) from None
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(f"{param}: a schema has more than {MAX_SCHEMA_BYTES} bytes", param=param)
    if (count := count_properties(schema)) > MAX_PROPERTIES:
        raise InvalidRequestError(f"{param}: a schema names {count} properties; at most {MAX_PROPERTIES}", param=param)
    # An unknown draft would be fetched from the network.
    draft = schema.get("$schema", "")
    if draft and not (isinstance(draft, str) and any(f"json-schema.org/{known}/schema" in draft for known in _DRAFTS)):
        raise InvalidRequestError(f"{param}: $schema is not a known draft of JSON Schema", param=param)
    try:
        jsonschema_rs.meta.validate({name: value for name, value in schema.items() if name != "$schema"})
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        first = str(error).split("\n", 1)[0][:200]
        raise InvalidRequestError(f"{param}: not a valid JSON schema: {first}", param=param) from None


def _check_integers(values: Iterable[object], param: str) -> None:
    """Compilers would write a larger one as the nearest double, which the schema does not allow."""
    for value in values:
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise InvalidRequestError(f"{param}: a schema contains an integer of more than 64 bits", param=param)


def _check_references(schema: Mapping[str, Any], param: str) -> None:
    for name in _REFERENCES:
        target = schema.get(name, "#")
        if isinstance(target, str) and not target.startswith("#"):
            raise InvalidRequestError(f"{param}: {name} must stay inside the schema", param=param)


def _check_patterns(schema: Mapping[str, Any], param: str) -> None:
    more = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(more if isinstance(more, Mapping) else ())):
        if isinstance(pattern, str):
            try:
                check_escapes(pattern)
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    error.message.replace("grammar", f"{param}: a pattern", 1), param=param
                ) from None


def _of_format(form: object, field: str, *, nested: bool) -> list[GrammarRequest]:
    kind = form.get("type") if isinstance(form, Mapping) else None
    if not isinstance(form, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError(f"{field}: type must be text, json_object or json_schema", param=field)
    if kind == "text":
        return []
    if kind == "json_object":
        return [GrammarRequest(_ANY_OBJECT, field)]
    body = form.get("json_schema") if nested else form
    if not isinstance(body, Mapping) or body.get("schema") is None:
        raise InvalidRequestError(f"{field}: json_schema must hold a schema", param=field)
    if not isinstance(body["schema"], Mapping):
        raise InvalidRequestError(f"{field}: a schema must be an object", param=field)
    return [GrammarRequest(schema_grammar(body["schema"], field), field)]


def _of_outputs(outputs: object) -> list[GrammarRequest]:
    field = "structured_outputs"
    if not isinstance(outputs, Mapping):
        raise InvalidRequestError(f"{field} must be an object", param=field)
    given = {name: value for name, value in outputs.items() if value is not None and value is not False}
    for name in _VLLM_OPTIONS:
        if name in given:
            raise InvalidRequestError(f"{field}.{name} is not supported: leave it out", param=field)
    if not given:
        return []
    if len(given) > 1 or next(iter(given)) not in ("json", "regex", "choice", "grammar", "json_object"):
        raise InvalidRequestError(f"{field} takes one of json, json_object, regex, choice and grammar", param=field)
    ((kind, value),) = given.items()
    return [GrammarRequest(_grammar(kind, value, field), field)]


def _grammar(kind: str, value: object, field: str) -> Grammar:
    if kind == "json_object":
        return _ANY_OBJECT
    if kind == "json":
        return schema_grammar(value, field)
    if kind == "choice":
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise InvalidRequestError(f"{field}: a choice must be a list of texts", param=field)
        return plain_grammar(Grammar(GrammarKind.CHOICE, json.dumps(list(value), ensure_ascii=False)), field)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{field}: a {kind} must be text", param=field)
    return plain_grammar(Grammar(GrammarKind.REGEX if kind == "regex" else GrammarKind.EBNF, value), field)


def plain_grammar(grammar: Grammar, field: str) -> Grammar:
    """A regex, choice or EBNF. Raises: InvalidRequestError naming `field`."""
    if not grammar.source:
        raise InvalidRequestError(f"{field} is empty", param=field)
    try:
        if grammar.kind is GrammarKind.CHOICE:
            choices_of(grammar.source)
        else:
            check_escapes(grammar.source)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message.replace("grammar", field, 1), param=field) from None
    if len(grammar.source.encode("utf-8", "surrogatepass")) > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(f"{field} has more than {MAX_SCHEMA_BYTES} bytes", param=field)
    return grammar
