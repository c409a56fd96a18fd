"""Threads for work that would block the event loop. Long texts have a separate thread: a short one never waits behind
seconds of tokenizing.

    work, size --> short lane (2 threads) | long lane (1 thread) --> result
              |--> the expected wait is too long, or the queue too large: rejected
              |--> not started within that time: rejected

The expected wait is computed from the queued bytes and the measured rate of the lane.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from diptych.common.errors import OverloadedError

LONG_BYTES = 64 * 1024
MAX_WAITING_BYTES = 32 * 1024 * 1024
MAX_WAIT_S = 5.0
_SHORT_THREADS = 2
_FIXED_BYTES = 2048
"""Fixed cost of a piece of work, in bytes."""
_FIRST_RATE = 4e6
_MEMORY_S = 1.0
"""Seconds of work over which the rate is averaged."""

_T = TypeVar("_T")


class _Lane:
    """Threads, their queue, and their measured rate: bytes a second of one thread."""

    def __init__(self, threads: int, name: str, now: Callable[[], float]) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._now = now
        self._bytes, self._seconds = _FIRST_RATE * _MEMORY_S, _MEMORY_S
        self._waiting = 0

    def wait_s(self) -> float:
        """Expected wait of new work."""
        return self._waiting * self._seconds / self._bytes / self._threads

    def submit(self, work: Callable[[], _T], size: int) -> Future[_T]:
        size += _FIXED_BYTES
        self._waiting += size
        loop = asyncio.get_running_loop()
        future = self._pool.submit(self._run, work, size, loop)
        future.add_done_callback(lambda done: self._call_on_loop(loop, self._ended, size) if done.cancelled() else None)
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, work: Callable[[], _T], size: int, loop: asyncio.AbstractEventLoop) -> _T:
        began = self._now()
        try:
            return work()
        finally:
            self._call_on_loop(loop, self._ended, size, self._now() - began)

    @staticmethod
    def _call_on_loop(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *given: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(partial(what, *given))

    def _ended(self, size: int, took_s: float | None = None) -> None:
        self._waiting -= size
        if took_s is None:
            return
        self._bytes, self._seconds = self._bytes + size, self._seconds + took_s
        if self._seconds > _MEMORY_S:
            self._bytes, self._seconds = self._bytes * _MEMORY_S / self._seconds, _MEMORY_S


class BoundedExecutor:
    """Runs work on threads.

    Args:
        what: name of the work, for error messages.
        name: of the threads.
        max_wait_s: before work starts.
    """

    def __init__(
        self, what: str, name: str, *, max_wait_s: float = MAX_WAIT_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._max_wait_s = max_wait_s
        self._short = _Lane(_SHORT_THREADS, name, now)
        self._long = _Lane(1, f"{name}-long", now)
        self._bytes_waiting = 0

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.close()

    async def run(self, work: Callable[[], _T], size: int = 0) -> _T:
        """The result of `work`, run on a thread. `size`: approximate bytes of its input. Raises: OverloadedError, and
        the errors of `work`."""
        lane = self._long if size > LONG_BYTES else self._short
        wait_s = lane.wait_s()
        if wait_s > self._max_wait_s or (self._bytes_waiting and self._bytes_waiting + size > MAX_WAITING_BYTES):
            raise self._refusal(wait_s)
        self._bytes_waiting += size
        future = lane.submit(work, size)
        result = asyncio.wrap_future(future)
        result.add_done_callback(lambda done: self._ended(done, size))
        late = False

        def give_up() -> None:
            nonlocal late
            late = future.cancel()  # false for started work

        timer = asyncio.get_running_loop().call_later(self._max_wait_s, give_up)
        try:
            return await result
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if late and not (task is not None and task.cancelling()):
                raise self._refusal(lane.wait_s()) from None
            raise
        finally:
            timer.cancel()

    def _refusal(self, wait_s: float) -> OverloadedError:
        return OverloadedError(f"too many {self._what} are waiting", retry_after_s=max(1.0, wait_s))

    def _ended(self, future: asyncio.Future[_T], size: int) -> None:
        self._bytes_waiting -= size
        if not future.cancelled():
            future.exception()  # retrieve the exception, also when the client is gone
