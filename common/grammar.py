"""Constraints on the form of an answer, as data passed from the API to the workers. Pure; engine/grammar compiles them.

TAGS produce tool calls: JSON values between fixed texts.

    head  tag separator tag separator ...  tail          tag: one of  begin + JSON of its schema + end

With `trigger` other text is allowed, but text that begins with the trigger must be such a tag. With `instead` the
answer may also be JSON of that schema, without tags.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from enum import Enum

from diptych.common.errors import InvalidRequestError

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_PROPERTIES = 1024
"""Most property names in one schema: what a backend can compile without blocking other requests."""
MAX_SOURCE_BYTES = 512 * 1024
"""Most bytes of a whole grammar; it may contain the schemas of several tools."""
MAX_FREE_UNTIL_BYTES = 64
MAX_CHOICES = 1024


class GrammarKind(Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    TAGS = "tags"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the answer.

    Args:
        source: depends on the kind: a JSON schema; a regular expression that the whole answer matches; a JSON list of
            texts; rules in EBNF (GBNF's form, from `root` on) or in Lark's form; Tags.
        free_until: the grammar applies from the token after this text; empty: from the first token.
        compact: of a JSON schema, also that in `instead` of tags: no white space but one space after each comma and
            colon.
    """

    kind: GrammarKind
    source: str
    free_until: str = ""
    compact: bool = False


@dataclass(frozen=True, slots=True)
class Tag:
    """Args: schema: JSON schema, as text."""

    begin: str
    schema: str
    end: str


@dataclass(frozen=True, slots=True)
class Tags:
    """Tool calls as tagged JSON. `several`: more than one tag is allowed. `instead`: JSON schema, as text; not together
    with `trigger`. Empty: tags are required."""

    tags: tuple[Tag, ...]
    head: str = ""
    tail: str = ""
    separator: str = ""
    several: bool = True
    trigger: str = ""
    instead: str = ""

    def dump(self) -> str:
        values = asdict(self)
        if not self.instead:  # workers of an earlier version do not have this field
            del values["instead"]
        return json.dumps(values, ensure_ascii=False)

    @classmethod
    def load(cls, source: str) -> Tags:
        """Raises: InvalidRequestError unless `source` is output of `dump`."""
        try:
            values = json.loads(source)
            tags = tuple(Tag(**tag) for tag in values.pop("tags"))
            texts = [*(getattr(tag, name) for tag in tags for name in ("begin", "schema", "end"))]
            made = cls(tags, **values)
            texts += [made.head, made.tail, made.separator, made.trigger, made.instead]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            texts, tags = [None], ()
        if not tags or not all(isinstance(text, str) for text in texts) or (made.trigger and made.instead):
            raise InvalidRequestError("grammar: tags of an unknown form", param="grammar")
        return made


def count_properties(schema: object) -> int:
    """Number of properties named in a JSON schema, in all its objects.

    Compilation time grows with it, quadratically for optional properties. One pass; anything that looks like a schema
    counts.

    Args:
        schema: parsed JSON.
    """
    count, left = 0, [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            for name in ("properties", "patternProperties"):
                named = value.get(name)
                count += len(named) if isinstance(named, dict) else 0
            left += value.values()
        elif isinstance(value, list):
            left += value
    return count


def check_grammar(value: object) -> Grammar | None:
    """Check sizes and kind; the source itself is checked when it is compiled. Raises: InvalidRequestError naming
    `grammar`."""
    if value is None:
        return None
    if not isinstance(value, Grammar):
        raise InvalidRequestError("grammar is of an unknown kind", param="grammar")
    try:
        size, held = len(value.source.encode()), len(value.free_until.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError("grammar holds a lone surrogate: not valid Unicode text", param="grammar") from None
    if not value.source:
        raise InvalidRequestError("grammar is empty", param="grammar")
    if size > MAX_SOURCE_BYTES or held > MAX_FREE_UNTIL_BYTES:
        raise InvalidRequestError(f"grammar has more than {MAX_SOURCE_BYTES} bytes", param="grammar")
    return value


def choices_of(source: str) -> list[str]:
    """Raises: InvalidRequestError unless `source` is a JSON list of texts."""
    try:
        values = json.loads(source)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
        raise InvalidRequestError("grammar: a choice must be a list of non-empty texts", param="grammar")
    if len(values) > MAX_CHOICES:
        raise InvalidRequestError(f"grammar: at most {MAX_CHOICES} choices, got {len(values)}", param="grammar")
    for text in values:
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON escapes can contain one
            raise InvalidRequestError(
                "grammar: a choice holds a lone surrogate: not valid Unicode text", param="grammar"
            ) from None
    return values


_SURROGATE = re.compile(r"\\(?:u|U0000|[ux]\{0*(?=[0-9a-fA-F]{4}\}))[dD][89a-fA-F][0-9a-fA-F]{2}")


def check_escapes(source: str) -> None:
    """Check a regex or EBNF. Raises: InvalidRequestError when it contains the escape of a surrogate."""
    if "\\" in source and _SURROGATE.search(source.replace("\\\\", "")):
        raise InvalidRequestError(
            "grammar contains the escape of a surrogate: not valid Unicode text (write the character itself)",
            param="grammar",
        )
