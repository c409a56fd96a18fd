"""Incremental scanner of one tool call written as a JSON object.

    {"name": "f", "arguments": {...}}      keys in any order; `parameters` is another name of `arguments`

START -> KEY -> COLON -> VALUE -> AFTER -> (KEY | DONE); any other input: FAILED. Nested values are not checked; only
strings and brackets are tracked, and the model's text is passed on unchanged.
"""

from __future__ import annotations

import json
from enum import Enum

_SPACE = " \t\r\n"
_MAX_NAME_CHARS = 512
_ARGUMENTS = ("arguments", "parameters")


class Scan(Enum):
    START = "start"
    KEY = "key"
    IN_KEY = "in key"
    COLON = "colon"
    VALUE = "value"
    AFTER = "after"
    DONE = "done"
    FAILED = "failed"


class ValueScanner:
    """Follows one JSON value to its end."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._kind = ""

    def push(self, char: str) -> bool | None:
        """True: the value ends with this character; None: it ended before; False: it continues."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return self._depth == 0
            return False
        if not self._kind:
            self._kind = char
        elif self._depth == 0 and (char in _SPACE or char in ",}]"):
            return None  # a number or a literal
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class CallScanner:
    """Feed it with `scan`; then look at `state`, `name` and `take`. `needs_arguments`: an object without them is not a
    call."""

    def __init__(self, *, needs_arguments: bool = False) -> None:
        self.state = Scan.START
        self.name: str | None = None
        self._needs_arguments = needs_arguments
        self._key: list[str] = []
        self._raw: list[str] = []
        self._value = ValueScanner()
        self._key_name = ""
        self._streams = False
        self._has_arguments = False
        self._out: list[str] = []
        self._escaped = False
        self._size = 0

    @property
    def ready(self) -> bool:
        """It is a call: its name is known, and its first arguments or their absence."""
        return self.name is not None and (self._has_arguments or self.state is Scan.DONE)

    def take(self) -> str:
        """The arguments since the last call of `take`."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def scan(self, text: str, at: int, end: int | None = None) -> int:
        """Read from text[at] to text[end]. Returns where it stopped.

        It stops after the object's end, at invalid input, and as soon as `name` or `ready` changes, so that the result
        does not depend on how the text was cut.
        """
        end = len(text) if end is None else end
        name, ready = self.name, self.ready
        while at < end and self.state not in (Scan.DONE, Scan.FAILED):
            at += self._step(text[at])
            if self.name != name or self.ready != ready:
                break
        return at

    def _step(self, char: str) -> int:
        """Returns: characters consumed, 1 or 0."""
        state = self.state
        if state is Scan.IN_KEY:
            self._in_key(char)
        elif state is Scan.VALUE:
            return self._in_value(char)
        elif char in _SPACE:
            pass
        elif state is Scan.START and char == "{":
            self.state = Scan.KEY
        elif state is Scan.KEY and char == '"':
            self.state = Scan.IN_KEY
            self._key = ['"']
        elif state is Scan.COLON and char == ":":
            self.state = Scan.VALUE
            self._value, self._raw, self._size, self._streams = ValueScanner(), [], 0, False
        elif state is Scan.AFTER and char == ",":
            self.state = Scan.KEY
        elif state in (Scan.AFTER, Scan.KEY) and char == "}":
            self._end()
        else:
            self.state = Scan.FAILED
            return 0
        return 1

    def _in_key(self, char: str) -> None:
        self._key.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            key = _loads("".join(self._key))
            self._key_name = key if isinstance(key, str) else ""
            self.state = Scan.COLON
        elif len(self._key) > _MAX_NAME_CHARS:
            self.state = Scan.FAILED

    def _in_value(self, char: str) -> int:
        if char in _SPACE and not self._size:
            return 1
        arguments = self._key_name in _ARGUMENTS and not (self._has_arguments and not self._streams)
        if arguments and not self._size and char == "{":
            self._streams = self._has_arguments = True
        ended = self._value.push(char)
        if ended is not None:
            self._size += 1
            if self._streams:
                self._out.append(char)
            elif arguments or self._key_name == "name":
                self._raw.append(char)
        if self._key_name == "name" and self._size > _MAX_NAME_CHARS:
            self.state = Scan.FAILED
        elif ended is not False:
            self._value_ended(arguments)
        return 0 if ended is None else 1

    def _value_ended(self, arguments: bool) -> None:
        self.state = Scan.AFTER
        if self._streams:
            return
        if self._key_name == "name":
            name = _loads("".join(self._raw))
            if not isinstance(name, str) or not name or self.name is not None:
                self.state = Scan.FAILED
            else:
                self.name = name
        elif arguments:
            value = _loads("".join(self._raw))
            if value is None:
                self._out.append("{}")
            elif isinstance(value, str):  # some models write the object as a string
                self._out.append(value)
            else:
                self.state = Scan.FAILED
            self._has_arguments = True

    def _end(self) -> None:
        if self.name is None or (self._needs_arguments and not self._has_arguments):
            self.state = Scan.FAILED
            return
        if not self._has_arguments:
            self._out.append("{}")
        self.state = Scan.DONE


_BAD = object()


def _loads(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return _BAD
    return value
