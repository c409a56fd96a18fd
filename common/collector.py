"""Python's garbage collector, set for a process that serves.

A full collection blocks the process, so it does not search what is loaded at the start. A request makes and drops
hundreds of objects without cycles: searching the young ones after every 700 was a tenth of the router's time. In an
engine a step creates one event for every sequence, and all of them live until they are delivered. Beyond some 700 sequences
the default threshold makes the collector traverse them several times in one step, with everything that they refer to.
At 2,048 sequences that was a sixth of the scheduler's time, at 256 nothing. Events hold no cycles: reference counts
free them.

gRPC's server leaves a cycle with every call, health probes included: five objects, a kibibyte. The thresholds alone would let
them grow for an hour, so they are searched for by time, too (`keep_collecting`).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

THRESHOLDS = (50_000, 20, 100)
"""Objects made more than freed before the young ones are walked; then how many such walks before the older ones are."""
ROUND_S = 10.0
ROUNDS = ((360, 2), (30, 1), (1, 0))
"""Every so many rounds this generation and the younger ones are searched: all each hour, since what lived through one round is
young no more."""


def hold_collector() -> None:
    """Nothing is searched until set_collector: of what is imported and loaded next nothing is garbage. While a worker imports
    torch and its own modules, the searches take a fifth of the CPU time."""
    gc.disable()


def set_collector() -> None:
    """Call when long-lived objects exist: the collector does not traverse them again."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


async def keep_collecting(
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep, collect: Callable[[int], object] = gc.collect
) -> None:
    """Search every ROUND_S, until cancelled. A round takes at most some milliseconds: beyond 50,000 young objects the thresholds
    were sooner."""
    number = 0
    while True:
        await pause(ROUND_S)
        number += 1
        collect(next(generation for every, generation in ROUNDS if number % every == 0))
