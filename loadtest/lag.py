"""The harness's own lag: how late its event loop runs what is due. What it measures of others can be no better than that."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from diptych.loadtest.stats import Dist, Summary, dist
from diptych.loadtest.virtual_loop import precise_clock

PERIOD_S = 0.01
LIMIT_FLOOR_S = 0.005
TTFT_SHARE = 0.05
"""A lag at p99 of more than this share of the median TTFT (and more than the floor) distorts it."""


@dataclass(frozen=True, slots=True)
class LagReport:
    """`loop`: lateness of a timer of ours, seconds. `send`: of the requests that no limit held back. `cpu_share`: CPU seconds
    of this process per second of the run."""

    loop: Dist
    send: Dist
    cpu_share: float


class LagProbe:
    """Asks for a wake-up every PERIOD_S and notes how late it comes."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._began = (0.0, 0.0)

    def start(self) -> None:
        self._began = (time.monotonic(), time.process_time())
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="lag probe")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def report(self, send: Dist) -> LagReport:
        wall = time.monotonic() - self._began[0]
        cpu = time.process_time() - self._began[1]
        return LagReport(dist(self.lags), send, cpu / wall if wall > 0 else 0.0)

    async def _watch(self) -> None:
        now = precise_clock()
        while True:
            due = now() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.lags.append(max(0.0, now() - due))


def warnings_of(lag: LagReport, summary: Summary, *, limited: bool) -> list[str]:
    """Sentences about what the harness itself may have distorted; empty: nothing.

    Args:
        limited: a concurrency limit holds requests back, so that a late send is its work and not our lag.
    """
    limit = max(LIMIT_FLOOR_S, TTFT_SHARE * summary.ttft.median)
    found: list[str] = []
    if lag.loop.p99 > limit:
        found.append(
            f"TOO MUCH LAG: the harness's own event loop was {lag.loop.p99 * 1000:.1f} ms late at p99 "
            f"(limit {limit * 1000:.1f} ms): latencies are too high by up to that. "
            "Lower the rate or give the harness a core of its own."
        )
    if not limited and lag.send.p99 > limit:
        found.append(
            f"TOO MUCH LAG: requests left {lag.send.p99 * 1000:.1f} ms after their intended time at p99 "
            f"(limit {limit * 1000:.1f} ms); latencies count from the intended time, so this is inside them."
        )
    if lag.cpu_share > 0.9:
        found.append(f"the harness used {lag.cpu_share:.0%} of a core: it may have been the bottleneck itself")
    return found
