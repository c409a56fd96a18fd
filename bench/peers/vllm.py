"""`diptych bench vllm`: vLLM on the CPU and Diptych with the same model, cores, precision and client, alternately.

    pd          1 prefill + 1 decode on both sides, one core each
    colocated   one engine with all cores on both sides
    serve       the same, ours as `diptych serve`: one process

A load is `rate:0.3` (open loop, arrivals a second) or `users:8` (closed loop). Loads may be measured in separate calls:
an existing result file keeps its other loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.bench.peers import vllm_process as bench_vllm_peer
from diptych.bench.peers.serve_process import serving
from diptych.bench.peers.vllm_process import VllmChoice, VllmServer
from diptych.cli.bench import cluster as bench_cluster
from diptych.cli.bench.config import ClusterChoice
from diptych.cli.bench.run import Place, finish, now, opened, run_async
from diptych.cli.models.store import resolve_model
from diptych.common.errors import ConfigError
from diptych.loadtest.config import BenchConfig
from diptych.loadtest.runs import compare, live
from diptych.loadtest.runs.compare import Comparison
from diptych.loadtest.runs.result import Report, begin_report

COLOCATED_LOADS, COLOCATED_LENGTHS = "users:1,users:8,users:32", ("256", "64")
LOADS = {"pd": "rate:0.4,users:4", "colocated": COLOCATED_LOADS, "serve": COLOCATED_LOADS}
LENGTHS = {"pd": ("uniform:64,192", "32"), "colocated": COLOCATED_LENGTHS, "serve": COLOCATED_LENGTHS}
FLOAT32 = "float32"
SLO = "ttft:3000,tpot:300"
RATE_RUN_S = 15.0
SEEDS_APART = 1_000
"""Distance of seeds between two loads of one call, more than there are rounds; else the second would find the first
one's prompts in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Load:
    """`users` 0: open loop of `rate`."""

    text: str
    rate: float = 0.0
    users: int = 0

    def config(self, base: BenchConfig, requests: int) -> BenchConfig:
        """`requests`: of a run; 0: those of RATE_RUN_S seconds, or one a user."""
        if self.users:
            count = requests or self.users
            return dataclasses.replace(base, closed_loop=True, max_concurrency=self.users, num_requests=count)
        return dataclasses.replace(base, request_rate=self.rate, num_requests=requests or round(self.rate * RATE_RUN_S))


def parse_loads(text: str) -> list[Load]:
    """`rate:0.3,users:8`. Raises: ConfigError."""
    found: list[Load] = []
    for part in text.split(","):
        kind, _, number = part.partition(":")
        try:
            load = Load(part, rate=float(number)) if kind == "rate" else Load(part, users=int(number))
        except ValueError:
            load = Load(part)
        if kind not in ("rate", "users") or not (load.rate > 0 or load.users > 0):
            raise ConfigError("loads", part, "must be rate:<arrivals a second> or users:<number>")
        found.append(load)
    return found


def run_vllm_bench(
    environment: Path,
    mode: str,
    loads: str,
    rounds: int,
    requests: int,
    vllm_flags: str,
    seed: int,
    out: Path,
    dtype: str = FLOAT32,
) -> int:
    """Args: dtype: of both sides. Returns: 1 when nothing succeeded on one side. Raises: ConfigError."""
    model = resolve_model("smollm2")
    choice = VllmChoice(environment.expanduser().absolute(), model, mode, dtype, more=vllm_flags)
    ours_flags = ["--dtype", dtype]
    parsed = parse_loads(loads or LOADS[mode])
    lengths = LENGTHS[mode]
    base = BenchConfig(input_len=lengths[0], output_len=lengths[1], slo=SLO, seed=seed, out=out, workers=2)
    name = mode if dtype == FLOAT32 else f"{mode}-{dtype}"
    cluster = ClusterChoice(prefill_workers=int(mode == "pd"), decode_workers=1, cluster_args=shlex.join(ours_flags))
    started = (
        serving(model, cluster.threads, ours_flags)
        if mode == "serve"
        else bench_cluster.running(cluster, colocated=mode == "colocated")
    )
    found: dict[str, Report] = {}
    code = 0
    with (
        bench_vllm_peer.running(choice) as peer,
        _held(peer),
        started as ours,
    ):
        places = (Place(f"vLLM={peer.url}", cluster.num_workers), Place(f"Diptych={ours.http_url}", ours.workers))
        for number, load in enumerate(parsed):
            label = f"vllm-{name}-{load.text.replace(':', '-')}"
            own = dataclasses.replace(base, label=label, seed=base.seed + SEEDS_APART * number)
            config = load.config(own, requests)
            report = run_async(_alternate(config, places, rounds, peer))
            report.notes += [f"vLLM: {line}" for line in peer.command_lines]
            report.notes.append(f"Diptych ({ours.label}): {shlex.join(ours_flags)} --threads {cluster.threads}")
            code |= finish(report, config)
            found[load.text] = report
            _write(out / f"vllm-cpu-{name}.json", choice, found)
    return code | any(_silent(report) for report in found.values())


