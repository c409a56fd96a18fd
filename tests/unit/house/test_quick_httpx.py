"""Clients of httpx share one context only where they ask for the default; it is httpx's own (tests/conftest.py installs it)."""

from __future__ import annotations

import ssl
from typing import Any

import httpx
import pytest

from diptych_tests import quick_httpx


def context_of(**options: Any) -> ssl.SSLContext:
    with httpx.Client(**options) as client:
        pool = client._transport._pool  # type: ignore[attr-defined]
        context: ssl.SSLContext = pool._ssl_context
        return context


def test_the_default_is_shared_and_checks_what_httpx_checks() -> None:
    ours, theirs = context_of(), httpx.create_ssl_context()
    assert context_of() is ours is not theirs
    assert ours.cert_store_stats() == theirs.cert_store_stats()
    assert (ours.verify_mode, ours.check_hostname) == (theirs.verify_mode, True)
    assert ours.get_ca_certs(binary_form=True) == theirs.get_ca_certs(binary_form=True)


def test_who_asks_for_another_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ssl.create_default_context()
    assert context_of(verify=own) is own
    ours = context_of()
    assert context_of(trust_env=False) is not ours
    monkeypatch.setattr(quick_httpx, "NAMED_BY", ("PATH",))  # as if it had been set since
    assert context_of() is not ours
