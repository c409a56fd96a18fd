"""The harness's own delay: lateness of its event loop, which limits the accuracy of its measurements."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from diptych.loadtest.figures.stats import Dist, Summary, dist
from diptych.loadtest.virtual_loop import precise_clock

PERIOD_S = 0.01
LIMIT_FLOOR_S = 0.005
TTFT_SHARE = 0.05
"""A delay at p99 above this share of the median TTFT (and above the floor) distorts it."""


@dataclass(frozen=True, slots=True)
class LagReport:
    """`loop`: lateness of a timer in this process, seconds. `send`: of the requests that no limit held back.
    `cpu_share`: CPU seconds of this process per second of the run."""

    loop: Dist
    send: Dist
    cpu_share: float


class LagProbe:
    """Sets a timer every PERIOD_S and records its lateness."""

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
    """Warnings about possible distortion by the harness; empty: none. `limited`: a concurrency limit holds requests
    back, so late sends are intended."""
    limit = max(LIMIT_FLOOR_S, TTFT_SHARE * summary.ttft.median)
    found: list[str] = []
    if lag.loop.p99 > limit:
        found.append(
            f"TOO MUCH LAG: the harness's own event loop was {lag.loop.p99 * 1000:.1f} ms late at p99 "
            f"(limit {limit * 1000:.1f} ms): latencies are too high by up to that. "
            "Lower the rate or give the harness a separate core."
        )
    if not limited and lag.send.p99 > limit:
        found.append(
            f"TOO MUCH LAG: requests left {lag.send.p99 * 1000:.1f} ms after their intended time at p99 "
            f"(limit {limit * 1000:.1f} ms); latencies count from the intended time, so this is inside them."
        )
    if lag.cpu_share > 0.9:
        found.append(f"the harness used {lag.cpu_share:.0%} of a core: it may have been the bottleneck")
    return found
