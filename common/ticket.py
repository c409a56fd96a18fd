"""Sealed bytes: what a router signed and a worker of the same cluster can check. Pure.

    "DT2" | blake3 keyed with key, of claims | claims

The key is derived from the cluster secret. Whoever carries a ticket can read it, and cannot change it.
"""

from __future__ import annotations

import hmac

from blake3 import blake3

from diptych.common.errors import TicketRefusedError

MAGIC = b"DT2"
PURPOSE = "placement ticket"
"""Of the key, see common.secret.derive_key."""
_MAC_BYTES = 32
_START = len(MAGIC) + _MAC_BYTES


def seal(key: bytes, claims: bytes) -> bytes:
    """`key`: of 32 bytes."""
    return MAGIC + blake3(claims, key=key).digest() + claims


def unseal(key: bytes, ticket: bytes) -> bytes:
    """The claims. Raises: TicketRefusedError unless they were sealed with this key."""
    if len(ticket) < _START or not ticket.startswith(MAGIC):
        raise TicketRefusedError("this is no placement ticket", param="ticket")
    claims = ticket[_START:]
    if not hmac.compare_digest(ticket[len(MAGIC) : _START], blake3(claims, key=key).digest()):
        raise TicketRefusedError("the placement ticket was not signed by a router of this cluster", param="ticket")
    return claims
