"""Parsers of the common formats of tool calls.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>   Hermes, Qwen
    llama3-json   {"name": ..., "parameters": {...}}; {...}                  Llama 3.1, 3.2
    mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]       Mistral; also [TOOL_CALLS]name{...}

Text that turns out not to be a call (broken JSON, a function that was not offered) is content, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from enum import Enum

from diptych.router.tools.json_scanner import CallScanner, Scan, ValueScanner
from diptych.router.tools.pieces import CallArguments, CallStart, Content, Piece, held_prefix

_MAX_HELD_CHARS = 4096
_SPACE = " \t\r\n"


class _Calls:
    """The calls of one answer. `raw`: text of the current call while it may still turn out not to be one."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        self._names = names
        self._new_id = new_id
        self._count = 0
        self._given = False
        self.scanner = CallScanner()
        self.raw: list[str] = []
        self._held = 0

    def begin(self, raw: str, *, needs_arguments: bool = False) -> None:
        self.scanner = CallScanner(needs_arguments=needs_arguments)
        self.raw, self._held, self._given = [raw], len(raw), False

    def scan(self, text: str, at: int, out: list[Piece]) -> tuple[int, Scan]:
        """Continue the scan, not always to the end of `text`; FAILED with `given` False means that `raw` is content."""
        scanner = self.scanner
        stop = scanner.scan(text, at, None if self._given else min(len(text), at + _MAX_HELD_CHARS + 1 - self._held))
        if not self._given:
            self.raw.append(text[at:stop])
            self._held += stop - at
            if scanner.name is not None and scanner.name not in self._names:
                scanner.state = Scan.FAILED
            elif scanner.state is not Scan.FAILED and scanner.ready:
                self.start(scanner.name or "", out)
            elif self._held > _MAX_HELD_CHARS:
                scanner.state = Scan.FAILED
        if self._given and (arguments := scanner.take()):
            out.append(CallArguments(self._count - 1, arguments))
        return stop, scanner.state

    def start(self, name: str, out: list[Piece]) -> None:
        out.append(CallStart(self._count, self._new_id(), name))
        self._count += 1
        self._given = True
        self.raw = []

    def arguments(self, text: str, out: list[Piece]) -> None:
        if text:
            out.append(CallArguments(self._count - 1, text))

    @property
    def given(self) -> bool:
        return self._given

    @property
    def any(self) -> bool:
        return self._count > 0

    def give_up(self, out: list[Piece]) -> None:
        """Emit as content the text that is not a call."""
        text = "".join(self.raw)
        self.raw = []
        if text:
            out.append(Content(text))


class _Place(Enum):
    START = "start"
    TEXT = "text"
    NAME = "name"
    ARGS = "args"
    BETWEEN = "between"
    CALL = "call"


