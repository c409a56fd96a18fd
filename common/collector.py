"""Python's garbage collector, set for a process that serves.

A full collection blocks the process, so it does not search what is loaded at the start. A request makes and drops
hundreds of objects without cycles: searching the young ones after every 700 was a tenth of the router's time. In an
engine a step creates one event for every sequence, and all of them live until they are delivered. Beyond some 700 sequences
the default threshold makes the collector traverse them several times in one step, with everything that they refer to.
At 2,048 sequences that was a sixth of the scheduler's time, at 256 nothing. Events hold no cycles: reference counts
free them."""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 100)
"""Objects made more than freed before the young ones are walked; then how many such walks before the older ones are."""


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
