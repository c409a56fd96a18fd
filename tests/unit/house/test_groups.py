"""With several test processes, a file and all files of a shared cluster stay in one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = ROOT / "tests" / "conftest.py"
FILE = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(6))
def test_one(number, {fixture}):
    with pathlib.Path("said").open("a") as file:
        file.write("{name} " + os.environ.get("PYTEST_XDIST_WORKER", "main") + "\\n")
"""
SHARED = """
def say(what):
    with pathlib.Path("said").open("a") as file:
        file.write(what + "\\n")
@pytest.fixture(scope="session")
def cluster():
    say("cluster begins")
    yield
    say("cluster ends")
@pytest.fixture(scope="session")
def of_cluster(cluster):
    yield
    say("of_cluster ends")
@pytest.fixture
def cluster_to_end(cluster): return cluster
@pytest.fixture(scope="session")
def colocated():
    say("colocated begins")
    yield
    say("colocated ends")
@pytest.fixture(scope="session")
def gated_cluster():
    say("gated begins")
    yield
    say("gated ends")
@pytest.fixture
def other(): return None
"""
NAMES = [
    ("0", "cluster_to_end"),
    ("a", "gated_cluster"),
    ("b", "other"),
    ("c", "cluster"),
    ("d", "gated_cluster"),
    ("e", "cluster, of_cluster"),
    ("f", "other"),
    ("g", "colocated"),
    ("h", "cluster, colocated"),
]
"""In the order in which they are collected."""


def run(folder: Path, *flags: str, names: list[tuple[str, str]] = NAMES) -> list[str]:
    """By the hooks of our own conftest, in a run of its own. Returns: what was said, line by line."""
    hooks = CONFTEST.read_text(encoding="utf-8").partition("GROUPS = ")[2].partition("@pytest.fixture(autouse=True)")[0]
    head = "from __future__ import annotations\nimport re, pathlib, pytest\nfrom functools import cache\n"
    head += "from diptych.common.collector import set_collector\n"
    (folder / "conftest.py").write_text(f"{head}ROOT = pathlib.Path(__file__).parent\n{SHARED}\nGROUPS = {hooks}")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "t").mkdir()
    for name, fixture in names:
        (folder / "t" / f"test_{name}.py").write_text(FILE.format(name=name, fixture=fixture))
    slow = ("schemathesis", "hypothesispytest", "anyio")  # plugins: to load
    without = [flag for name in slow for flag in ("-p", f"no:{name}")]
    command = [sys.executable, "-P", "-m", "pytest", "-q", *without, *flags, "t"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of the run we are in
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "said").read_text().splitlines()


def test_tests_are_shared_out_by_file_and_cluster(tmp_path: Path) -> None:
    said = run(tmp_path, "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
    where: dict[str, set[str]] = {}
    for line in said:
        name, worker = line.split()
        if len(name) > 1:
            continue
        where.setdefault(name, set()).add(worker)
    assert all(len(workers) == 1 for workers in where.values()), where
    assert where["a"] == where["d"]
    assert where["c"] == where["e"] == where["g"] == where["h"] == where["0"]


def test_a_file_that_uses_a_cluster_of_another_group_is_refused(tmp_path: Path) -> None:
    """It would start that one again, in another process."""
    both = [("a", "gated_cluster"), ("b", "cluster, gated_cluster")]
    with pytest.raises(AssertionError, match=r"test_b.py::test_one\[0\] uses \['cluster', 'gated_cluster'\]"):
        run(tmp_path, "-n", "0", names=both)


def test_a_shared_cluster_ends_with_the_last_test_that_uses_it(tmp_path: Path) -> None:
    """Also what depends on it. All tests of one come before those of the other, and what ends a cluster comes last."""
    said = [line.removesuffix(" main") for line in run(tmp_path, "-n", "0")]
    assert [line for n, line in enumerate(said) if said[n - 1 : n] != [line]] == [
        *("colocated begins", "g", "cluster begins", "h", "colocated ends"),
        *("c", "e", "0", "of_cluster ends", "cluster ends"),
        *("gated begins", "a", "d", "gated ends", "b", "f"),
    ]
