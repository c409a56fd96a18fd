"""Addresses: a loopback one is of no use to a peer on another host."""

from __future__ import annotations

import socket

import pytest

from diptych.common.addresses import is_loopback
from diptych.common.errors import ConfigError
from diptych.kvtransfer.fabric.net_interfaces import interface_of, numeric, why_unreachable
from diptych_tests.machine import NEEDS_IPV6


@pytest.mark.parametrize(
    ("theirs", "ours", "reachable"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", True),
        ("127.0.0.1", "10.0.0.5", False),
        ("127.9.9.9", "10.0.0.5", False),
        ("10.0.0.6", "10.0.0.5", True),
        ("10.0.0.6", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::1", "fd00::2", False),
        ("fd00::3", "fd00::2", True),
    ],
)
def test_a_loopback_address_is_refused_by_a_reader_on_another_host(theirs: str, ours: str, reachable: bool) -> None:
    why = why_unreachable(theirs, ours)
    assert (why == "") == reachable
    if why:
        assert theirs in why
        assert ours in why


def test_a_name_is_not_looked_up_on_the_transfer_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(*args: object) -> None:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert why_unreachable("some.host.example", "10.0.0.5") == ""
    assert why_unreachable("localhost", "10.0.0.5")
    assert not why_unreachable("10.0.0.6", "some.host.example")


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") in {name for _, name in socket.if_nameindex()}
    assert is_loopback("127.0.0.1")
    assert not is_loopback("no.such.host.invalid")
    assert is_loopback("localhost")
    assert numeric("127.0.0.1") == "127.0.0.1"
    for host in ("0.0.0.0", "203.0.113.9"):
        with pytest.raises(ConfigError):
            interface_of(host)


@NEEDS_IPV6
def test_the_interface_of_an_ipv6_address() -> None:
    """Issue 15, 4.12: only IPv4 was known."""
    assert numeric("::1") == "::1"
    assert interface_of("::1") == interface_of("127.0.0.1") == "lo"
    for host in ("::", "2001:db8::9"):
        with pytest.raises(ConfigError, match="host="):
            interface_of(host)


def test_a_name_that_has_an_ipv6_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(host: str, port: object, family: socket.AddressFamily, kind: object) -> list[object]:
        if family != socket.AF_INET6:
            raise socket.gaierror(-9, "Address family for hostname not supported")
        return [(family, kind, 6, "", ("fd00::2", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert numeric("six.example") == "fd00::2"
