"""Child processes that end with this process, and the identity of a process beyond its pid."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from diptych.common import child
from diptych.common.addresses import is_ipv6
from diptych.common.errors import ConfigError

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of IPv6, too
_TRIES = 100
_given: set[int] = set()
"""Ports that this process gave to others."""
_MOST_HELD = 64
_held: deque[socket.socket] = deque()
"""For each of the latest of these a name in the kernel, so that no other process gives it. Whoever got an earlier one listens."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A pid is reused; a pid with its start time is not."""

    pid: int
    start_time: float

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Raises: ProcessLookupError."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            raise ProcessLookupError(f"no process {pid}") from None

    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return bool(
                abs(process.create_time() - self.start_time) < 0.05 and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False

    def send(self, signum: signal.Signals) -> None:
        if self.alive():
            os.kill(self.pid, signum)


def spawn(command: Sequence[str], *, log: Path | None, env: Mapping[str, str], cwd: Path) -> subprocess.Popen[bytes]:
    """Start a child that writes to `log`, or where this process does, in a new session: a Ctrl-C does not reach it, so
    the supervisor chooses the order.

    The kernel kills it when the calling thread ends: call it on the main thread. Raises: RuntimeError on another
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a child started here would end with this thread")
    if log is None:
        return child.start(command, env=env, cwd=cwd, new_session=True)
    with log.open("ab", buffering=0) as output:
        return child.start(command, env=env, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, new_session=True)


def free_port(host: str) -> int:
    """A port of `host` that nothing listens on, for a process that is started with it.

    It is outside the range from which the kernel takes ports of outgoing connections, of anybody: one of these could
    be taken before that process listens, seconds later. Only where that range leaves no others it is one of them. Nor is
    it one that was given before, by this process or by another `up`: whoever got it may not listen yet.
    """
    family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
    others = _ports_of_nobody(_EPHEMERAL.read_text() if _EPHEMERAL.exists() else "")
    # Any generator but the global one, which a test or a user may have seeded: two clusters would choose the same.
    tries = random.SystemRandom().sample(others, min(len(others), _TRIES))
    for port in [*(port for port in tries if port not in _given), *[0] * _TRIES]:
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            found = int(probe.getsockname()[1])
            if found not in _given and _hold(found):
                _given.add(found)
                return found
    raise ConfigError("host", host, "has no free port, or is not an address of this machine")


def _hold(port: int) -> bool:
    """False: a process that lives gave it. The name is of the network namespace, as the port is, and ends with the process."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0diptych-port-{port}")
    except OSError as error:
        name.close()
        return error.errno != errno.EADDRINUSE  # a kernel without such names: nothing is known
    _held.append(name)
    if len(_held) > _MOST_HELD:
        _held.popleft().close()
    return True


def _ports_of_nobody(ephemeral: str) -> range:
    """Ports from 10,000 on below the ephemeral range, which is given as the kernel's "low high"; empty: unknown, or
    there are fewer than a thousand."""
    low = int(ephemeral.split()[0]) if ephemeral else 0
    return range(10_000, low) if low >= 11_000 else range(0)


def require_free_port(field: str, host: str, port: int) -> None:
    """Raises: ConfigError when the port is in use, or the address cannot be bound."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError("host", host, f"is not an address: {error.strerror}") from None
    with socket.socket(address[0], socket.SOCK_STREAM) as probe:
        # Connections of an earlier run in TIME_WAIT do not block the port; a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address[4])
        except OSError as error:
            rule = f"cannot be used on {host}: {error.strerror}; choose another with --{field.replace('_', '-')}"
            raise ConfigError(field, port, rule) from None


def tail(path: Path | None, lines: int = 25) -> str:
    """The last lines of a log; empty when there is none. Without the settings that a process begins with: they are long,
    and would hide what it said."""
    if path is None:
        return ""
    try:
        found = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in found if not line.startswith('{"event": "settings"')][-lines:])
