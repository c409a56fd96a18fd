"""`diptych bench suite`, run by `make bench`. Under ten minutes on two quiet cores.

--help of every command -> the harness against the mock server -> its capacity -> P/D and the colocated baseline,
alternately -> a sweep of both -> router, transfer and scheduler alone -> the engine beside transformers
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diptych.bench.cli.startup import run_startup
from diptych.bench.kvtransfer import slabs as bench_kv
from diptych.bench.router.relay import run_router_bench
from diptych.cli.bench.capacity import distortion, mock_process, own_lateness, run_capacity
from diptych.cli.bench.config import ClusterChoice
from diptych.cli.bench.run import Place, Targets, finish, now, opened, run_async, write_reports
from diptych.common.errors import ConfigError
from diptych.loadtest.config import BenchConfig
from diptych.loadtest.mock_server import Script
from diptych.loadtest.reports import text as report_text
from diptych.loadtest.runs import compare, live
from diptych.loadtest.runs.environment import describe_environment
from diptych.loadtest.runs.result import begin_report, measure
from diptych.loadtest.runs.sweep import sweep
from diptych.loadtest.runs.sweep_spec import SweepSpec

SLO = "ttft:3000,tpot:300"
"""Two shared cores and fp32: a prompt of 128 tokens takes about a second."""
TOLERANCES = {"ttft": 0.05, "tpot": 0.02, "itl": 0.02}
"""Of measured / script. The TTFT includes the timer's half millisecond and two HTTP stacks, about 3 ms of 100 on a slow
core; without them, on a virtual clock, the tests require 2%."""


def run_suite(out: Path, minutes: float) -> int:
    """Run all parts, also after a part failed. `suite.json` has the duration of each. Returns: 1 when one failed."""
    out.mkdir(parents=True, exist_ok=True)
    environment = describe_environment()
    parts: tuple[tuple[str, Callable[[], int]], ...] = (
        ("startup", lambda: run_startup(1, out)),
        ("harness", lambda: _harness(out)),
        ("capacity", lambda: run_capacity(2000, 5000.0, 4, 6.0, out)),
        ("serving", lambda: _serving(out, minutes * 60.0)),
        ("router", lambda: run_router_bench(400, 128, 32, out)),
        ("kv", lambda: bench_kv.run_kv(("inproc", "ucx"), bench_kv.SLAB_KIB, 3, out)),
        ("scheduler", lambda: _module("diptych.bench.engine.scheduler", "--out", str(out / "scheduler.json"))),
        (
            "engine",
            lambda: _module("diptych.bench.engine.vs_transformers", "--quick", "--out", str(out / "engine.json")),
        ),
    )
    began = time.monotonic()
    done: list[dict[str, Any]] = []
    for name, run in parts:
        before = time.monotonic()
        try:
            code = run()
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
        done.append({"part": name, "exit_code": code, "seconds": round(time.monotonic() - before, 1)})
        print(f"== {name}: {done[-1]['seconds']:.0f} s" + (f", exit code {code}" if code else ""), flush=True)
    total = round(time.monotonic() - began, 1)
    body = {"environment": environment.as_dict(), "seconds": total, "parts": done}
    (out / "suite.json").write_text(json.dumps(body, indent=1) + "\n")
    failed = [part["part"] for part in done if part["exit_code"]]
    print(f"{total:.0f} s; reports in {out}/" + (f"; FAILED or distorted: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _harness(out: Path) -> int:
    """Measured times of the mock server must match its script."""
    script = Script()
    config = BenchConfig(
        num_requests=100, request_rate=20.0, input_len="64", output_len="33", slo="ttft:200", out=out, label="mock"
    )

    async def main(url: str) -> int:
        async with opened(config, [Place(f"mock={url}")]) as targets:
            target, model, chosen = targets[0]
            report = begin_report("harness", "The harness against the scripted server", now())
            run = await measure(target, model, chosen, chosen.items(), live.watcher())
            report.runs.append(run)
            write_reports(report, out, "mock")
            ratios = distortion(run, script)
            print("scripted server, measured / script: " + ", ".join(f"{k} {v:.3f}" for k, v in ratios.items()))
            return int(any(abs(value - 1.0) > TOLERANCES[name] for name, value in ratios.items()))

    with mock_process(script) as url:
        code = run_async(main(url))
        print(f"mock server: {own_lateness(url)}")
        return code


def _serving(out: Path, budget_s: float) -> int:
    """A comparison at one rate, then the sweep, in the remaining time."""
    began = time.monotonic()
    config = BenchConfig(
        input_len="uniform:64,192", output_len="uniform:16,48", request_rate=0.5, num_requests=10, slo=SLO, out=out
    )
    search = SweepSpec(start=0.4, step=1.8, refine=1, max_points=4, point_s=14.0)

    async def main(places: Sequence[Place]) -> int:
        async with opened(config, places) as targets:
            watch = live.watcher()
            report = begin_report("compare", "P/D against colocated, equal number of workers", now())
            await compare.alternate(report, (targets[0], targets[1]), 2, watch)
            code = finish(report, dataclasses.replace(config, label="pd-colocated"))
            if time.monotonic() - began > budget_s * 0.6:
                print("NOTE: no time for the sweep: the machine is too busy")
                return code
            swept = begin_report("sweep", "P/D and colocated: rates until the SLO breaks", now())
            for target, model, chosen in targets:
                found = await sweep(swept, target, model, chosen, search, watch)
                for line in report_text.sweep_lines(found):
                    print(line)
            write_reports(swept, out, "pd-colocated")
            return code

    with Targets.own(ClusterChoice()).running(config) as places:
        return run_async(main(places))


def _module(name: str, *arguments: str) -> int:
    """Run it in a separate process: this one never loads torch."""
    return subprocess.run([sys.executable, "-P", "-m", name, *arguments], check=False).returncode
