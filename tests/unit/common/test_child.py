"""Children are started by exec alone, and end with their parent in any state. Small children, no model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from diptych.common import child

pytestmark = pytest.mark.multiproc
PYTHON = (sys.executable, "-I", "-c")
DEADLINE_S = 60.0

NO_FORK = """
import asyncio, ctypes, os, sys, tempfile, pathlib
import uvloop
from diptych.common.compiled import CSources
from diptych.common.errors import NoWorkerError
from diptych.engine.grammar.compiler import ChildProcess, GrammarLimits

hook = ctypes.CFUNCTYPE(None)(lambda: os.write(2, b"forked"))
ctypes.CDLL(None).__register_atfork(hook, None, None, None)
os.register_at_fork(before=lambda: os.write(2, b"forked"))

async def main(folder):
    process = ChildProcess("none such", str(folder), GrammarLimits())
    try:
        await process.prepare()
    except NoWorkerError:
        print("started")
    process.kill()
    (folder / "a.c").write_text("int diptych_a(void) { return 1; }")
    CSources("a", folder, ("a.c",), ("-shared", "-fPIC")).build(folder, sys.argv[1])
    print("compiled")

with tempfile.TemporaryDirectory() as folder:
    uvloop.run(main(pathlib.Path(folder)))
if len(sys.argv) > 2:
    os.fork() or os._exit(0)  # the hooks do see one
"""


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """A fake compiler that only creates the output file."""
    path = tmp_path / "compiler"
    path.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo > "$2"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("forks", [False, True])
def test_2_4_a_serving_process_starts_its_children_without_a_fork(compiler: str, forks: bool) -> None:
    command = [sys.executable, "-c", NO_FORK, compiler, *(["fork"] if forks else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.split() == ["started", "compiled"]
    assert ("forked" in done.stderr) == forks, done.stderr


@contextmanager
def reading(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=DEADLINE_S)
        if process.stdout is not None:
            process.stdout.close()


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_ended(pid: int) -> None:
    until = time.monotonic() + DEADLINE_S
    while not ended(pid):
        assert time.monotonic() < until, f"{pid} is left behind"
        time.sleep(0.02)


PARENT = """
import signal, sys
from diptych.common import child
process = child.start([sys.executable, "-I", "-c", sys.argv[1]], stdout=1)
process.wait()
"""
SAYS = "import os, signal, sys; os.write(1, b'%d\\n' % os.getpid()); "


@pytest.mark.parametrize(
    ("state", "program"),
    [
        ("serving", "signal.pause()"),
        ("deaf to SIGTERM", "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"),
        ("signals blocked", "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); signal.pause()"),
        ("stopped", "os.kill(os.getpid(), signal.SIGSTOP)"),
        ("hung in a lock", "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"),
    ],
)
def test_2_8_a_child_ends_with_its_parent(state: str, program: str) -> None:
    command = [sys.executable, "-c", PARENT, SAYS + program]
    with reading(child.start(command, stdout=subprocess.PIPE)) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert pid != parent.pid
        if state == "stopped":
            until = time.monotonic() + DEADLINE_S
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                assert time.monotonic() < until
                time.sleep(0.02)
        assert not ended(pid)
        parent.kill()
        wait_ended(pid)


GRANDPARENT = """
import sys
from diptych.common import child
process = child.start([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=1)
process.wait()
"""


def test_2_8_a_grandchild_ends_too() -> None:
    command = [sys.executable, "-c", GRANDPARENT, PARENT, SAYS + "os.kill(os.getpid(), signal.SIGSTOP)"]
    with reading(child.start(command, stdout=subprocess.PIPE)) as grandparent:
        assert grandparent.stdout is not None
        pid = int(grandparent.stdout.readline())
        grandparent.kill()
        wait_ended(pid)


def test_2_8_a_parent_that_ended_before_the_tie_was_made_is_noticed() -> None:
    words = child.with_death_signal([*PYTHON, "print('ran')"])
    assert str(os.getpid()) in words
    of_a_dead_parent = [word if word != str(os.getpid()) else "1" for word in words]
    done = subprocess.run(of_a_dead_parent, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    done = subprocess.run(words, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, b"ran\n")


COUNT = "import os, sys; sys.stdout.write(str(len(os.listdir('/proc/self/fd'))))"


def test_a_child_has_none_of_our_descriptors() -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)  # as libraries make them
    try:
        with reading(child.start([*PYTHON, COUNT], stdout=subprocess.PIPE)) as process:
            assert process.stdout is not None
            assert process.stdout.read() == b"4"  # the last one is of the listing itself
    finally:
        os.close(reader)
        os.close(writer)


def test_a_missing_program_is_known_by_its_exit_code() -> None:
    with reading(child.start(["/none/such"], stderr=subprocess.DEVNULL)) as process:
        assert process.wait(timeout=DEADLINE_S) == 1
