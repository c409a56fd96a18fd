"""Which network interface has an address, and which host this is."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from diptych.common.errors import ConfigError

_SIOCGIFADDR = 0x8915


def is_loopback(host: str) -> bool:
    """Looks nothing up: this is asked on the transfer thread. Workers advertise numbers (`numeric`); of names only those that
    mean this host everywhere are known."""
    if host.rstrip(".").lower() == "localhost" or host.rstrip(".").lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def numeric(host: str) -> str:
    """The IPv4 address of `host`, looked up once, before anything is served. Raises: ConfigError."""
    try:
        return _resolve(host)
    except OSError as error:
        raise ConfigError("host", host, f"cannot be resolved: {error}") from error


def why_unreachable(theirs: str, ours: str) -> str:
    """Why a peer that advertises `theirs` cannot be meant by a worker at `ours`; empty: it can."""
    if is_loopback(theirs) and not is_loopback(ours):
        return f"it advertises the loopback address {theirs}, but it is not on this host ({ours})"
    return ""


def interface_of(host: str) -> str:
    """Name of the interface whose IPv4 address is `host` (a name is resolved). Raises: ConfigError."""
    address = numeric(host)
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError("host", host, "must be one address of this host: it is what peers are told")
    for _, name in socket.if_nameindex():
        if _address_of(name) == address:
            return name
    raise ConfigError("host", host, f"no interface of this host has the address {address}")


def _resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


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
