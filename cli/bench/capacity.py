"""Capacity of the load harness itself: many streams of the mock server, and the delay with which they were read."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from diptych.cli.bench.run import Place, finish, now, opened, run_async
from diptych.common import child
from diptych.loadtest.config import BenchConfig
from diptych.loadtest.mock_server import Script
from diptych.loadtest.runs import live
from diptych.loadtest.runs.result import RunRecord, begin_report, measure


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """`streams` open at once, `tokens_per_s` in total, for `duration_s` after all are open."""

    streams: int
    tokens_per_s: float
    tokens_per_chunk: int
    duration_s: float
    ramp_s: float = 10.0

    @property
    def script(self) -> Script:
        return Script(
            first_token_s=0.1, token_s=self.streams / self.tokens_per_s, tokens_per_chunk=self.tokens_per_chunk
        )

    @property
    def output_tokens(self) -> int:
        """Tokens per stream: enough that the first stream still runs at the end of the full load."""
        return max(2, round((self.ramp_s + self.duration_s) / self.script.token_s))

    def config(self, out: Path) -> BenchConfig:
        return BenchConfig(
            num_requests=self.streams,
            request_rate=self.streams / self.ramp_s,
            burstiness=float("inf"),
            input_len="16",
            output_len=str(self.output_tokens),
            warmup=2,
            slo="ttft:200",
            explain=False,
            out=out,
            label=f"capacity-{self.streams}-streams",
        )


@contextlib.contextmanager
def mock_process(script: Script, core: int | None = None) -> Iterator[str]:
    """The mock server as a child process on a core of its own; yields its URL."""
    flags = [f"--{f.name.replace('_', '-')}={getattr(script, f.name)}" for f in dataclasses.fields(script)]
    command = [sys.executable, "-P", "-m", "diptych.loadtest.mock_server", *flags]
    process = child.start(command, stdout=subprocess.PIPE)
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
    finally:
        process.terminate()
        process.wait(timeout=10)
        if process.stdout is not None:
            process.stdout.close()


def distortion(run: RunRecord, script: Script) -> dict[str, float]:
    """Measured over scripted, at the median."""
    return {
        "ttft": run.summary.ttft.median / script.first_token_s,
        "tpot": run.summary.tpot.median / script.token_s,
        "itl": run.summary.itl.median / script.token_s,
    }


def own_lateness(url: str) -> str:
    """Delay of the mock server against its script: the part of a deviation that is not the harness's."""
    found = httpx.get(f"{url}/mock", timeout=10.0).json()
    return f"{found['chunks']} chunks, late by {found['p50_s'] * 1e3:.2f} ms at p50 and {found['p99_s'] * 1e3:.2f} ms at p99"


def run_capacity(streams: int, tokens_per_s: float, tokens_per_chunk: int, duration_s: float, out: Path) -> int:
    """Run the harness on one core, the mock server on another. Returns: 1 when the harness was late, or a request
    failed."""
    plan = CapacityPlan(streams, tokens_per_s, tokens_per_chunk, duration_s)
    cores = sorted(os.sched_getaffinity(0))
    mine, other = cores[0], cores[-1]
    _allow_files(streams)
    with mock_process(plan.script, other) as url:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {mine})
        try:
            run = run_async(_measure(plan, url, out))
        finally:
            os.sched_setaffinity(0, before)
        print(f"mock server: {own_lateness(url)}")
    ratios = ", ".join(f"{name} {value:.3f}" for name, value in distortion(run, plan.script).items())
    print(f"measured / scripted at the median: {ratios}; CPU of the harness {run.lag.cpu_share:.0%} of one core")
    return 1 if run.summary.failed or any("LAG" in text for text in run.warnings) else 0


async def _measure(plan: CapacityPlan, url: str, out: Path) -> RunRecord:
    config = plan.config(out)
    async with opened(config, [Place(f"mock={url}")]) as targets:
        report = begin_report(
            "capacity", f"The harness itself: {plan.streams} streams, {plan.tokens_per_s:g} tokens/s", now()
        )
        target, model, chosen = targets[0]
        run = await measure(target, model, chosen, chosen.items(), live.watcher())
        report.runs.append(run)
    finish(report, config)
    return run


def _allow_files(streams: int) -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(4096, streams * 2 + 256)), hard))
