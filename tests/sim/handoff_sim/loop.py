"""An event loop whose time jumps to the next thing to do. One callback at a time, so that a test may step in between any two."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any


class Deadlock(Exception):
    """Nothing is ready and nothing is scheduled."""


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._virtual = 1000.0
        self._clock_resolution = 1e-9
        self.num_callbacks = 0
        self.after_callback: Callable[[], None] = lambda: None
        self.errors: list[str] = []
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return self._virtual

    def now(self) -> float:
        """As a common.clock.Clock."""
        return self._virtual

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _process_events(self, event_list: object) -> None:
        return

    def _write_to_self(self) -> None:
        return

    def _run_once(self) -> None:
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not self._ready:
            if not scheduled:
                raise Deadlock
            self._virtual = max(self._virtual, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._virtual:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            self._ready.append(handle)
        if self._ready:
            handle = self._ready.popleft()
            if not handle._cancelled:
                handle._run()
                self.num_callbacks += 1
                self.after_callback()
