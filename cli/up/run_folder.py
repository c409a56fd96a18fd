"""The run folder of one cluster: its owner, its processes, and the logs, which alone remain at the end.

.run/up.pid        the supervisor, locked while it runs
.run/cluster.json  addresses and pids, for `diptych down`, `diptych chat` and the tests
.run/secret        the cluster's secret, made at each start
.run/redis.sock    the embedded Redis
.run/logs/         kept
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diptych.cli.up.processes import ProcessIdentity
from diptych.common.errors import ConfigError


@dataclass(slots=True)
class ChildState:
    name: str
    role: str
    pid: int
    start_time: float
    address: str
    log: str
    metrics: str = ""
    """host:port of its /metrics; empty for the router, which serves it on its HTTP port."""


@dataclass(slots=True)
class ClusterState:
    pid: int
    start_time: float
    ready: bool
    http_url: str
    grpc_address: str
    redis_url: str
    model: str
    children: list[ChildState] = field(default_factory=list)
    tls_cert: str = ""
    """The router's certificate; empty: no TLS."""
    secret_file: str = ""
    cluster_ca: str = ""
    cluster_cert: str = ""
    cluster_key: str = ""
    """Files of mTLS with the workers; empty: no mTLS."""


class RunFolder:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs = root / "logs"
        self.pid_file = root / "up.pid"
        self.state_file = root / "cluster.json"
        self.secret = root / "secret"
        self.redis_socket = root / "redis.sock"
        self._lock: int | None = None
        self._made = False

    def make(self) -> None:
        """Create the folder, for its owner alone. Idempotent. Raises: ConfigError when other users can write in it."""
        if not self.root.exists():
            self._made = True
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._keep_others_from_writing()
        self.logs.mkdir(exist_ok=True)

    def _keep_others_from_writing(self) -> None:
        """They could replace the secret, Redis's socket or the state. A folder that was there stays readable."""
        mode = self.root.stat().st_mode
        if not mode & (stat.S_IWGRP | stat.S_IWOTH):
            return
        try:
            if mode & stat.S_ISVTX:  # shared on purpose, as /tmp
                raise PermissionError
            self.root.chmod(stat.S_IMODE(mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        except PermissionError:
            rule = "other users can write in it: name a folder of your own with DIPTYCH_RUN_DIR"
            raise ConfigError("run_dir", str(self.root), rule) from None

    def unmake(self) -> None:
        """Remove a folder that was created here and is empty: a rejected start leaves nothing behind."""
        if self._made:
            with contextlib.suppress(OSError):  # there are logs
                self.logs.rmdir()
                self.root.rmdir()

    def claim(self) -> None:
        """Make this process the owner. Raises: ConfigError when a running cluster has this folder."""
        self.make()
        fd = os.open(self.pid_file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            rule = "a cluster runs from this folder already; stop it with `make down` or `diptych down`"
            raise ConfigError("run_dir", str(self.root), rule) from None
        self._lock = fd
        self._remove_leftovers()
        for log in self.logs.glob("*.log"):
            if log.name != "up.log":  # `up --detach` is already writing to it
                log.unlink()
        me = ProcessIdentity.of(os.getpid())
        os.truncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": me.pid, "start_time": me.start_time}).encode(), 0)

    def release(self) -> None:
        """Remove everything but the logs, if there are any. Idempotent."""
        if self._lock is None:
            return
        self._remove_leftovers()
        self.pid_file.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None
        self.unmake()

    def owner(self) -> ProcessIdentity | None:
        """The supervisor that holds this folder; None when there is none. The process that wrote the file and holds its
        lock is a supervisor, whatever the pid was reused for."""
        try:
            fd = os.open(self.pid_file, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except PermissionError:
            raise self._of_another_user() from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            written = json.loads(os.pread(fd, 4096, 0) or b"{}")
            identity = ProcessIdentity(int(written.get("pid", 0)), float(written.get("start_time", 0.0)))
            return identity if identity.alive() else None
        finally:
            os.close(fd)
        return None

    def remove_dead_cluster(self) -> bool:
        """Remove the files of a killed supervisor. Returns: whether there were any."""
        if self.owner() is not None:
            return False
        found = self.pid_file.exists() or self.state_file.exists() or self.secret.exists()
        self._remove_leftovers()
        self.pid_file.unlink(missing_ok=True)
        return found

    def write_state(self, state: ClusterState) -> None:
        partial = self.state_file.with_suffix(".new")
        partial.touch(mode=0o600)  # a given redis_url may hold a password
        partial.write_text(json.dumps(asdict(state), indent=1))
        partial.replace(self.state_file)

    def read_state(self) -> ClusterState | None:
        try:
            data: dict[str, Any] = json.loads(self.state_file.read_text())
        except FileNotFoundError:
            return None
        except PermissionError:
            raise self._of_another_user() from None
        children = [ChildState(**child) for child in data.pop("children")]
        return ClusterState(**data, children=children)

    def _of_another_user(self) -> ConfigError:
        rule = "belongs to another user's cluster: name the folder of your own with DIPTYCH_RUN_DIR, or an address"
        return ConfigError("run_dir", str(self.root), rule)

    def _remove_leftovers(self) -> None:
        for path in (self.state_file, self.state_file.with_suffix(".new"), self.secret, self.redis_socket):
            path.unlink(missing_ok=True)