@contextlib.contextmanager
def _held(peer: VllmServer) -> Iterator[None]:
    """The peer is paused while our cluster starts."""
    peer.pause()
    yield


async def _alternate(config: BenchConfig, places: Sequence[Place], rounds: int, peer: VllmServer) -> Report:
    report = begin_report("compare", f"vLLM beside Diptych on the CPU: {config.label}", now())

    def attend(side: int) -> None:
        peer.resume() if side == 0 else peer.pause()

    peer.resume()
    async with opened(config, places) as targets:
        await compare.alternate(report, (targets[0], targets[1]), rounds, live.watcher(), attend=attend)
    return report


def _silent(report: Report) -> bool:
    return any(run.summary.completed == 0 for run in report.runs)


def known_loads(path: Path) -> dict[str, Any]:
    """Loads of a result file, if it exists. Raises: ConfigError for another kind of file."""
    if not path.exists():
        return {}
    try:
        loads: dict[str, Any] = json.loads(path.read_text())["loads"]
        return dict(loads)
    except (ValueError, LookupError, TypeError):
        raise ConfigError("out", str(path), "exists and is not a result of this benchmark") from None


def _write(path: Path, choice: VllmChoice, reports: dict[str, Report]) -> None:
    """Write ratios, every round's medians, settings, versions and machine of all loads to one file."""
    known = known_loads(path)
    first = next(iter(reports.values()))
    body: dict[str, Any] = {
        "what": f"vLLM on the CPU ({choice.mode}) beside Diptych, the same model, precision, cores and client, in turns; B / A",
        "date": first.began.isoformat(timespec="seconds"),
        "environment": first.environment.as_dict(),
        "load_average_at_the_end": round(os.getloadavg()[0], 2),
        "vllm": {"versions": choice.versions(), "flags": choice.flags},
        "notes": first.notes,
        "loads": known | {text: _load_object(report) for text, report in reports.items()},
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
    print(path)


def _load_object(report: Report) -> dict[str, Any]:
    config, comparison = report.runs[0].config, report.comparison
    assert isinstance(comparison, Comparison)
    environment = report.environment
    return {
        "date": report.began.isoformat(timespec="seconds"),
        "git_hash": environment.git_hash,
        "load_1m": environment.load_1m,
        "requests": config.num_requests,
        "input_len": config.input_len,
        "output_len": config.output_len,
        "rounds": comparison.rounds,
        "a": comparison.a,
        "b": comparison.b,
        "ratios": {
            f"{ratio.name} {ratio.unit}".strip(): {
                "a": _short(ratio.a),
                "b": _short(ratio.b),
                "ratio": _short(ratio.ratio),
                "low": _short(ratio.low),
                "high": _short(ratio.high),
            }
            for ratio in comparison.ratios
        },
        "runs": [
            {
                "round": run.round,
                "target": run.label,
                "output_tokens_per_s": _short(run.summary.output_rate),
                "ttft_p50_ms": _short(run.summary.ttft.median * 1e3),
                "tpot_p50_ms": _short(run.summary.tpot.median * 1e3),
                "first_gap_p50_ms": _short(run.summary.first_gap.median * 1e3),
                "completed": run.summary.completed,
                "failed": run.summary.failed,
            }
            for run in report.runs
        ],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
