"""The bench commands: start or find the targets, measure them in alternation, write the reports."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from diptych.cli.bench.config import ClusterChoice
from diptych.common.errors import ConfigError
from diptych.loadtest.config import BenchConfig, make_target
from diptych.loadtest.reports import csv as report_csv
from diptych.loadtest.reports import html as report_html
from diptych.loadtest.reports import json as report_json
from diptych.loadtest.reports import text as report_text
from diptych.loadtest.runs import compare, live
from diptych.loadtest.runs.result import Report, begin_report, measure
from diptych.loadtest.runs.sweep import sweep as sweep_target
from diptych.loadtest.runs.sweep_spec import SweepSpec
from diptych.loadtest.targets.target import Target, TargetError
from diptych.loadtest.workloads.items import write_jsonl

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """The address of a target. `workers` 0: unknown."""

    text: str
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Targets:
    """One target, or two (the baseline first): given addresses, or clusters to start."""

    places: tuple[Place, ...] = ()
    cluster: ClusterChoice | None = None

    @classmethod
    def given(cls, *texts: str) -> Targets:
        """Args: texts: in the order of the command line; for `serve` target, baseline.

        Raises: ConfigError where two are one server: both get the same prompts, so it would answer the second time from its
            prefix cache.
        """
        servers: dict[str, str] = {}
        for text in filter(None, texts):
            if other := servers.get(_server(text)):
                rule = f"is the same server as {other}, and would answer the same prompts from its prefix cache"
                raise ConfigError("target", text, rule)
            servers[_server(text)] = text
        return cls(tuple(map(Place, servers.values())))

    @classmethod
    def own(cls, cluster: ClusterChoice) -> Targets:
        return cls(cluster=cluster)

    @contextlib.contextmanager
    def running(self, config: BenchConfig) -> Iterator[tuple[Place, ...]]:
        """Raises: ConfigError, before anything starts, when a file to be sent cannot be read; or when a cluster does
        not start."""
        if self.cluster is None:
            yield self.places
            return
        if config.dataset is not None:
            config.items()
        from diptych.cli.bench import cluster as bench_cluster

        with contextlib.ExitStack() as stack:
            found: list[Place] = []
            for colocated in (True, False) if self.cluster.baseline else (False,):
                one = stack.enter_context(bench_cluster.running(self.cluster, colocated=colocated))
                address = f"grpc://{one.grpc_address}" if config.api == "grpc" else one.http_url
                found.append(Place(f"{one.label}={address}", one.workers))
                print(f"{one.label} serves at {address}", file=sys.stderr, flush=True)
            yield tuple(found)


def _server(text: str) -> str:
    """`[label=]URL` without the label, and without what names the same server in another way."""
    label, equals, url = text.partition("=")
    found = url if equals and "://" not in label else text
    return found.rstrip("/").removesuffix("/v1").lower()


def serve(config: BenchConfig, targets: Targets, rounds: int, *, kind: str = "serve") -> int:
    """One target: one run. Two: `rounds` alternating rounds, and the ratios. Returns: 1 when no request succeeded."""
    with targets.running(config) as places:
        return run_async(_serve(config, _baseline_first(places, kind), rounds, kind))


def _baseline_first(places: Sequence[Place], kind: str) -> tuple[Place, ...]:
    return tuple(places) if kind == "compare" or not places or places[0].workers else tuple(reversed(places))


async def _serve(config: BenchConfig, places: Sequence[Place], rounds: int, kind: str) -> int:
    async with opened(config, places) as targets:
        report = begin_report(kind, _title(kind, config, [target for target, _, _ in targets]), now())
        watch = live.watcher()
        if len(targets) == 1:
            target, model, chosen = targets[0]
            report.runs.append(await measure(target, model, chosen, chosen.items(), watch))
        else:
            await compare.alternate(report, (targets[0], targets[1]), rounds, watch)
    return finish(report, config)


def sweep(config: BenchConfig, search: SweepSpec, targets: Targets) -> int:
    """Run the same search for each target in turn."""
    with targets.running(config) as places:
        return run_async(_sweep(config, search, _baseline_first(places, "sweep")))


async def _sweep(config: BenchConfig, search: SweepSpec, places: Sequence[Place]) -> int:
    async with opened(config, places) as targets:
        report = begin_report("sweep", _title("sweep", config, [target for target, _, _ in targets]), now())
        for target, model, chosen in targets:
            await sweep_target(report, target, model, chosen, search, live.watcher())
    return finish(report, config)


@contextlib.asynccontextmanager
async def opened(config: BenchConfig, places: Sequence[Place]) -> AsyncIterator[list[tuple[Target, str, BenchConfig]]]:
    """Reachable targets, each with its model's name and its settings. Raises: ConfigError when one does not answer."""
    if not places:
        raise ConfigError("target", "", "is missing")
    key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
    found: list[tuple[Target, str, BenchConfig]] = []
    try:
        for place in places:
            target = make_target(place.text, config, api_key=key)
            found.append((target, "", config))
            try:
                model = await target.open()
            except TargetError as error:
                key_from = (
                    f"; the key comes from {config.api_key_env}" if error.status == 401 and config.api_key_env else ""
                )
                raise ConfigError("target", place.text, error.message + key_from) from None
            found[-1] = (target, model, dataclasses.replace(config, workers=place.workers or config.workers))
        yield found
    finally:
        for target, _, _ in found:
            await target.close()


def finish(report: Report, config: BenchConfig) -> int:
    """Print the figures, write the reports, print their paths. Returns the exit code."""
    for run in report.runs if not report.sweeps else ():
        for line in report_text.run_lines(run):
            print(line)
    for found in report.sweeps.values():
        for line in report_text.sweep_lines(found):
            print(line)
    if report.comparison is not None:
        for line in report_text.comparison_lines(report.comparison):
            print(line)
    for note in report.notes:
        print(f"NOTE: {note}")
    try:
        for path in write_reports(report, config.out, config.label):
            print(path)
        if config.save_items and report.runs:
            path = config.out / f"{_stem(report, config.label)}-items.jsonl"
            write_jsonl(path, report.runs[0].config.items())
            print(path)
    except OSError as error:  # the figures are printed
        raise ConfigError("out", str(config.out), f"the reports cannot be written there: {error.strerror}") from None
    return 0 if any(run.summary.completed for run in report.runs) else 1


def write_reports(report: Report, out: Path, label: str = "") -> list[Path]:
    """JSON, CSV and HTML into `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    stem = _stem(report, label)
    writers: tuple[tuple[str, Callable[[Report, Path], None]], ...] = (
        ("json", report_json.write),
        ("csv", report_csv.write),
        ("html", report_html.write),
    )
    paths = []
    for suffix, write in writers:
        path = out / f"{stem}.{suffix}"
        write(report, path)
        paths.append(path)
    return paths


def run_async(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def _stem(report: Report, label: str) -> str:
    name = label or report.began.strftime("%Y%m%d-%H%M%S")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{report.kind}-{name}")


def _title(kind: str, config: BenchConfig, targets: Sequence[Target]) -> str:
    names = " against ".join(target.label for target in reversed(targets))
    return f"{config.label or kind}: {names}, workload {config.workload}"


def now() -> datetime:
    return datetime.now().astimezone()