class HermesParser:
    """TEXT --<tool_call>--> CALL --}--> TAIL --</tool_call>--> TEXT; white space right after a call is not content."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        self._calls = _Calls(names, new_id)
        self._place = _Place.TEXT
        self._strip = False
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            if self._place is _Place.TEXT:
                at = self._text(text, at, out)
            elif self._place is _Place.CALL:
                at, state = self._calls.scan(text, at, out)
                if state is Scan.DONE:
                    self._place = _Place.BETWEEN
                elif state is Scan.FAILED:
                    self._place = _Place.BETWEEN if self._calls.given else _Place.TEXT
                    self._calls.give_up(out)
            else:
                at = self._tail(text, at)
        return out

    def end(self) -> list[Piece]:
        out: list[Piece] = []
        if self._place is _Place.CALL:
            self._calls.give_up(out)
        elif self._place is _Place.TEXT and self._held:
            out.append(Content(self._held))
        self._held = ""
        return out

    def _text(self, text: str, at: int, out: list[Piece]) -> int:
        if self._strip:
            at = _skip(text, at, _SPACE)
            if at == len(text):
                return at
        found = text.find(self._OPEN, at)
        end = found if found >= 0 else len(text) - held_prefix(text[at:], self._OPEN)
        if end > at:
            out.append(Content(text[at:end]))
            self._strip = False
        if found < 0:
            self._held = text[end:]
            return len(text)
        self._calls.begin(self._OPEN)
        self._place = _Place.CALL
        return found + len(self._OPEN)

    def _tail(self, text: str, at: int) -> int:
        found = text.find(self._CLOSE, at)
        if found >= 0:
            self._place = _Place.TEXT
            self._strip = True
            return found + len(self._CLOSE)
        self._held = text[len(text) - held_prefix(text[at:], self._CLOSE) :]
        return len(text)


class Llama3JsonParser:
    """Calls are only recognized at the very beginning; semicolons separate them. White space before them is not
    content."""

    _TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        self._calls = _Calls(names, new_id)
        self._place = _Place.START
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            if self._place is _Place.TEXT:
                out.append(Content(text[at:]))
                break
            if self._place is _Place.CALL:
                at, state = self._calls.scan(text, at, out)
                if state is Scan.DONE:
                    self._place = _Place.START
                elif state is Scan.FAILED:
                    self._place = _Place.TEXT
                    self._calls.give_up(out)
                continue
            at = self._start(text, at)
        return out

    def end(self) -> list[Piece]:
        out: list[Piece] = []
        if self._place is _Place.CALL:
            self._calls.give_up(out)
        elif self._held:
            out.append(Content(self._held))
        self._held = ""
        return out

    def _start(self, text: str, at: int) -> int:
        at = _skip(text, at, _SPACE + (";" if self._calls.any else ""))
        if at == len(text):
            return at
        if text.startswith(self._TAG, at):
            return at + len(self._TAG)
        if text[at] == "{":
            self._calls.begin("", needs_arguments=True)
            self._place = _Place.CALL
        elif self._TAG.startswith(text[at:]):
            self._held = text[at:]
            return len(text)
        else:
            self._place = _Place.TEXT
        return at


class MistralParser:
    """The marker is followed by an array of calls, or a name and its arguments. If the marker is a token without text,
    an answer that begins with `[{` is read as such an array. White space around calls is not content."""

    _MARK = "[TOOL_CALLS]"
    _ARGS = "[ARGS]"
    _ARRAY = re.compile(r"\[[ \t\r\n]{0,16}")
    _NAME = re.compile(r"[ \t\r\n]{0,16}([A-Za-z0-9_.-]{1,256})[ \t\r\n]{0,16}(?:\[ARGS\][ \t\r\n]{0,16})?", re.ASCII)
    _MAX_NAME_CHARS = 320

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        self._names = names
        self._calls = _Calls(names, new_id)
        self._place = _Place.START
        self._held = ""
        self._value = ValueScanner()

    def feed(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text) and not self._held:
            at = self._steps[self._place](self, text, at, out)
        return out

    def end(self) -> list[Piece]:
        out: list[Piece] = []
        if self._place is _Place.CALL:
            self._calls.give_up(out)
        elif self._held:
            out.append(Content(self._MARK + self._held if self._place is _Place.NAME else self._held))
        self._held = ""
        return out

    def _start(self, text: str, at: int, out: list[Piece]) -> int:
        """At the beginning, or after a call."""
        at = _skip(text, at, _SPACE)
        if at == len(text):
            return at
        if not self._calls.any and (array := self._ARRAY.match(text, at)):
            if text.startswith("{", array.end()):
                self._calls.begin(text[at : array.end()])
                self._place = _Place.CALL
                return array.end()
            if array.end() == len(text):
                self._held = text[at:]
                return at
        self._place = _Place.TEXT
        return at

    def _text(self, text: str, at: int, out: list[Piece]) -> int:
        found = text.find(self._MARK, at)
        end = found if found >= 0 else len(text) - held_prefix(text[at:], self._MARK)
        if end > at:
            out.append(Content(text[at:end]))
        if found < 0:
            self._held = text[end:]
            return len(text)
        self._place = _Place.NAME
        return found + len(self._MARK)

    def _name(self, text: str, at: int, out: list[Piece]) -> int:
        """After a marker."""
        array = self._ARRAY.match(text, _skip(text, at, _SPACE))
        if array and not self._ARGS.startswith(text[array.start() :][: len(self._ARGS)]):
            self._place = _Place.BETWEEN
            return array.start() + 1
        match = self._NAME.match(text, at)
        if match and match[1] in self._names and text.startswith("{", match.end()):
            self._calls.start(match[1], out)
            self._value = ValueScanner()
            self._place = _Place.ARGS
            return match.end()
        if len(text) - at < self._MAX_NAME_CHARS and "{" not in text[at:]:
            self._held = text[at:]
            return at
        out.append(Content(self._MARK))
        self._place = _Place.TEXT
        return at

    def _args(self, text: str, at: int, out: list[Piece]) -> int:
        begin = at
        while at < len(text) and self._place is _Place.ARGS:
            if self._value.push(text[at]):
                self._place = _Place.START
            at += 1
        self._calls.arguments(text[begin:at], out)
        return at

    def _between(self, text: str, at: int, out: list[Piece]) -> int:
        """In the array, before a call or its end."""
        at = _skip(text, at, _SPACE + ",")
        if at == len(text):
            return at
        if text[at] == "{":
            self._calls.begin("" if self._calls.any else f"{self._MARK}[")
            self._place = _Place.CALL
            return at
        self._place = _Place.START if self._calls.any else _Place.TEXT
        return at + (text[at] == "]")

    def _call(self, text: str, at: int, out: list[Piece]) -> int:
        at, state = self._calls.scan(text, at, out)
        if state is Scan.DONE:
            self._place = _Place.BETWEEN
        elif state is Scan.FAILED:
            self._place = _Place.TEXT
            self._calls.give_up(out)
        return at

    _steps = {
        _Place.START: _start,
        _Place.TEXT: _text,
        _Place.NAME: _name,
        _Place.ARGS: _args,
        _Place.BETWEEN: _between,
        _Place.CALL: _call,
    }


def _skip(text: str, at: int, chars: str) -> int:
    while at < len(text) and text[at] in chars:
        at += 1
    return at
