"""What an answer's text is made of, and the interface of what takes it apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
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
    """The next part of a call's arguments, as the model wrote them: joined they are one JSON object, unless the answer was
    cut or the model wrote no JSON."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class ToolParser(Protocol):
    """Takes one answer's text as it grows. Time and memory are linear in the text, and how the text was cut into parts
    changes nothing in the joined pieces."""

    def feed(self, text: str) -> list[Piece]: ...

    def end(self) -> list[Piece]:
        """The answer is over: what was held back."""


def held_prefix(text: str, marker: str) -> int:
    """How many of the last characters of `text` could be the beginning of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
