"""Identifiers. Ids from clients are only labels; ids that the system relies on are created here."""

from __future__ import annotations

import secrets

_BYTES, _AT_ONCE = 12, 64
_drawn: list[str] = []


def _next() -> str:
    """Random bytes are fetched from the system in batches: one such call costs as much as the rest of an id."""
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            text = secrets.token_hex(_BYTES * _AT_ONCE)
            _drawn.extend(text[at : at + 2 * _BYTES] for at in range(0, len(text), 2 * _BYTES))


def new_request_id() -> str:
    return "req-" + _next()


def new_attempt_id() -> str:
    return "att-" + _next()


def new_incarnation() -> str:
    """A new id for each process start; it distinguishes a restarted worker from its predecessor."""
    return secrets.token_hex(8)
