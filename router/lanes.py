"""Threads for the work of a request that would hold up the event loop. Long texts have a thread of their own: a short one never
waits behind seconds of tokenizing.

work, size --> short lane (2 threads) | long lane (1 thread) --> result
          |--> too many wait, or too much: refused
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from diptych.common.errors import OverloadedError

LONG_BYTES = 64 * 1024
MAX_WAITING = 64
MAX_WAITING_BYTES = 32 * 1024 * 1024
_SHORT_THREADS = 2

_T = TypeVar("_T")


class Lanes:
    """Args: what: that waits, for the words of a refusal. name: of the threads."""

    def __init__(self, what: str, name: str) -> None:
        self._what = what
        self._short = ThreadPoolExecutor(_SHORT_THREADS, thread_name_prefix=name)
        self._long = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-long")
        self._num_waiting = 0
        self._bytes_waiting = 0

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.shutdown(wait=True, cancel_futures=True)

    async def run(self, work: Callable[[], _T], size: int = 0) -> _T:
        """What `work` returns, on a thread. Args: size: of what it works on, about; in bytes.

        Raises: OverloadedError; what `work` raises.
        """
        if self._num_waiting >= MAX_WAITING or (self._num_waiting and self._bytes_waiting + size > MAX_WAITING_BYTES):
            raise OverloadedError(f"too many {self._what} are waiting", retry_after_s=1.0)
        self._num_waiting += 1
        self._bytes_waiting += size
        lane = self._long if size > LONG_BYTES else self._short
        future = asyncio.get_running_loop().run_in_executor(lane, work)
        future.add_done_callback(lambda done: self._ended(done, size))
        return await future

    def _ended(self, future: asyncio.Future[_T], size: int) -> None:
        self._num_waiting -= 1
        self._bytes_waiting -= size
        if not future.cancelled():
            future.exception()  # seen, also when the client is gone
