"""Raises the rate until the SLO is violated, then bisects. The decision is pure.

start, start * step, start * step^2 ... -> first rate that violates -> bisect `refine` times -> the highest rate that holds
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.loadtest.config import BenchConfig
from diptych.loadtest.figures.stats import Summary
from diptych.loadtest.runs.result import Report, Watch, measure
from diptych.loadtest.runs.sweep_spec import SweepSpec
from diptych.loadtest.targets.target import Target


@dataclass(frozen=True, slots=True)
class Point:
    rate: float
    attainment: float
    goodput: float
    output_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    failed: int
    round: int = 0


@dataclass(frozen=True, slots=True)
class Sweep:
    """`best_rate`: the highest rate at which the SLO held; 0: none. It is a limit only if `broke`: at a higher measured
    rate the SLO did not hold. Otherwise the limit was not found."""

    label: str
    slo: str
    attain: float
    points: tuple[Point, ...]
    best_rate: float
    best_goodput: float
    broke: bool

    @property
    def verdict(self) -> str:
        """The result of the sweep, for reports."""
        if not self.points:
            return "no rate was measured"
        if not self.best_rate:
            return f"no rate holds; the lowest tried was {self.points[0].rate:.2f} req/s"
        if not self.broke:
            return f"every rate held, up to {self.best_rate:.2f} req/s: the limit is above it"
        return f"highest rate that holds: {self.best_rate:.2f} req/s"


def next_rate(spec: SweepSpec, points: Sequence[Point]) -> float | None:
    """The rate to measure next; None: done."""
    if spec.rates:
        return spec.rates[len(points)] if len(points) < len(spec.rates) else None
    if not points:
        return spec.start
    if len(points) >= spec.max_points:
        return None
    good = max((p.rate for p in points if p.attainment >= spec.attain), default=0.0)
    bad = min((p.rate for p in points if p.attainment < spec.attain and p.rate > good), default=math.inf)
    if bad == math.inf:
        return good * spec.step
    first_bad = next(i for i, point in enumerate(points) if point.attainment < spec.attain)
    if len(points) - (first_bad + 1) >= spec.refine:
        return None
    return (good + bad) / 2.0


def point_of(rate: float, summary: Summary, round: int = 0) -> Point:
    return Point(
        rate=rate,
        attainment=summary.slo_attainment,
        goodput=summary.goodput,
        output_rate=summary.output_rate,
        ttft_p50_s=summary.ttft.median,
        ttft_p99_s=summary.ttft.p99,
        tpot_p50_s=summary.tpot.median,
        tpot_p99_s=summary.tpot.p99,
        failed=summary.failed,
        round=round,
    )


def conclude(label: str, slo: str, attain: float, points: Sequence[Point]) -> Sweep:
    """The result of the measured points."""
    best_rate = max((point.rate for point in points if point.attainment >= attain), default=0.0)
    return Sweep(
        label,
        slo,
        attain,
        tuple(sorted(points, key=lambda point: point.rate)),
        best_rate,
        max((point.goodput for point in points), default=0.0),
        broke=any(point.attainment < attain and point.rate > best_rate for point in points),
    )


async def sweep(
    report: Report, target: Target, model: str, config: BenchConfig, spec: SweepSpec, watch: Watch
) -> Sweep:
    """Measure one point after the other; each has a separate workload."""
    points: list[Point] = []
    while (rate := next_rate(spec, points)) is not None:
        at_rate = dataclasses.replace(
            config,
            request_rate=rate,
            ramp_to=0.0,
            closed_loop=False,
            num_requests=max(4, math.ceil(rate * spec.point_s)),
            seed=config.seed + len(points),
            warmup=config.warmup if not points else 0,
        )
        run = await measure(target, model, at_rate, at_rate.items(), watch, round=len(points))
        report.runs.append(run)
        points.append(point_of(rate, run.summary, len(points)))
    found = conclude(target.label, config.slo_spec().text, spec.attain, points)
    report.sweeps[target.label] = found
    return found
