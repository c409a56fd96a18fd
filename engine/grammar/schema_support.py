"""Which JSON schemas xgrammar follows to the letter. What it does not know it passes over in silence, so whatever is not sure
here goes to llguidance, which refuses by name what it cannot do."""

from __future__ import annotations

from typing import Any

from diptych.common.grammar import Tags

_ANNOTATIONS = frozenset(
    ("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples",
     "readOnly", "title", "writeOnly")
)  # fmt: skip
_BY_TYPE = frozenset(
    ("additionalProperties", "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength",
     "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern",
     "patternProperties", "prefixItems", "properties", "propertyNames", "required", "type")
)  # fmt: skip
_ALONE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
"""It looks at one of these only, and at nothing beside it."""
_SCHEMAS = ("additionalProperties", "items", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_LOOKS_AROUND = ("(?=", "(?!", "(?<", "\\b", "\\B")


def follows(schema: Any) -> bool:
    """`schema`: parsed JSON."""
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict):
        return False
    alone = [name for name in _ALONE if name in schema]
    rules = [name for name in schema if name not in _ANNOTATIONS and name not in _ALONE]
    if any(name not in _BY_TYPE for name in rules) or len(alone) > 1:
        return False
    if alone and [name for name in rules if name != "type" or alone[0] not in ("const", "enum")]:
        return False
    if len(schema.get("allOf", [None])) != 1:
        return False
    return _strings(schema) and _objects(schema) and all(follows(part) for part in _parts(schema))


def _strings(schema: dict[str, Any]) -> bool:
    shapes: list[str] = [name for name in ("pattern", "format", "minLength") if name in schema]
    if "maxLength" in schema and "minLength" not in schema:
        shapes.append("maxLength")
    patterns = [schema.get("pattern", ""), *schema.get("patternProperties", ())]
    return len(shapes) <= 1 and not any(mark in str(text) for text in patterns for mark in _LOOKS_AROUND)


def _objects(schema: dict[str, Any]) -> bool:
    named = schema.get("properties", {})
    return all(name in named for name in schema.get("required", ()))


def _parts(schema: dict[str, Any]) -> list[Any]:
    parts = [schema[name] for name in _SCHEMAS if name in schema]
    for name in _LISTS:
        parts += schema.get(name, [])
    for name in _MAPS:
        parts += schema.get(name, {}).values()
    return parts


def only_xgrammar(tags: Tags) -> bool:
    """llguidance's lexer takes the longest text that it knows: it can neither wait for a trigger in free text nor tell bare JSON
    calls from other objects."""
    bare = not tags.head and any(tag.begin.startswith("{") for tag in tags.tags)
    return bool(tags.trigger) or bool(tags.instead and bare)
