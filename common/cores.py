"""How many cores a process may use: of its affinity, within the CPU quota of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1. taskset or a container's cpuset may leave fewer cores than the machine has, and a quota less time than
    they have: of 2.5 cores 2 are counted, for threads that wait for their share spin and slow the others.

    Args: root: parent of proc/ and sys/; another folder in tests.
    """
    quotas = [*_quotas_v2(root), *_quotas_v1(root)]
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def _quotas_v2(root: Path) -> Iterator[float]:
    for folder in _groups(root, "", root / "sys/fs/cgroup"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _quotas_v1(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu", root / "sys/fs/cgroup/cpu"):
        quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit():  # -1: none
            yield int(quota) / int(period)


def _groups(root: Path, controller: str, mounted: Path) -> Iterator[Path]:
    """Folders of this process's control group and of those above it: each may have a quota. A container may see its own
    group as the mount's root, whatever /proc says."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            inner = mounted / path.lstrip("/")
            while inner != mounted and mounted in inner.parents:
                yield inner
                inner = inner.parent
            yield mounted


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
