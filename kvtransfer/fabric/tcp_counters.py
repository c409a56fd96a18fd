"""Whether bytes arrived over TCP, by the kernel's counters of each socket: UCX chooses a path for each peer and does not report
it."""

from __future__ import annotations

import os
import socket
import stat
import struct

_BYTES_RECEIVED = struct.Struct("<Q")
_AT = 128
"""Offset of tcpi_bytes_received in struct tcp_info (Linux 4.1 and later)."""
_SHARE = 0.5


def tcp_bytes_received() -> int:
    """What all TCP sockets of this process have received so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AT + _BYTES_RECEIVED.size)
        except OSError:
            continue  # closed meanwhile
        if len(raw) >= _AT + _BYTES_RECEIVED.size:
            total += _BYTES_RECEIVED.unpack_from(raw, _AT)[0]
    return total


def carried_by_tcp(size_bytes: int, before: int, after: int) -> bool:
    """Whether most of `size_bytes` came through the sockets between the two readings of `tcp_bytes_received`."""
    return after - before >= _SHARE * size_bytes
