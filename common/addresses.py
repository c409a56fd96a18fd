"""Hosts and ports as text, of IPv4 and IPv6 alike. Nothing here looks a name up."""

from __future__ import annotations

import ipaddress
import re

LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
_SHORT_LOOPBACK = re.compile(r"127(\.\d{1,3}){1,3}")
"""The system's resolver takes 127.1, too."""


def host_port(host: str, port: int) -> str:
    """As it stands in URLs and in gRPC's addresses: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ipv6(host: str) -> bool:
    """It is spelled as an IPv6 address."""
    return ":" in host


def is_loopback(host: str) -> bool:
    """Only processes of this host can reach it. Of names only those that mean this host everywhere are known."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _SHORT_LOOPBACK.fullmatch(host) is not None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_wildcard(host: str) -> bool:
    """All addresses of a host: to listen on, nothing that a peer could be told."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def loopback_beside(host: str) -> str:
    """The loopback address of `host`'s family."""
    return LOOPBACK_6 if is_ipv6(host) else LOOPBACK


def reachable(host: str) -> str:
    """Where a process of this host reaches a server that listens on `host`."""
    return loopback_beside(host) if is_wildcard(host) else host
