"""Whether the engine makes progress. Pure: a verdict from a snapshot of its counters."""

from __future__ import annotations

from diptych.engine.messages import EngineStats


def why_not_live(stats: EngineStats, now: float, *, stall_bound_s: float) -> str:
    """Why the worker must not be SERVING; empty: it may. `now`: on the clock of stats.busy_since. `stall_bound_s`:
    longest duration of a step."""
    if not stats.alive:
        return "the step thread has ended"
    if stats.busy_since is not None and now - stats.busy_since > stall_bound_s:
        return f"a step has been running for {now - stats.busy_since:.1f} s"
    return ""
