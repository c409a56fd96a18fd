"""Identifiers. Ids that come from clients are labels only; what the system trusts is minted here."""

from __future__ import annotations

import secrets


def new_request_id() -> str:
    return "req-" + secrets.token_hex(12)


def new_attempt_id() -> str:
    return "att-" + secrets.token_hex(12)


def new_incarnation() -> str:
    """One per process start: fences a restarted worker from its former life."""
    return secrets.token_hex(8)
