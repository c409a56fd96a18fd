"""Which network interface has an address, and which host this is."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diptych.common.addresses import is_ipv6, is_loopback, is_wildcard
from diptych.common.errors import ConfigError

_SIOCGIFADDR = 0x8915


def numeric(host: str) -> str:
    """The address of `host`, looked up once, before anything is served; of a name with both kinds the IPv4 one.

    Raises: ConfigError.
    """
    try:
        return _resolve(host, socket.AF_INET)
    except OSError as error:
        try:
            return _resolve(host, socket.AF_INET6)
        except OSError:
            raise ConfigError("host", host, f"cannot be resolved: {error}") from error


def why_unreachable(theirs: str, ours: str) -> str:
    """Why a peer that advertises `theirs` cannot be meant by a worker at `ours`; empty: it can. Looks nothing up: this is
    asked on the transfer thread."""
    if is_loopback(theirs) and not is_loopback(ours):
        return f"it advertises the loopback address {theirs}, but it is not on this host ({ours})"
    return ""


def interface_of(host: str) -> str:
    """Name of the interface that has the address `host` (a name is resolved). Raises: ConfigError."""
    address = numeric(host)
    if is_wildcard(address):
        raise ConfigError("host", host, "must be one address of this host: peers connect to it")
    if is_ipv6(address):
        number, _, zone = address.partition("%")
        for name in _interfaces_of_ipv6(number):
            if zone in ("", name):
                return name
    for _, name in socket.if_nameindex():
        if _address_of(name) == address:
            return name
    raise ConfigError("host", host, f"no interface of this host has the address {address}")


@contextmanager
def ucx_address_family(host: str) -> Iterator[None]:
    """While a UCX worker is made: an interface may have addresses of both kinds, and peers are to come to the kind of `host`.
    What the operator has set stays."""
    name = "UCX_TCP_AF_PRIO"
    if name in os.environ or not is_ipv6(host):
        yield
        return
    os.environ[name] = "inet6,inet"
    try:
        yield
    finally:
        del os.environ[name]


def _resolve(host: str, family: socket.AddressFamily) -> str:
    return str(socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)[0][4][0])


def _interfaces_of_ipv6(address: str) -> list[str]:
    """From the kernel's table: address, index, prefix, scope, flags, name in each line."""
    wanted = ipaddress.IPv6Address(address).packed.hex()
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return []
    return [fields[5] for fields in map(str.split, lines) if fields[0] == wanted]


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            raw = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(raw[20:24])


def host_identity() -> bytes:
    """Equal for processes whose Unix sockets meet: one boot of one kernel, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}".encode()
