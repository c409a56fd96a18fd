"""With several test processes, a file and all files of a shared cluster stay in one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = ROOT / "tests" / "conftest.py"
FILE = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(6))
def test_one(number, {fixture}):
    with pathlib.Path("said").open("a") as file:
        file.write("{name} " + os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""
SHARED = """
import pytest
@pytest.fixture
def cluster(): return None
@pytest.fixture
def gated_cluster(): return None
@pytest.fixture
def other(): return None
"""


def test_tests_are_shared_out_by_file_and_cluster(tmp_path: Path) -> None:
    """By the hooks of our own conftest, in a run of its own with two processes."""
    hooks = CONFTEST.read_text(encoding="utf-8").partition("_CLUSTER = ")[2].partition("def _load(")[0]
    head = "import re, pathlib, pytest\nfrom functools import cache\nROOT = pathlib.Path(__file__).parent\n"
    (tmp_path / "conftest.py").write_text(f"{head}{SHARED}\n_CLUSTER = {hooks}")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    names = [
        ("a", "cluster"),
        ("b", "cluster"),
        ("c", "gated_cluster"),
        ("d", "gated_cluster"),
        ("e", "other"),
        ("f", "other"),
    ]
    (tmp_path / "t").mkdir()
    for name, fixture in names:
        (tmp_path / "t" / f"test_{name}.py").write_text(FILE.format(name=name, fixture=fixture))
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]
    done = subprocess.run([*command, "t"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    where: dict[str, set[str]] = {}
    for line in (tmp_path / "said").read_text().splitlines():
        name, worker = line.split()
        where.setdefault(name, set()).add(worker)
    assert all(len(workers) == 1 for workers in where.values()), where
    assert where["a"] == where["b"]
    assert where["c"] == where["d"]
