"""Regular expressions over the names of all modules at once, with bounded work.

Python's `re` tries one way after another, and may need longer than anybody waits for a pattern of twenty characters. Here a
pattern is applied to *sets* of places in the names. A set is one integer, with a bit for each place:

    names    model.q|model.v|            a place lies before each character, and before the end of each name
    class    (places & those whose character is in it) << 1
    a*       places, and what one more `a` reaches, until that is nothing new
    (?=a)    places & those from which `a` matches, found by going backwards

So a part of a pattern is looked at once for all names, and a repetition as often as it gets further. Steps are counted, and a
pattern that needs too many is refused. Python parses the pattern, so it means here what it means to peft. Groups are not
kept: back references, atomic groups, and flags that change what a character is, are refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_PATTERN_CHARS = 8192
MAX_PATTERNS = 1 << 16
MAX_STEPS = 1_000_000
"""Of all patterns of an adapter; about a second."""
_BITS_A_STEP = 1 << 14
_CLASS_STEPS = 16
_parser: Any = re._parser  # type: ignore[attr-defined]
_KEPT_FLAGS = re.MULTILINE | re.DOTALL | re.VERBOSE | re.UNICODE
"""Flags that change nothing in names, which have no line breaks, or that the parser has dealt with."""
_CATEGORIES: Mapping[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
}


class PatternError(ValueError):
    """Not a regular expression, or one that is not matched here; the text says why."""


class ModuleNames:
    """The names that patterns are matched with.

    Args:
        names: at least one; printable, not empty.
        max_steps: that all calls may take together. One is a few operations on `_BITS_A_STEP` places.
    """

    def __init__(self, names: Sequence[str], max_steps: int = MAX_STEPS) -> None:
        self._names = names
        self._steps_left = max_steps
        codes = np.frombuffer("".join(f"{name}\n" for name in names).encode("utf-32-le"), dtype="<u4")
        present = np.zeros(int(codes.max()) + 1, dtype=bool)
        present[codes] = True
        self._chars = [chr(code) for code in np.flatnonzero(present)]
        numbers = np.cumsum(present, dtype=np.int32) - 1
        self._text = numbers[codes]  # of each place: which of _chars
        ends = codes == 10
        self._ends_at = np.flatnonzero(ends)
        self._num_places = len(codes)
        self._everywhere = (1 << len(codes)) - 1
        self._ends = _set_of(ends)
        self._starts = ((self._ends << 1) | 1) & self._everywhere
        self._classes: dict[str, int] = {}
        self._suffixes: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._plain: dict[tuple[int, tuple[int, ...]], dict[str, list[int]]] = {}
        for number, name in enumerate(names):
            for start in (0, *(place + 1 for place, char in enumerate(name) if char == ".")):
                self._suffixes[len(name) - start].append((number, name[start:]))

    @property
    def steps_left(self) -> int:
        return self._steps_left

    def whole(self, pattern: str) -> set[int]:
        """Numbers of the names that `re.fullmatch` matches. Raises: PatternError."""
        return self._numbers(self._reached(pattern) & self._ends)

    def ending(self, pattern: str) -> Iterable[int]:
        """Numbers of the names whose end, after a dot or from the start, a pattern matches as peft has it:
        `re.match(rf"(.*\\.)?({pattern})$", name)`. Raises: PatternError."""
        if len(pattern) <= MAX_PATTERN_CHARS and re.fullmatch(r"(?:[A-Za-z0-9_]|\\?\.)+", pattern):
            return self._ending_plainly(pattern)
        return self._numbers(self._reached(pattern, rf"(.*\.)?({pattern})$"))

    def _ending_plainly(self, pattern: str) -> Sequence[int]:
        """Of a name, in which a dot may stand for any character: by a table of what names end with, without those characters."""
        chars = re.findall(r"\\.|.", pattern)
        wild = tuple(place for place, char in enumerate(chars) if char == ".")
        table = self._plain.get((len(chars), wild))
        if table is None:
            suffixes = self._suffixes.get(len(chars), ())
            self._spend(1 + len(suffixes))
            table = defaultdict(list)
            for number, suffix in suffixes:
                table[_without(suffix, wild)].append(number)
            self._plain[len(chars), wild] = table = dict(table)
        self._spend(1)
        return table.get("".join(char[-1] for char in chars if char != "."), ())

    def _reached(self, pattern: str, wrapped: str | None = None) -> int:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise PatternError(f"is longer than {MAX_PATTERN_CHARS} characters")
        self._spend(len(pattern))
        try:
            parsed = _parser.parse(pattern if wrapped is None else wrapped)
            if parsed.state.flags & ~_KEPT_FLAGS:
                raise PatternError("has flags that are not served")
            _check(parsed)
            return self._walk(parsed, self._starts, 1)
        except PatternError:
            raise
        except (re.error, OverflowError, ValueError) as error:
            raise PatternError(f"no regular expression: {error}") from None
        except RecursionError:
            raise PatternError("is nested too deep") from None

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise PatternError("takes too much work to match: use names, or simpler patterns")

    def _numbers(self, places: int) -> set[int]:
        """Of the names in which a place lies."""
        bits = np.frombuffer(places.to_bytes(self._num_places // 8 + 1, "little"), dtype=np.uint8)
        found = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        return set(np.unique(np.searchsorted(self._ends_at, found)).tolist())

    def _walk(self, items: Any, places: int, way: int) -> int:
        """Where a sequence of items leads from some places; `way`: 1 forwards, -1 backwards."""
        for item in items if way == 1 else reversed(list(items)):
            if not places:
                break
            places = self._step(item, places, way)
        return places

    def _step(self, item: tuple[Any, Any], places: int, way: int) -> int:
        self._spend(1 + self._num_places // _BITS_A_STEP)
        kind, value = item
        match str(kind):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                chars = self._class(item)
                return (places & chars) << 1 if way == 1 else (places >> 1) & chars
            case "AT":
                return places & self._at(str(value))
            case "BRANCH":
                reached = 0
                for branch in value[1]:
                    reached |= self._walk(branch, places, way)
                return reached
            case "SUBPATTERN":
                return self._walk(value[3], places, way)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                return self._repeat(int(least), int(most), inner, places, way)
            case "ASSERT":
                return places & self._around(value)
            case "ASSERT_NOT":
                return places & ~self._around(value)
        return 0  # FAILURE: (?!)

    def _repeat(self, least: int, most: int, inner: Any, places: int, way: int) -> int:
        for _ in range(least):
            after = self._walk(inner, places, way)
            if after == places:
                break
            places = after
        new = places
        for _ in range(most - least):
            new = self._walk(inner, new, way) & ~places
            if not new:
                break
            places |= new
        return places

    def _around(self, value: tuple[int, Any]) -> int:
        """Places after which (1), or before which (-1), something matches."""
        side, inner = value
        return self._walk(inner, self._everywhere, -side)

    def _at(self, where: str) -> int:
        match where:
            case "AT_BEGINNING" | "AT_BEGINNING_STRING":
                return self._starts
            case "AT_END" | "AT_END_STRING":
                return self._ends
        word = self._class(("IN", [("CATEGORY", "CATEGORY_WORD")]))
        edges = word ^ (word << 1)
        return edges if where == "AT_BOUNDARY" else self._everywhere & ~edges

    def _class(self, item: tuple[Any, Any]) -> int:
        """Places whose character an item matches."""
        key = repr(item)
        if key not in self._classes:
            self._spend(_CLASS_STEPS * (1 + self._num_places // _BITS_A_STEP) + len(self._chars))
            fits = np.array([char != "\n" and _holds(item, char) for char in self._chars], dtype=bool)
            self._classes[key] = _set_of(fits[self._text])
        return self._classes[key]


def _check(items: Any) -> None:
    """Raises: PatternError for a part that is not matched here, wherever it is."""
    for kind, value in items:
        match str(kind):
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN" | "AT" | "FAILURE":
                continue
            case "BRANCH":
                for branch in value[1]:
                    _check(branch)
            case "SUBPATTERN":
                _, added, removed, inner = value
                if (added | removed) & ~_KEPT_FLAGS:
                    raise PatternError("has flags that are not served")
                _check(inner)
            case "MAX_REPEAT" | "MIN_REPEAT":
                _check(value[2])
            case "ASSERT" | "ASSERT_NOT":
                _check(value[1])
            case name:
                raise PatternError(f"has a part that is not served: {name.lower().replace('_', ' ')}")


def _holds(item: tuple[Any, Any], char: str) -> bool:
    kind, value = item
    match str(kind):
        case "LITERAL":
            return bool(ord(char) == value)
        case "NOT_LITERAL":
            return bool(ord(char) != value)
        case "ANY":
            return True
        case "RANGE":
            return bool(value[0] <= ord(char) <= value[1])
        case "CATEGORY":
            name = str(value)
            return _CATEGORIES[name.replace("_NOT_", "_")](char) != ("_NOT_" in name)
        case "IN":
            negated = bool(value) and str(value[0][0]) == "NEGATE"
            return any(_holds(one, char) for one in value[negated:]) != negated
    raise AssertionError(f"{kind} is no class")


def _set_of(bits: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


def _without(text: str, places: Sequence[int]) -> str:
    chars = list(text)
    for place in reversed(places):
        del chars[place]
    return "".join(chars)
