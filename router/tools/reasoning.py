"""Splits reasoning, <think>...</think>, from the answer. Linear, and independent of how the text was cut."""

from __future__ import annotations

from enum import Enum

from diptych.router.tools.pieces import Content, Piece, Reasoning, held_prefix

OPEN, CLOSE = "<think>", "</think>"
_SPACE = " \t\r\n"
_MAX_SPACE = 64


class _Place(Enum):
    START = "start"
    THINKING = "thinking"
    AFTER = "after"
    ANSWER = "answer"


class ReasoningSplitter:
    """START --<think>--> THINKING --</think>--> AFTER --text--> ANSWER; START --anything else--> ANSWER `thinking`: the
    prompt has already opened the reasoning, as some templates do."""

    def __init__(self, *, thinking: bool = False) -> None:
        self._place = _Place.THINKING if thinking else _Place.START
        self._strip = True
        self._held = ""

    @property
    def thinking(self) -> bool:
        return self._place is _Place.THINKING

    def feed(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            if self._place is _Place.ANSWER:
                out.append(Content(text[at:]))
                break
            if self._place is _Place.START:
                at = self._start(text, at, out)
                continue
            if self._strip:  # line breaks around the reasoning belong to the tags
                while at < len(text) and text[at] in _SPACE:
                    at += 1
                if at == len(text):
                    break
                self._strip = False
            if self._place is _Place.AFTER:
                self._place = _Place.ANSWER
            else:
                at = self._thoughts(text, at, out)
        return out

    def end(self) -> list[Piece]:
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self._place is _Place.THINKING else Content(held)]

    def _start(self, text: str, at: int, out: list[Piece]) -> int:
        end = at
        while end < len(text) and text[end] in _SPACE:
            end += 1
        if end - at <= _MAX_SPACE and text.startswith(OPEN, end):
            self._place = _Place.THINKING
            return end + len(OPEN)
        if end - at > _MAX_SPACE or not OPEN.startswith(text[end:]):
            self._place = _Place.ANSWER
            return at
        self._held = text[at:]
        return len(text)

    def _thoughts(self, text: str, at: int, out: list[Piece]) -> int:
        found = text.find(CLOSE, at)
        end = found if found >= 0 else len(text) - held_prefix(text[at:], CLOSE)
        if end > at:
            out.append(Reasoning(text[at:end]))
        if found < 0:
            self._held = text[end:]
            return len(text)
        self._place, self._strip = _Place.AFTER, True
        return found + len(CLOSE)
