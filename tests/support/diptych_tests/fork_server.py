"""Child processes of tests that are forks of one process, in which their modules are imported already.

    test process --socket--> server --fork--> child

A worker with a fake model imports 850 modules, a router 1,150: 0.6 and 1.1 s of CPU for each process, most of what it costs a
test. The server imports them once for a test process, on first use, and ends with it. It has one thread, and neither gRPC, UCX
nor an event loop has been started there, so that a fork is as good as a start. A child has the arguments, variables, working
folder and descriptors that it is given and no others, and a session of its own. It runs its module from the beginning, as
`python -P -m` would, and is killed when the server ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from diptych.common import child

if TYPE_CHECKING:
    import pytest

SUPPORT = Path(__file__).resolve().parents[1]
IMPORTS = (
    "diptych.cli.main",
    "diptych.cli.worker_roles",
    "diptych.common.store.redis_store",
    "diptych.engine.ranks.process",
    "diptych.kvtransfer.build",
    "diptych.router.server",
    "diptych_tests.line_process",
    "diptych_tests.pd",
)
_MOST_BYTES = 1 << 18
"""Of a request: arguments and variables."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG."""


def takes(command: Sequence[str]) -> bool:
    """Whether `start` can run this command line: a module of this package, or the router."""
    match list(command):
        case [sys.executable, "-P", "-m", module, *arguments]:
            of_product = ("diptych.cli", "router"), ("diptych.engine.ranks.process", *arguments[:1])
            return module.startswith("diptych_tests.") or (module, *arguments[:1]) in of_product
    return False


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: child.Stream = child.DEVNULL,
    stdout: child.Stream = None,
    stderr: child.Stream = None,
    new_session: bool = False,
) -> ForkedProcess | subprocess.Popen[bytes]:
    """As child.start; a fork where `takes` says so, which has a session of its own."""
    if not takes(command):
        return child.start(
            command, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, new_session=new_session
        )
    with open(os.devnull, "r+b") as nothing:

        def descriptor(number: int, stream: child.Stream) -> int:
            found = nothing if stream == child.DEVNULL else stream
            return number if found is None else found if isinstance(found, int) else found.fileno()

        streams = [descriptor(number, stream) for number, stream in enumerate((stdin, stdout, stderr))]
        return server().start(command, env=os.environ if env is None else env, cwd=cwd, streams=streams)


class _Children:
    """In place of `diptych.common.child` in a module."""

    DEVNULL = child.DEVNULL
    environment = staticmethod(child.environment)
    start = staticmethod(start)


def fork_children_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this module under test starts by `child.start`, on any thread, are forks until the test ends."""
    server()
    monkeypatch.setattr(module, "child", _Children)


class ForkedProcess:
    """A child of the server, with what tests use of subprocess.Popen."""

    def __init__(self, pid: int, pidfd: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd, self._status = pidfd, status

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, signum: int) -> None:
        """Nothing happens where it has ended, also when its pid is another's by now."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if poll.poll(None if timeout_s is None else timeout_s * 1000.0):
                said = os.read(self._status, 16)
                # Without a word of its own the server has ended, and killed it.
                self.returncode = int(said) if said else -signal.SIGKILL
                os.close(self._status)
                os.close(self._pidfd)
        return self.returncode

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._status)
            os.close(self._pidfd)


class ForkServer:
    """The test process's end. Start it on the main thread: it ends with the thread that started it.

    Args: imports: modules that children find imported.
    """

    def __init__(self, imports: Sequence[str] = IMPORTS) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a server started here would end with this thread")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        self._lock = threading.Lock()
        path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
        with theirs:
            self.process = child.start(
                [sys.executable, "-P", "-m", __name__, *imports],
                stdin=theirs, stdout=child.DEVNULL, new_session=True,
                env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path},
            )  # fmt: skip

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        streams: Sequence[int],
        cwd: Path | None = None,
    ) -> ForkedProcess:
        """Run a command line that `takes` accepts. Args: streams: descriptors for its first three; they stay the caller's."""
        assert takes(command), command
        request = {"arguments": [*command[3:]], "env": dict(env), "cwd": str(cwd or Path.cwd())}
        read, write = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [*streams, write])
                answer, descriptors, _, _ = socket.recv_fds(self._socket, 64, 1)
        finally:
            os.close(write)
        if not answer:
            raise RuntimeError("the fork server has ended")
        return ForkedProcess(int(answer), descriptors[0], read)

    def close(self) -> None:
        """Ends the children, too."""
        self._socket.close()
        self.process.wait()


def server() -> ForkServer:
    """That of this process; started on first use."""
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = ForkServer()
        atexit.register(_server.close)
    return _server


_server: ForkServer | None = None


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Until the other end is closed. Returns: in a child, what it has to run."""
    libc, own = ctypes.CDLL(None), os.getpid()
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}
    """By descriptor of the process: its pid, and where its exit code is written."""
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                poll.unregister(descriptor)
                _report(descriptor, *running.pop(descriptor))
                continue
            body, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
            if not body:
                sys.exit()
            pid = os.fork()
            if not pid:
                requests.detach()
                for number, given in enumerate(descriptors[:3]):
                    os.dup2(given, number)
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                if libc.prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0) or os.getppid() != own:
                    os._exit(1)
                return dict(json.loads(body))
            *streams, status = descriptors
            for one in streams:
                os.close(one)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, status
            poll.register(pidfd, select.POLLIN)
            socket.send_fds(requests, [str(pid).encode()], [pidfd])


def _report(pidfd: int, pid: int, status: int) -> None:
    """A child has ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(status, str(code).encode())
    os.close(status)
    os.close(pidfd)


def _become(arguments: list[str], env: dict[str, str], cwd: str) -> str:
    """This process is that of a request. Returns: the name of its module."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    sys.argv = arguments
    sys.modules.pop(arguments[0], None)  # it is run again, as the main module
    return arguments[0]


def _requests() -> socket.socket:
    """The socket that is standard input, on a descriptor that no child's takes the place of."""
    found = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return found


if __name__ == "__main__":
    gc.disable()
    for _name in sys.argv[1:]:
        importlib.import_module(_name)
    gc.freeze()
    _module = _become(**_serve(_requests()))
    gc.enable()
    runpy.run_module(_module, run_name="__main__", alter_sys=True)
