"""Waiting for a condition, with a deadline that only a fault reaches: no test waits for a time and then looks."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

DEADLINE_S = 300.0
"""For what takes milliseconds on an idle machine: much more than any load makes of it."""


DEAR_S = 0.1


def _pause_s(every_s: float, took_s: float) -> float:
    """Until the condition is looked at again: where that takes long, as a request to a process that may itself be what is waited
    for, a quarter of the time goes to it, and not all."""
    return max(every_s, min(3.0 * took_s, DEAR_S))


def wait_until(
    condition: Callable[[], object], *, what: str, deadline_s: float = DEADLINE_S, every_s: float = 0.05
) -> float:
    """Seconds until condition() was true. Fails with `what` when the deadline passes."""
    began = asked = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now - began < deadline_s, f"not within {deadline_s} s: {what}"
        time.sleep(_pause_s(every_s, now - asked))
        asked = time.monotonic()
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
        asked = loop.time()
        met = condition()
        if inspect.isawaitable(met):
            met = await met
        if met:
            return
        if loop.time() > limit:
            raise TimeoutError(f"not within {deadline_s} s: {what or inspect.getsource(condition).strip()}")
        await asyncio.sleep(_pause_s(every_s, loop.time() - asked))
