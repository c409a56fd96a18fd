"""Keeps a set of child processes running and ends them in order. One thread, no callbacks: the owner calls `poll`.

start -> RUNNING --exits--> (start-up: the owner is notified and gives up)
                            (later: WAITING restart_delay_s -> started again, as a new process)
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from diptych.cli.up.processes import ProcessIdentity, spawn

STEADY_AFTER_S = 60.0
"""A child that ran this long is restarted without delay."""
KILL_S = 10.0
"""Seconds that the kernel gets to end a killed process."""


def restart_delay_s(failures: int) -> float:
    """Seconds before the next start after this many consecutive failures (the first one counts 1)."""
    return min(0.25 * 2.0 ** max(failures - 1, 0), 10.0)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep running.

    Args:
        command: makes the command line; called for every start, so that the port may change.
        log: the file that its output is appended to; None: it goes where this process's does.
        stop_group: children of one group are stopped together, groups in ascending order.
        env: additional variables of this child.
    """

    name: str
    role: str
    command: Callable[[], Sequence[str]]
    log: Path | None
    stop_group: int
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Child:
    spec: ChildSpec
    process: subprocess.Popen[bytes]
    identity: ProcessIdentity
    started_at: float
    failures: int = 0
    restart_at: float | None = None
    """Time of the next start; None while it runs."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A message for the owner. `exit_code` is of a child that exited; None: it was restarted."""

    child: str
    exit_code: int | None
    delay_s: float = 0.0
    pid: int = 0


def exit_reason(code: int) -> str:
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return f"stopped by {signal.Signals(code - 128).name}"
    if code < 0:
        if code == -signal.SIGKILL:
            return "killed by SIGKILL, as the kernel does where memory runs out"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


@dataclass(slots=True)
class Supervisor:
    env: Mapping[str, str]
    cwd: Path
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, spec: ChildSpec) -> Child:
        process = self._spawn(spec)
        child = Child(spec, process, _identity(process), time.monotonic())
        self.children[spec.name] = child
        return child

    def _spawn(self, spec: ChildSpec) -> subprocess.Popen[bytes]:
        return spawn(spec.command(), log=spec.log, env={**self.env, **spec.env}, cwd=self.cwd)

    def dead(self) -> list[Child]:
        """Children that exited; they are not restarted here."""
        return [child for child in self.children.values() if child.process.poll() is not None]

    def poll(self, now: float) -> list[Notice]:
        """Detect exits and restart what is due."""
        notices: list[Notice] = []
        for child in self.children.values():
            if child.restart_at is None and (code := child.process.poll()) is not None:
                child.failures = 1 if now - child.started_at > STEADY_AFTER_S else child.failures + 1
                delay_s = restart_delay_s(child.failures)
                child.restart_at = now + delay_s
                notices.append(Notice(child.spec.name, code, delay_s))
            elif child.restart_at is not None and now >= child.restart_at:
                child.process = self._spawn(child.spec)
                child.identity, child.started_at, child.restart_at = _identity(child.process), now, None
                notices.append(Notice(child.spec.name, None, pid=child.process.pid))
        return notices

    def stop(self, *, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> list[str]:
        """Send SIGTERM group by group, SIGKILL to the rest after `grace_s` of a group or once hurry() is true.

        SIGKILL also ends a process that is stopped or ignores signals. Returns: names of the children that had to be
        killed.
        """
        killed: list[str] = []
        for group in sorted({child.spec.stop_group for child in self.children.values()}):
            members = [child for child in self.children.values() if child.spec.stop_group == group]
            for child in members:
                if child.process.poll() is None:
                    child.process.terminate()
            until = time.monotonic() + grace_s
            while any(child.process.poll() is None for child in members) and time.monotonic() < until and not hurry():
                time.sleep(0.02)
            for child in members:
                if child.process.poll() is None:
                    child.process.kill()
                    killed.append(child.spec.name)
            for child in members:
                with suppress(subprocess.TimeoutExpired):  # it ends as soon as the kernel can end it
                    child.process.wait(timeout=KILL_S)
        self.children.clear()
        return killed


def _identity(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    try:
        return ProcessIdentity.of(process.pid)
    except ProcessLookupError:  # it exited; poll() reports it
        return ProcessIdentity(process.pid, 0.0)
