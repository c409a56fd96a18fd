"""Authenticated bytes: a router signs them, a worker of the same cluster verifies them. Pure.

    "DT2" | blake3 keyed with key, of claims | claims

The key is derived from the cluster secret. The holder of a ticket can read it but not change it.
"""

from __future__ import annotations

import hmac

from blake3 import blake3

from diptych.common.errors import TicketRefusedError

MAGIC = b"DT2"
PURPOSE = "placement ticket"
"""Purpose of the derived key, see common.secret.derive_key."""
_MAC_BYTES = 32
_START = len(MAGIC) + _MAC_BYTES


def seal(key: bytes, claims: bytes) -> bytes:
    """Sign claims. `key`: 32 bytes."""
    return MAGIC + blake3(claims, key=key).digest() + claims


def unseal(key: bytes, ticket: bytes) -> bytes:
    """The claims. Raises: TicketRefusedError unless they were sealed with this key."""
    if len(ticket) < _START or not ticket.startswith(MAGIC):
        raise TicketRefusedError("not a placement ticket", param="ticket")
    claims = ticket[_START:]
    if not hmac.compare_digest(ticket[len(MAGIC) : _START], blake3(claims, key=key).digest()):
        raise TicketRefusedError("the placement ticket was not signed by a router of this cluster", param="ticket")
    return claims
