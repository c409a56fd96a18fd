"""A failing test reports the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diptych_tests import machine

ROOT = Path(__file__).resolve().parents[3]
CASES = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("broken")

def test_fails():
    assert False

def test_set_up_fails(broken):
    pass

def test_passes():
    pass
"""


def run_pytest(folder: Path, *flags: str, **env: str) -> str:
    tests = folder / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    (tests / "test_cases.py").write_text(CASES)
    command = [
        *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"),
        *("-o", f"pythonpath={ROOT / 'tests' / 'support'}", *flags, str(tests)),
    ]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_a_failure_names_vectors_compiler_cores_and_load(tmp_path):
    """In a process of xdist's, whose reports cross a pipe; also where it was the set-up that failed."""
    said = run_pytest(tmp_path, "-n", "1", DIPTYCH_NATIVE_LANES="8", CC="no-such-compiler")
    assert said.count("- machine -") == 2
    for words in (
        "floats a register, DIPTYCH_NATIVE_LANES=8",
        "compiler: no compiler (CC=no-such-compiler is not installed)",
        f"cores: {len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "(1, 5, 15 minutes)",
    ):
        assert said.count(words) == 2, said


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and util-linux")
def test_15_a_machine_without_ipv6_is_known_and_named():
    """Tests that need it are left out there, and the detached cluster uses IPv4."""
    program = "from diptych_tests import machine; print(machine.has_ipv6(), 'no IPv6' in machine.facts())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["unshare", "--net", sys.executable, "-P", "-c", program]  # a network whose loopback is not up
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_the_compiler_is_named_with_its_version(compiler):
    [line] = [line for line in machine.facts() if line.startswith("compiler")]
    assert line.startswith(f"compiler: {compiler}: ")
    assert any(mark.isdigit() for mark in line)
