"""Runs `diptych up --detach` for a test process, and kills the cluster once that process is gone, even by SIGKILL.

What `up --detach` starts is meant to outlive who started it, so the kernel ties it to nobody. This program stands between: its
first line of stdin is the command (JSON, see `Detached`), its output is the command's exit code, and the end of its stdin, which
comes with the end of the test process however that ends, is the end of the cluster. The command itself is run as a user
runs it.

    python -P detached.py
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diptych.cli.up.run_folder import RunFolder

ENDS_S = 120.0
"""A command that was asked to end has so long; then it is killed."""
LOOK_MS = 100
"""Between two looks whether the command has ended."""


@dataclass(frozen=True)
class Detached:
    """A command that starts a cluster from `run_folder` and ends once it serves. All paths as text; `log` gets its output;
    after `within_s` it is asked to end."""

    command: Sequence[str]
    env: Mapping[str, str]
    folder: str
    run_folder: str
    log: str
    within_s: float

    def start(self) -> tuple[subprocess.Popen[bytes], int]:
        """Blocks until the command has ended. Returns: this program's process, whose stdin is the cluster's life, and the
        command's exit code."""
        watcher = subprocess.Popen(  # ends: with its stdin
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # what ends the tests' process group must not end it
        )
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        watcher.stdin.write(json.dumps(asdict(self)).encode() + b"\n")
        watcher.stdin.flush()
        return watcher, int(watcher.stdout.readline())


def end(watcher: subprocess.Popen[bytes]) -> None:
    """Kill the cluster, if it still runs."""
    watcher.communicate()


def main() -> None:
    asked = Detached(**json.loads(os.read(0, 1 << 20)))
    try:
        with Path(asked.log).open("wb") as output:
            command = subprocess.Popen(  # ends: asked to, below
                asked.command, env=asked.env, cwd=asked.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        life, until = select.poll(), time.monotonic() + asked.within_s
        life.register(0, select.POLLIN | select.POLLHUP)
        while command.poll() is None:
            if life.poll(LOOK_MS) or time.monotonic() > until:
                command.send_signal(signal.SIGINT)  # it ends what it has started
                try:
                    command.wait(ENDS_S)
                except subprocess.TimeoutExpired:
                    command.kill()
        print(command.returncode, flush=True)
        os.read(0, 1)
    except BrokenPipeError:
        pass
    finally:
        owner = RunFolder(Path(asked.run_folder)).owner()
        if owner is not None:
            owner.send(signal.SIGKILL)  # the kernel kills its children with it


if __name__ == "__main__":
    main()
