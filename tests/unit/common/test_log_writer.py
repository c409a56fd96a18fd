"""A log that nobody reads blocks nobody, loses nothing in silence and keeps its order."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diptych.common.observe import log_writer
from diptych.common.observe.log_writer import ThreadedWriter
from diptych_tests import waiting

WAIT_S = 120.0
LINE = "x" * 1000
MORE_THAN_A_PIPE = 1000  # lines
SETUP = "import sys; from diptych.common.observe.logging import setup_logging; setup_logging(); import structlog\n"


def report(num_lines: int) -> logging.LogRecord:
    return record(f"{num_lines} dropped")


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, "", 0, text, (), None)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ours, theirs = os.pipe()
    yield ours, theirs
    for fd in (ours, theirs):
        os.close(fd)


def read_all(fd: int, until: Callable[[str], bool]) -> list[str]:
    text = ""
    while not until(text):
        text += os.read(fd, 1 << 16).decode()
    return text.splitlines()


def test_15_a_full_pipe_drops_what_is_too_much_and_says_how_much(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    writer = ThreadedWriter(theirs, report, most_queued=MORE_THAN_A_PIPE)
    writer.emit(record(f"0 {LINE * MORE_THAN_A_PIPE}"))
    waiting.wait_until(writer._queue.empty, what="the thread is held by the first line, which no pipe takes")
    for i in range(1, 5 * MORE_THAN_A_PIPE):
        writer.emit(record(f"{i} {LINE}"))
    kept = 1 + MORE_THAN_A_PIPE
    lines = read_all(ours, lambda text: text.count("\n") == kept)
    assert [line.split()[0] for line in lines] == [str(i) for i in range(kept)]
    writer.emit(record("afterwards"))
    dropped, afterwards = read_all(ours, lambda text: text.endswith("afterwards\n"))
    assert dropped == f"{5 * MORE_THAN_A_PIPE - kept} dropped"
    assert afterwards == "afterwards"
    writer.close()
    writer._thread.join(WAIT_S)
    assert not writer._thread.is_alive()


def test_15_what_is_logged_is_written_when_the_log_is_flushed_and_after_its_end(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    writer = ThreadedWriter(theirs, report)
    writer.emit(record("one"))
    writer.flush()
    assert os.read(ours, 100) == b"one\n"
    writer.close()
    writer.close()
    writer.flush()
    writer.emit(record("an object that ends late"))
    assert os.read(ours, 100) == b"an object that ends late\n"


def test_a_warning_does_not_wait_for_the_end_of_a_pause(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "PAUSE_S", 10 * WAIT_S)
    ours, theirs = pipe
    writer = ThreadedWriter(theirs, report)
    writer.write("one")
    assert os.read(ours, 100) == b"one\n"
    writer.write("two")
    writer.write("the last", urgent=True)
    assert "".join(read_all(ours, lambda text: text.endswith("last\n"))) == "twothe last"
    writer.close()


def test_15_a_descriptor_that_does_not_block_loses_nothing(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    os.set_blocking(theirs, False)
    writer = ThreadedWriter(theirs, report)
    for i in range(MORE_THAN_A_PIPE):
        writer.emit(record(f"{i} {LINE}"))
    lines = read_all(ours, lambda text: text.count("\n") == MORE_THAN_A_PIPE)
    assert lines == [f"{i} {LINE}" for i in range(MORE_THAN_A_PIPE)]
    writer.close()


def test_15_the_end_does_not_wait_for_a_reader_that_stands_still(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class Unset(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    writer = ThreadedWriter(pipe[1], report)
    for _ in range(MORE_THAN_A_PIPE):
        writer.emit(record(LINE))
    with monkeypatch.context() as patched:
        patched.setattr(log_writer.threading, "Event", Unset)
        writer.flush()  # as logging.shutdown does
        writer.close()
    assert waits == [log_writer.FLUSH_S, 0.0]
    writer.emit(record("lost"))
    read_all(pipe[0], lambda text: text.count("\n") == MORE_THAN_A_PIPE)  # lets the thread end
    writer._thread.join(WAIT_S)
    assert not writer._thread.is_alive()


def test_15_a_process_works_on_while_its_log_pipe_is_full() -> None:
    program = (
        f"{SETUP}for i in range({MORE_THAN_A_PIPE}): structlog.get_logger().info('line', i=i, text='{LINE}')\n"
        "print('goes on', flush=True); sys.stdin.read(); raise ValueError('the end')"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = os.environ | {"DIPTYCH_LOG_JSON": "1"}
    with subprocess.Popen(  # type: ignore[call-overload]  # ends: with its stdin
        command, **pipes, text=True, env=env
    ) as process:
        late = threading.Timer(WAIT_S, process.kill)
        late.start()
        assert process.stdout.readline() == "goes on\n"
        _, written = process.communicate(timeout=WAIT_S)
        late.cancel()
    *lines, end = [json.loads(line) for line in written.splitlines()]
    assert [line["i"] for line in lines] == list(range(MORE_THAN_A_PIPE))
    assert end["event"] == "uncaught exception"
    assert "the end" in json.dumps(end["exception"])
    assert process.returncode == 1


def test_lines_that_a_full_disk_does_not_take_are_counted_and_reported_once_it_does(tmp_path: Path) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    writer = ThreadedWriter(fd, report)
    for i in range(7):
        writer.emit(record(f"{i}"))
        writer._written(WAIT_S)
    disk = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(disk, fd)
    writer.emit(record("afterwards"))
    writer.emit(record("and on"))
    writer.close()
    for one in (fd, disk):
        os.close(one)
    assert (tmp_path / "log").read_text().splitlines() == ["7 dropped", "afterwards", "and on"]


def test_a_line_that_is_cut_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with room for the beginning of a line."""
    room, real = [7], os.write

    def write(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "no space")
        done = real(fd, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(log_writer.os, "write", write)
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    writer = ThreadedWriter(fd, report)
    writer.emit(record("whole"))
    writer._written(WAIT_S)
    writer.emit(record("cut off"))
    writer._written(WAIT_S)
    room[0] = 1000
    writer.emit(record("afterwards"))
    writer.close()
    os.close(fd)
    assert (tmp_path / "log").read_text().splitlines() == ["whole", "c", "1 dropped", "afterwards"]
