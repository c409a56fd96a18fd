"""Log lines on their way to stderr: a thread writes them, so that a reader who stands still blocks nobody.

    emit(record)   formats on the caller's thread
    write(line)    puts the line in a queue; a full queue counts it instead
                   the next line that finds room comes after one that says how many were dropped
    the thread     writes what is queued in one go, in order, and then pauses: lines that follow each other closely
                   wake it once, not each; what a full disk does not take is counted, and said once it takes lines again
    close()        waits for the thread, for a bounded time; from then on lines are written at once

Errors of the interpreter and of libraries in C write to stderr themselves, as ever.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from itertools import accumulate

MOST_QUEUED = 10_000
"""Lines: some seconds of a busy router, a few MB."""
FLUSH_S = 2.0
"""For a reader that takes its time when the process ends."""
PAUSE_S = 0.05
"""Between two writes: each wakes a thread, which takes the interpreter from the others."""


class ThreadedWriter(logging.Handler):
    """Args:
    fd: where lines go; it is not closed.
    dropped: makes the record that reports so many dropped lines.
    """

    def __init__(self, fd: int, dropped: Callable[[int], logging.LogRecord], *, most_queued: int = MOST_QUEUED) -> None:
        super().__init__()
        self._fd, self._report, self._most = fd, dropped, most_queued
        self._queue: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        """Lines; events to set once all before them is written; None: the thread ends."""
        self._hurried = threading.Event()
        """Ends the pause between two writes."""
        self._lock = threading.RLock()  # a signal's handler may log, too
        self._dropped = 0
        self._lost, self._torn = 0, False
        """The thread's: lines that could not be written; whether the last one was cut."""
        self._closed = self._stuck = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self.write(line, urgent=record.levelno >= logging.WARNING)

    def write(self, line: str, *, urgent: bool = False) -> None:
        """Args:
        line: without its end.
        urgent: it ends a pause, since the process may be about to be killed.
        """
        with self._lock:
            if self._closed:
                if not self._stuck:
                    _write(self._fd, f"{line}\n")
            elif self._queue.qsize() < self._most:
                if self._dropped:
                    self._report_dropped()
                self._queue.put(f"{line}\n")
                if urgent:
                    self._hurried.set()
            else:
                self._dropped += 1

    def _report_dropped(self) -> None:
        if self._dropped:
            self._queue.put(self.format(self._report(self._dropped)) + "\n")
            self._dropped = 0

    def flush(self) -> None:
        """Wait until everything that was queued is written, at most FLUSH_S."""
        if not self._closed:
            self._stuck = not self._written(FLUSH_S)

    def _written(self, within_s: float) -> bool:
        written = threading.Event()
        self._queue.put(written)
        self._hurried.set()
        return written.wait(within_s)

    def close(self) -> None:
        """See logging.Handler. What is not written after FLUSH_S is lost. Idempotent."""
        if not self._closed:
            self._report_dropped()
            self._stuck = not self._written(0.0 if self._stuck else FLUSH_S)  # flush has just waited
            self._closed = True
            self._queue.put(None)
            self._hurried.set()
        super().close()

    def _run(self) -> None:
        ended = False
        while not ended:
            items = [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            ended = None in items
            self._put([item for item in items if isinstance(item, str)])
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if not ended:
                self._hurried.wait(PAUSE_S)
                self._hurried.clear()

    def _put(self, lines: list[str]) -> None:
        """What cannot be written is counted, and reported before the next lines that can."""
        if not lines:
            return
        unsaid = self._lost
        if unsaid:
            lines = [self.format(self._report(unsaid)) + "\n", *lines]
        if self._torn:
            lines[0] = "\n" + lines[0]
        written = _write(self._fd, "".join(lines))
        ends = list(accumulate(len(_encoded(line)) for line in lines))
        missed = sum(end > written for end in ends)
        report_missed = bool(unsaid) and missed == len(lines)
        self._lost = unsaid + missed - 1 if report_missed else missed
        if written:
            self._torn = written not in ends


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _write(fd: int, text: str) -> int:
    """Returns: the bytes that were written; fewer than there are where the reader is gone, or the disk is full."""
    all_of_it = left = memoryview(_encoded(text))
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # somebody made the descriptor non-blocking
            poll = select.poll()  # select() refuses descriptors from 1,024 on
            poll.register(fd, select.POLLOUT)
            poll.poll()
        except OSError:
            break
    return len(all_of_it) - len(left)
