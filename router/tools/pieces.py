"""Pieces of an answer's text, and the interface of parsers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Content:
    """Nobody changes one: it is not frozen because making one would take three times as long."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Call number `index` of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, unchanged. Joined they are one JSON object, unless the answer was cut or the
    model wrote invalid JSON."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class ToolParser(Protocol):
    """Parses one answer's text incrementally. Time and memory are linear in the text; the joined pieces do not depend
    on how it was cut."""

    def feed(self, text: str) -> list[Piece]: ...

    def end(self) -> list[Piece]:
        """The answer ended: returns what was held back."""


def held_prefix(text: str, marker: str) -> int:
    """Number of last characters of `text` that may be the beginning of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
