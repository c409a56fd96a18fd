"""Child processes that are started by exec alone, and that end with the thread that started them.

    we --vfork + exec--> the tie (a bare interpreter) --exec--> the command

No code runs between fork and exec. A fork of a process that holds UCX, gRPC or CUDA runs their handlers, Python's at-fork
hooks and destructors in the copy: the copy takes file descriptors out of an epoll set that it shares with us (UCX aborts),
or waits for ever, with our ports and our memory, for a lock whose owner it does not have.

The tie asks the kernel for SIGKILL at our end, looks whether we ended before it could ask, and becomes the command. The wish
outlives exec, so it holds for any program, and also while that program hangs or is stopped. The kernel binds it to the thread
that called `start`, not to the process: call it on a thread that lives as long as the child may.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_TIE = (
    "import ctypes, os, sys\n"
    "if ctypes.CDLL(None).prctl(1, 9, 0, 0, 0): sys.exit('prctl(PR_SET_PDEATHSIG) failed')\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)

DEVNULL = subprocess.DEVNULL
Stream = int | IO[bytes] | None


def tied(command: Sequence[str]) -> list[str]:
    """The command line that ties itself to this process, then becomes `command`."""
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


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
    """Start a child that has none of our descriptors but those named, and is killed when the calling thread ends.

    Args:
        command: its program is a path, or found by PATH.
        env: the child's whole environment; None: ours.
        new_session: a Ctrl-C on the terminal reaches us alone.
    """
    return subprocess.Popen(
        tied(command),
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=new_session,
        close_fds=True,
    )
