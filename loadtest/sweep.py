"""Rates upwards until the SLO breaks, then between the last good and the first bad one. The decision is pure.

start, start * step, start * step^2 ... -> first rate that breaks -> bisect `refine` times -> the highest rate that holds
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.loadtest.config import BenchConfig
from diptych.loadtest.result import Report, Watch, measure
from diptych.loadtest.stats import Summary
from diptych.loadtest.sweep_spec import SweepSpec
from diptych.loadtest.target import Target


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
    """`best_rate`: the highest rate at which the SLO held; 0: it never did."""

    label: str
    slo: str
    attain: float
    points: tuple[Point, ...]
    best_rate: float
    best_goodput: float


def next_rate(spec: SweepSpec, points: Sequence[Point]) -> float | None:
    """The rate to try next; None: done."""
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


async def sweep(
    report: Report, target: Target, model: str, config: BenchConfig, spec: SweepSpec, watch: Watch
) -> Sweep:
    """Measure point after point; each has a workload of its own."""
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
    held = [point for point in points if point.attainment >= spec.attain]
    best = max(held, key=lambda point: point.rate, default=None)
    found = Sweep(
        target.label,
        config.slo_spec().text,
        spec.attain,
        tuple(sorted(points, key=lambda point: point.rate)),
        best.rate if best else 0.0,
        max((point.goodput for point in points), default=0.0),
    )
    report.sweeps[target.label] = found
    return found
