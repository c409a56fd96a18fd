"""An event loop whose time jumps to the next event. One callback at a time, so that a test may act between any two.

It is minimal for speed: no debug mode, no thread safety, one context for callbacks.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any


class Deadlock(Exception):
    """Nothing is ready and nothing is scheduled."""


class _Handle:
    """A callback that is ready to be called."""

    __slots__ = ("args", "callback", "context", "is_cancelled")

    def __init__(self, callback: Any, args: Any, context: contextvars.Context) -> None:
        self.callback, self.args, self.context = callback, args, context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class _Timer(float):
    """A callback that is due at a time, which it is: heapq compares timers as floats. Cancelled: it has no callback."""

    __slots__ = ("args", "callback", "context")

    callback: Any
    args: Any
    context: contextvars.Context

    def cancel(self) -> None:
        self.callback = self.args = None

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return float(self)


class _Task(asyncio.Task[Any]):
    """Sets of tasks, as a TaskGroup's, have an order that depends on the schedule alone, not on addresses."""

    __slots__ = ("_number",)

    def __init__(self, coro: Any, *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._virtual = 1000.0
        self._clock_resolution = 1e-9
        self.num_callbacks = 0
        self.step_in_at: float = math.inf
        """From so many callbacks on, `step_in` is called after each."""
        self.step_in: Callable[[], None] = lambda: None
        self.errors: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []
        """All that were ever created."""
        self._soon: deque[_Handle | _Timer] = deque()
        self._timers: list[_Timer] = []
        self._context = contextvars.copy_context()
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return self._virtual

    def now(self) -> float:
        """As a common.clock.Clock."""
        return self._virtual

    def get_debug(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        handle = _Handle(callback, args, context or self._context)
        self._soon.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # there is one thread

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        return self.call_at(self._virtual + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        timer = _Timer(when)
        timer.callback, timer.args, timer.context = callback, args, context or self._context
        heapq.heappush(self._timers, timer)
        return timer

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        task = _Task(coro, number=len(self.tasks), loop=self, name=name, context=context)
        self.tasks.append(task)
        return task

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _process_events(self, event_list: object) -> None:
        return

    def _write_to_self(self) -> None:
        return

    def _run_once(self) -> None:
        timers, soon = self._timers, self._soon
        while timers and timers[0].callback is None:
            heapq.heappop(timers)
        if not soon:
            if not timers:
                raise Deadlock
            self._virtual = max(self._virtual, float(timers[0]))
        while timers and timers[0] <= self._virtual:
            soon.append(heapq.heappop(timers))
        if not soon:
            return
        handle = soon.popleft()
        if handle.cancelled():
            return
        try:
            handle.context.run(handle.callback, *handle.args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler({"message": f"exception in {handle.callback}", "exception": error})
        self.num_callbacks += 1
        if self.num_callbacks >= self.step_in_at:
            self.step_in()
