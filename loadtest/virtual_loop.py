"""An event loop whose clock jumps to the next timer when nothing is ready: hours of schedule in milliseconds, exact to
the microsecond. Sockets work if both ends are in this loop; before each jump it waits briefly for bytes in flight."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
GRACE_S = 0.0005


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: it advances the clock to the next timer instead."""

    now = 0.0
    grace_s = GRACE_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.grace_s:
            ready = super().select(self.grace_s)
        if not ready and timeout is None:
            return super().select(None)  # no timer: only the outside world can continue
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`grace_s`: real seconds to wait for sockets before time jumps; 0 without sockets."""

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self._jumping = _JumpingSelector()
        self._jumping.grace_s = grace_s
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T], *, grace_s: float = GRACE_S) -> T:
    """Like asyncio.run, on a VirtualLoop."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(grace_s=grace_s)) as runner:
        return runner.run(main)


def precise_clock() -> Callable[[], float]:
    """Seconds on the running loop's clock, to the microsecond: uvloop's `time()` has a resolution of a millisecond and
    advances once an iteration."""
    loop = asyncio.get_running_loop()
    return loop.time if isinstance(loop, VirtualLoop) else time.monotonic
