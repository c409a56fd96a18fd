"""`diptych restart WORKER -- COMMAND`: one step of a roll-out. It ends when a router places on the new incarnation.

While the old incarnation drains and its lease holds, a restarting worker looks unchanged: only another incarnation
shows that it is back.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from diptych.common.errors import ConfigError, NoWorkerError

POLL_S = 0.5


class Status(Protocol):
    def get(self) -> dict[str, Any]:
        """A router's /status.json. Raises: NoWorkerError when it cannot be reached."""
        ...


def run_restart(
    router: Status,
    worker: str,
    command: Sequence[str],
    *,
    timeout_s: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run the command, and wait until the router uses another incarnation of the worker than before.

    Returns: 0; the command's exit code if it failed; 1 when the worker is not back in time.
    Raises: ConfigError when the router has no such worker, NoWorkerError when it cannot be reached beforehand.
    """
    before = _find(router.get(), worker)
    if before is None:
        known = ", ".join(sorted(one["id"] for one in _workers(router.get()))) or "none"
        raise ConfigError("worker", worker, f"the router has no such worker; it has: {known}")
    code = subprocess.run(list(command), check=False).returncode
    if code != 0:
        print(f"error: {command[0]} ended with exit code {code}", file=sys.stderr)
        return code
    until = now() + timeout_s
    while True:
        why = _why_not_back(router, worker, before["incarnation"])
        if not why:
            print(f"{worker} is back", flush=True)
            return 0
        if now() >= until:
            print(f"error: {worker} is not back after {timeout_s:.0f} s: {why}", file=sys.stderr)
            return 1
        sleep(POLL_S)


def _why_not_back(router: Status, worker: str, old: str) -> str:
    try:
        found = _find(router.get(), worker)
    except NoWorkerError as error:
        return error.message
    if found is None:
        return "the router does not see it"
    if found["incarnation"] == old:
        return "the router still sees the old incarnation"
    why: str = found["why_not"]
    return why


def _find(status: dict[str, Any], worker: str) -> dict[str, Any] | None:
    return next((one for one in _workers(status) if one["id"] == worker), None)


def _workers(status: dict[str, Any]) -> list[dict[str, Any]]:
    workers: list[dict[str, Any]] = status["cluster"]["workers"]
    return workers
