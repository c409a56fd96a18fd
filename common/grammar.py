"""What an answer must look like, as data: from a face to the workers. Pure; who understands it lives in engine/grammar.

TAGS is what promises tool calls: JSON values between fixed texts.

    head  tag separator tag separator ...  tail          tag: one of  begin + JSON of its schema + end

With `trigger` anything may be written, but whatever begins with the trigger must be such a tag. With `instead` the answer may
also be JSON of that schema, and no tag.
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
"""Names of properties in one schema: what any backend can follow without holding up other requests."""
MAX_SOURCE_BYTES = 512 * 1024
"""Of a whole grammar: the schemas of several tools may be in it."""
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
    """Args:
    source: by kind: a JSON schema; a regular expression that the whole answer matches; a JSON list of texts; rules in EBNF
        (GBNF's form, from `root` on) or in Lark's form; Tags.
    free_until: the grammar holds from the token after this text on; empty: from the first token on.
    compact: of a JSON schema, also that in `instead` of tags: no white space but one space behind each comma and colon.
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
    """Args:
    several: more than one tag may come.
    instead: JSON schema, as text; not together with `trigger`. Empty: tags must come.
    """

    tags: tuple[Tag, ...]
    head: str = ""
    tail: str = ""
    separator: str = ""
    several: bool = True
    trigger: str = ""
    instead: str = ""

    def dump(self) -> str:
        values = asdict(self)
        if not self.instead:  # workers of an earlier version do not know it
            del values["instead"]
        return json.dumps(values, ensure_ascii=False)

    @classmethod
    def load(cls, source: str) -> Tags:
        """Raises: InvalidRequestError when it is not what `dump` writes."""
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
    """How many properties a JSON schema names, in all its objects: what compiling and following it costs grows with them, with
    their square where they are optional. One pass; what only looks like a schema counts, too.

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
    """Sizes and kind; whether the source makes sense is found out by compiling it.

    Raises: InvalidRequestError naming `grammar`.
    """
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
    """Raises: InvalidRequestError unless it is a JSON list of texts."""
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
        except UnicodeEncodeError:  # JSON can spell one
            raise InvalidRequestError(
                "grammar: a choice holds a lone surrogate: not valid Unicode text", param="grammar"
            ) from None
    return values


_SURROGATE = re.compile(r"\\(?:u|U0000|[ux]\{0*(?=[0-9a-fA-F]{4}\}))[dD][89a-fA-F][0-9a-fA-F]{2}")


def check_escapes(source: str) -> None:
    """Of a regex or an EBNF. Raises: InvalidRequestError when it spells a surrogate, which no text can hold."""
    if "\\" in source and _SURROGATE.search(source.replace("\\\\", "")):
        raise InvalidRequestError(
            "grammar spells a surrogate: not valid Unicode text (write the character itself)", param="grammar"
        )
