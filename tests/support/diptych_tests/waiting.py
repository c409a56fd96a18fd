"""Waiting for a condition, with a deadline that only a fault reaches: no test waits for a time and then looks."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

DEADLINE_S = 300.0
"""For what takes milliseconds on an idle machine: much more than any load makes of it."""


def wait_until(
    condition: Callable[[], object], *, what: str, deadline_s: float = DEADLINE_S, every_s: float = 0.05
) -> float:
    """Seconds until condition() was true. Fails with `what` when the deadline passes."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < deadline_s, f"not within {deadline_s} s: {what}"
        time.sleep(every_s)
    return time.monotonic() - began


async def until(
    condition: Callable[[], object | Awaitable[object]],
    what: str = "",
    *,
    deadline_s: float = DEADLINE_S,
    every_s: float = 0.005,
) -> None:
    """Return once condition() is true, or what it awaits is. Raises: TimeoutError with `what` when the deadline passes."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + deadline_s
    while True:
        met = condition()
        if inspect.isawaitable(met):
            met = await met
        if met:
            return
        if loop.time() > limit:
            raise TimeoutError(f"not within {deadline_s} s: {what or inspect.getsource(condition).strip()}")
        await asyncio.sleep(every_s)
