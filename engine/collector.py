"""Python's garbage collector, set for a process that runs an engine.

A step makes one event for every sequence, all alive until they are delivered. Beyond some 700 sequences the default threshold
makes the collector walk them several times in one step, and what they lead to with them: at 2,048 sequences that was a sixth of
the scheduler's time, at 256 nothing. Events hold no cycles: reference counts free them.
"""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 100)
"""Objects made more than freed before the young ones are walked; then how many such walks before the older ones are."""


def set_collector() -> None:
    """Call once, when everything that lives as long as the process is there: that is never walked again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
