"""Identifiers. Ids that come from clients are labels only; what the system trusts is minted here."""

from __future__ import annotations

import secrets

_BYTES, _AT_ONCE = 12, 64
_drawn: list[str] = []


def _next() -> str:
    """Drawn from the system many at once: one call of it costs as much as all else about an id."""
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
    """One per process start: fences a restarted worker from its former life."""
    return secrets.token_hex(8)
