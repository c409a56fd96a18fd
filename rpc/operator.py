"""Calls of operators to routers: they prove that they have the cluster secret.

The proof is a MAC of the call's method and its message. Whoever overhears one can repeat this one call and make no other;
and no API key, of any tenant, makes an operator.
"""

from __future__ import annotations

import hmac

from blake3 import blake3

from diptych.common.errors import AuthenticationError
from diptych.common.secret import derive_key

METADATA = "diptych-operator"
SERVICE = "diptych.rpc.v1.Operations"
_PURPOSE = "calls of operators to routers"


def operator_key(secret: bytes) -> bytes:
    """Key of the proofs. `secret`: of the cluster."""
    return derive_key(secret, _PURPOSE)


def proof_of(key: bytes, method: str, message: bytes) -> str:
    """`method`: its name within SERVICE. `message`: encoded."""
    return blake3(method.encode() + b"\0" + message, key=key).hexdigest()


def check_proof(key: bytes, method: str, message: bytes, proof: str) -> None:
    """Raises: AuthenticationError."""
    if not hmac.compare_digest(proof_of(key, method, message).encode(), proof.encode()):
        raise AuthenticationError("only an operator who has the cluster secret may call this")
