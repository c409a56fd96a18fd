"""The laws that a schedule may break: the invariants of docs/handoff.md, section 7, by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class Law(Enum):
    """Its number, and words of it."""

    ACCOUNTS = 1, "Slabs"
    ONE_USER = 2, "Memory that the network may touch has no other user"
    FREED_ONCE = 3, "Nothing is freed twice"
    VERIFIED = 4, "Nothing unverified is unpacked"
    ENDS_ONCE = 5, "Every request ends once"
    ALL_FREE = 6, "Once all requests have ended, everything is free again without new work"
    QUOTAS = 7, "One peer holds at most its quota"
    WINDOWS = 8, "No block is read, by a step or by packing, that was freed behind a window"
    FILES_IN_TIME = 9, "No request waits for files longer than computing their blocks was predicted to take"
    FILES_ACCOUNT = 10, "A worker's files are those of its account"
    EVENTS = 11, "By a worker's events a router knows, in every tier, exactly what the worker holds"
    NO_OWN_ERROR = 12, "No fault ends a request with an INTERNAL error"
    HANDLES = 13, "A handle is answered with its slab once"
    DRAINS = 14, "A worker that drains takes no prompt, and serves reads of its cache until it leaves"

    def __init__(self, number: int, text: str) -> None:
        self.number, self.text = number, text


Report = Callable[[Law, str], None]
"""Called with the law that is broken, and where."""
