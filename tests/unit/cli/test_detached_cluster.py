"""A detached cluster under test ends with the test process, whatever ends that one (diptych_tests.detached)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from diptych.cli.up.processes import ProcessIdentity
from diptych.cli.up.run_folder import RunFolder
from diptych.common import child
from diptych_tests import detached
from diptych_tests.detached import Detached
from diptych_tests.scripts import load_script
from diptych_tests.waiting import wait_until

hostile = load_script("tests/hostile.py")

WITHIN_S = 300.0
OWNS = """
import pathlib, signal, sys
from diptych.cli.up.run_folder import RunFolder
folder = RunFolder(pathlib.Path(sys.argv[1]))
folder.claim()
signal.pause()
"""
UP = """
import pathlib, signal, subprocess, sys, time
from diptych.cli.up.run_folder import RunFolder
signal.signal(signal.SIGINT, signal.default_int_handler)  # as `up` does: in the background of a shell it would be ignored
owner = subprocess.Popen([sys.executable, "-P", "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
folder = RunFolder(pathlib.Path(sys.argv[2]))
try:
    while folder.owner() is None:
        time.sleep(0.01)
    print("owned", flush=True)
    if sys.argv[3] == "hangs":
        signal.pause()
except KeyboardInterrupt:
    owner.kill()
"""
TESTS = """
import json, sys
from diptych_tests.detached import Detached
_, code = Detached(**json.loads(sys.argv[1])).start()
print(code, flush=True)
sys.stdin.read()
"""


def a_start(folder: Path, then: str) -> Detached:
    """As `up --detach`: what it starts is in a session of its own, and tied to nobody."""
    command = [sys.executable, "-P", "-c", UP, OWNS, str(folder / "run"), then]
    return Detached(command, dict(os.environ), str(folder), str(folder / "run"), str(folder / "log"), WITHIN_S)


def owner_of(folder: Path) -> ProcessIdentity:
    owner = RunFolder(folder / "run").owner()
    assert owner is not None
    return owner


@pytest.mark.parametrize("then", ["serves", "hangs"])
def test_15_a_killed_test_process_takes_its_detached_cluster_along(tmp_path: Path, then: str) -> None:
    """Also while the cluster starts."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", TESTS, json.dumps(asdict(a_start(tmp_path, then)))]
    tests = child.start(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        log = tmp_path / "log"
        wait_until(lambda: log.exists() and "owned" in log.read_text(), what="the cluster is there")
        owner = owner_of(tmp_path)
        if then == "serves":
            assert tests.stdout is not None
            assert tests.stdout.readline() == b"0\n"
        assert owner.alive()
    finally:
        tests.send_signal(signal.SIGKILL)
        tests.communicate()
    wait_until(lambda: not owner.alive(), what="the cluster has ended")
    left = str(tmp_path)
    wait_until(
        lambda: not any(left in " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])),
        what="nothing is left of it",
    )


def test_15_a_detached_cluster_is_killed_at_the_end_of_its_tests(tmp_path: Path) -> None:
    watcher, code = a_start(tmp_path, "serves").start()
    owner = owner_of(tmp_path)
    try:
        assert (code, owner.alive()) == (0, True)
    finally:
        detached.end(watcher)
    assert watcher.returncode == 0
    wait_until(lambda: not owner.alive(), what="the cluster has ended")


def test_15_whoever_ends_the_tests_leaves_the_watcher_of_a_detached_cluster_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make test-hostile` kills all that the tests have started. The watcher ends by itself, after the cluster."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-c", TESTS, json.dumps(asdict(a_start(tmp_path, "serves")))]
    tests = child.start(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    signalled: list[psutil.Process] = []
    send = hostile._signal

    def seen(processes: list[psutil.Process], signum: signal.Signals) -> None:
        signalled.extend(processes)
        send(processes, signum)

    monkeypatch.setattr(hostile, "_signal", seen)
    try:
        assert tests.stdout is not None
        assert tests.stdout.readline() == b"0\n"
        owner = owner_of(tmp_path)
        [watcher] = psutil.Process(tests.pid).children()
    finally:
        hostile._end(tests)
        tests.communicate()
    assert [one.pid for one in signalled] == [tests.pid]
    assert not watcher.is_running()
    wait_until(lambda: not owner.alive(), what="the cluster has ended")
