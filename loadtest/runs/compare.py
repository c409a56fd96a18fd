"""Two targets in alternation, A B A B, so that drift of the machine affects both. Ratios are taken within a round."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.loadtest.config import BenchConfig
from diptych.loadtest.figures.stats import Summary
from diptych.loadtest.runs.result import Report, RunRecord, Watch, measure
from diptych.loadtest.targets.target import Target

METRICS: tuple[tuple[str, str, str, Callable[[Summary], float]], ...] = (
    ("TTFT p50", "ms", "lower", lambda s: s.ttft.median * 1e3),
    ("TTFT p99", "ms", "lower", lambda s: s.ttft.p99 * 1e3),
    ("TPOT p50", "ms", "lower", lambda s: s.tpot.median * 1e3),
    ("TPOT p99", "ms", "lower", lambda s: s.tpot.p99 * 1e3),
    ("ITL p50", "ms", "lower", lambda s: s.itl.median * 1e3),
    ("ITL p99", "ms", "lower", lambda s: s.itl.p99 * 1e3),
    ("E2E p50", "ms", "lower", lambda s: s.e2e.median * 1e3),
    ("E2E p99", "ms", "lower", lambda s: s.e2e.p99 * 1e3),
    ("1st to 2nd token p50", "ms", "lower", lambda s: s.first_gap.median * 1e3),
    ("output tokens/s", "", "higher", lambda s: s.output_rate),
    ("goodput", "req/s", "higher", lambda s: s.goodput),
    ("SLO attainment", "", "higher", lambda s: s.slo_attainment),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """`ratio` is B / A, the median over the rounds, `low` to `high` its range; None where A measured nothing."""

    name: str
    unit: str
    better: str
    a: float
    b: float
    ratio: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    a: str
    b: str
    rounds: int
    ratios: tuple[Ratio, ...]


def compare(a: Sequence[Summary], b: Sequence[Summary], names: tuple[str, str]) -> Comparison:
    """Args: one summary a round, in the same order."""
    assert a
    assert len(a) == len(b)
    found: list[Ratio] = []
    for name, unit, better, value in METRICS:
        left, right = [value(one) for one in a], [value(one) for one in b]
        quotients = [y / x for x, y in zip(left, right, strict=True) if x > 0 and y > 0]
        middle = statistics.median(quotients) if quotients else None
        low, high = (min(quotients), max(quotients)) if quotients else (None, None)
        found.append(Ratio(name, unit, better, statistics.median(left), statistics.median(right), middle, low, high))
    return Comparison(names[0], names[1], len(a), tuple(found))


async def alternate(
    report: Report,
    targets: tuple[tuple[Target, str, BenchConfig], tuple[Target, str, BenchConfig]],
    rounds: int,
    watch: Watch,
    *,
    attend: Callable[[int], None] | None = None,
) -> Comparison:
    """Run A B A B. Both get the same workload in a round; each round has a different one, so that no prefix is warm.

    Args:
        targets: (open target, model, settings) of A and of B; the settings differ in `workers` at most.
        attend: called before every run with its target, 0 (A) or 1 (B), for example to pause the other one.
    """
    sides: tuple[list[RunRecord], list[RunRecord]] = ([], [])
    for number in range(rounds):
        for turn, (side, (target, model, config)) in enumerate(zip(sides, targets, strict=True)):
            if attend is not None:
                attend(turn)
            seeded = dataclasses.replace(config, seed=config.seed + number)
            run = await measure(target, model, seeded, seeded.items(), watch, round=number)
            side.append(run)
            report.runs.append(run)
    names = (targets[0][0].label, targets[1][0].label)
    found = compare([run.summary for run in sides[0]], [run.summary for run in sides[1]], names)
    report.comparison = found
    return found
