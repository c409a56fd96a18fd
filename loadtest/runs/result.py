"""One measured run, and the content of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from diptych.loadtest.config import BenchConfig
from diptych.loadtest.figures.record import CountedBy, RequestRecord
from diptych.loadtest.figures.stats import Summary, summarise
from diptych.loadtest.runs.environment import Environment, contended, describe_environment
from diptych.loadtest.runs.lag import LagReport, warnings_of
from diptych.loadtest.runs.runner import Runner
from diptych.loadtest.targets.target import Target
from diptych.loadtest.workloads.items import WorkItem

UNEXPECTED_HIT_RATE = 0.02
"""Hit rate of random prompts above what chat templates and chance explain."""

Watch = Callable[[str, Runner], Any]
"""Called with the target's label before a run; returns a context manager that shows the runner's progress."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """`rate`: requested arrivals a second; 0 in a closed loop or for a trace."""

    label: str
    url: str
    model: str
    config: BenchConfig
    rate: float
    records: Sequence[RequestRecord]
    summary: Summary
    lag: LagReport
    warnings: Sequence[str]
    round: int = 0


@dataclass(slots=True)
class Report:
    """Everything of one `diptych bench` call."""

    kind: str
    title: str
    began: datetime
    environment: Environment
    runs: list[RunRecord] = field(default_factory=list)
    comparison: Any = None
    sweeps: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def begin_report(kind: str, title: str, now: datetime) -> Report:
    report = Report(kind, title, now, describe_environment())
    if note := contended(report.environment):
        report.notes.append(note)
    return report


async def measure(
    target: Target, model: str, config: BenchConfig, items: Sequence[WorkItem], watch: Watch, *, round: int = 0
) -> RunRecord:
    """Run `items` once against an open target."""
    runner = Runner(target, config.loop_spec(), seed=config.seed)
    with watch(target.label, runner):
        result = await runner.run(items, warmup=config.warmup_items())
    summary = summarise(result.records, config.slo_spec(), workers=config.workers)
    warnings = warnings_of(result.lag, summary, limited=result.limited)
    if summary.counted_by.get(CountedBy.CHUNKS.value):
        warnings.append("the server reports no token counts: assuming one token a chunk")
    if summary.failed:
        warnings.append(f"{summary.failed} of {summary.requests} requests failed: latencies are those of the others")
    if (hit_rate := summary.hit_rate) is not None and hit_rate > UNEXPECTED_HIT_RATE and not config.shares_prefixes:
        warnings.append(
            f"{hit_rate:.0%} of the prompt tokens came from a prefix cache, though no two prompts of this workload begin "
            f"alike: the server has seen them before (seed {config.seed}), and the figures are not those of cold prompts"
        )
    traced = any(item.arrival_s is not None for item in items)
    rate = 0.0 if config.closed_loop or traced else config.request_rate
    return RunRecord(
        target.label, target.url, model, config, rate, result.records, summary, result.lag, warnings, round
    )
