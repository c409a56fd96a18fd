"""One TLS context for all clients of httpx that ask for its default.

httpx reads 140 certificates for each client and for each `httpx.get`, before it knows that the URL is plain http: some 40 ms of
CPU, half of the time of a test that asks a server of its own, and of each poll of a cluster that starts."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from functools import cache
from typing import Any

import httpx
from httpx._transports import default

NAMED_BY = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that choose other certificates: each choice has a context of its own."""
_original: Callable[..., ssl.SSLContext] = httpx.create_ssl_context


@cache
def _shared(*_: str | None) -> ssl.SSLContext:
    return _original()


def _context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is True and cert is None and trust_env:
        return _shared(*(os.environ.get(name) for name in NAMED_BY))
    return _original(verify=verify, cert=cert, trust_env=trust_env)


def install() -> None:
    """For this process."""
    default.create_ssl_context = _context  # type: ignore[attr-defined]
