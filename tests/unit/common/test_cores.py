"""Cores that may be used: affinity and the quotas of control groups, as v1 and v2 show them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diptych.cli.bench.config import ClusterChoice
from diptych.common import cores
from diptych.common.cores import usable_cores


def test_1_cores_are_those_that_the_process_may_use():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
        assert ClusterChoice(decode_workers=0).threads == 1
    finally:
        os.sched_setaffinity(0, allowed)


V2, V1 = "0::/a/b", "9:name=systemd:/x\n4:cpu,cpuacct:/a/b\n0::/x"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (None, {}, 64),  # no control groups
        (V2, {}, 64),
        (V2, {"a/b/cpu.max": "max 100000"}, 64),
        (V2, {"a/b/cpu.max": "250000 100000"}, 2),
        (V2, {"a/b/cpu.max": "50000 100000"}, 1),
        (V2, {"a/b/cpu.max": "9900000 100000"}, 64),
        (V2, {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4),  # of a pod, say
        ("0::/", {"cpu.max": "300000 100000"}, 3),  # a container's own namespace
        ("0::/../b", {"cpu.max": "300000 100000"}, 3),  # a group outside of it
        (V2, {"a/b/cpu.max": "broken"}, 64),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, 64),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "150000", "cpu/a/b/cpu.cfs_period_us": "50000"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),  # docker: mounted at the root
        ("", {"cpu.max": "300000 100000"}, 64),
    ],
)
def test_5_the_quota_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert usable_cores(tmp_path) == expected
