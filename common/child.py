"""Child processes that are started by exec and killed when the starting thread ends.

    this process --vfork + exec--> launcher (a bare interpreter) --exec--> the command

No code runs between fork and exec. In a fork of a process with UCX, gRPC or CUDA, their handlers, Python's at-fork
hooks and destructors would run in the copy. The copy would remove file descriptors from an epoll set shared with the
parent (UCX aborts), or deadlock on a lock whose owner does not exist in the copy, while it holds the parent's ports and
memory.

The launcher sets PR_SET_PDEATHSIG to SIGKILL, exits if the parent has ended meanwhile, and execs the command. The
setting survives exec, so it holds for any program, also one that hangs or is stopped. The kernel binds it to the thread
that called `start`, not to the process: call it on a thread that lives as long as the child may.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_LAUNCHER_CODE = (
    "import ctypes, os, sys\n"
    "if ctypes.CDLL(None).prctl(1, 9, 0, 0, 0): sys.exit('prctl(PR_SET_PDEATHSIG) failed')\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)

PRIVATE = frozenset({"DIPTYCH_REDIS_URL", "DIPTYCH_API_KEY", "HF_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS"})
"""Variables that may hold a password or a key."""


def environment(**more: str) -> dict[str, str]:
    """Of a child that needs none of PRIVATE: this process's without them, and with `more`."""
    return {name: value for name, value in os.environ.items() if name not in PRIVATE} | more


DEVNULL = subprocess.DEVNULL
Stream = int | IO[bytes] | None


def with_death_signal(command: Sequence[str]) -> list[str]:
    """The command line that sets the parent-death signal and then execs `command`."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER_CODE, str(os.getpid()), *command]


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: Stream = DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a child that inherits only the given descriptors and is killed when the calling thread ends.

    Args:
        command: its program is a path, or found by PATH.
        env: the child's whole environment; None: this process's.
        new_session: a Ctrl-C on the terminal does not reach the child.
    """
    return subprocess.Popen(
        with_death_signal(command),
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=new_session,
        close_fds=True,
    )
