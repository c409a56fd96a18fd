"""`diptych up --detach` and `diptych down`, as a person uses them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.cli.up.processes import ProcessIdentity

pytestmark = pytest.mark.multiproc

SHARED_MEMORY = Path("/dev/shm")


def held_by_processes() -> set[Path]:
    """Shared memory that a process has mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            found |= {Path(line.split(maxsplit=5)[5]) for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return found


def test_it_returns_once_it_serves(detached_cluster):
    assert "first tokens served" in (detached_cluster.folder.root.parent / "detach.log").read_text()


def test_down_leaves_logs_only(shared_memory_before, detached_cluster_to_end, cluster_module):
    cluster = detached_cluster_to_end
    state, root = cluster.state, cluster.folder.root
    stopped = subprocess.run(
        [sys.executable, "-P", "-m", "diptych.cli", "down"],
        env=cluster_module.environment(root), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.strip() == "stopped"
    all_workers = [ProcessIdentity(one.pid, one.start_time) for one in (state, *state.children)]
    assert not [process for process in all_workers if process.alive()]
    assert [path.name for path in root.iterdir()] == ["logs"]
    # What others on this machine make meanwhile is theirs, and goes.
    cluster_module.wait_until(
        lambda: not (set(SHARED_MEMORY.iterdir()) - shared_memory_before - held_by_processes()),
        what="no shared memory is left behind",
    )
