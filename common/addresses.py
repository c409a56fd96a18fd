"""Hosts and ports as text, for IPv4 and IPv6. Nothing here resolves a name."""

from __future__ import annotations

import ipaddress
import re

LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
_SHORT_LOOPBACK = re.compile(r"127(\.\d{1,3}){1,3}")
"""The system's resolver also accepts short forms such as 127.1."""


def host_port(host: str, port: int) -> str:
    """The form of URLs and gRPC addresses: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ipv6(host: str) -> bool:
    """Whether `host` is an IPv6 address."""
    return ":" in host


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach `host`. A name counts only if it means this host everywhere."""
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
    """Whether `host` means all addresses of a host. One can listen on it, but not connect to it."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def loopback_beside(host: str) -> str:
    """The loopback address of the same family (IPv4 or IPv6) as `host`."""
    return LOOPBACK_6 if is_ipv6(host) else LOOPBACK


def reachable(host: str) -> str:
    """The address at which a process of this host reaches a server that listens on `host`."""
    return loopback_beside(host) if is_wildcard(host) else host
