"""Our router through the wire beside sglang-router and vllm-router: the same mock workers, the same client, in one run.

    python -P -m diptych.bench.peers.routers --peers VENV [--runs 5] [--out FILE]

All servers run from the start; the runs alternate over them. Every run is one client process. CPU seconds are the sum
of client, router and mock workers, so that "per core" means the same for all; the router's CPU is also listed. The
peers forward text that they do not read; our router gets token ids, hashes them, places by cache and cost, and
reserves. `direct` is the client at the mock without a router.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import psutil

from diptych.bench.part import end_process, running_part
from diptych.bench.peers.client import Load
from diptych.bench.peers.mock import MODEL
from diptych.bench.result import surroundings, write
from diptych.cli.models.store import resolve_model
from diptych.cli.progress import progress_on
from diptych.cli.temporary import temporary_folder
from diptych.cli.up.processes import free_port
from diptych.common import child
from diptych.common.errors import ConfigError
from diptych.common.secret import create_secret

RESULT = Path(__file__).resolve().parents[1] / "results" / "router" / "peers.json"
START_S = 60.0
CLIENT_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Contender:
    """One router. `target`: in the client's form. `processes`: the router's; empty for `direct`."""

    name: str
    target: str
    command: str
    processes: tuple[psutil.Process, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """The load for all of them."""

    name: str
    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    stream: bool


SCENES = (
    Workload("placing", 1500, 64, 128, 1, stream=False),
    Workload("streaming", 192, 64, 128, 256, stream=True),
)


@contextlib.contextmanager
def _peer(name: str, command: Sequence[str], port: int, logs: Path) -> Iterator[Contender]:
    with (logs / f"{name}.log").open("wb") as log:
        process = child.start(list(command), stdout=log, stderr=log)
        try:
            until = time.monotonic() + START_S
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > until:
                    tail = (logs / f"{name}.log").read_text()[-2000:]
                    raise ConfigError("bench", name, f"did not start:\n{tail}")
                time.sleep(0.2)
            mine = psutil.Process(process.pid)
            shown = " ".join(["VENV/bin/" + Path(command[0]).name, *command[1:]])
            yield Contender(name, f"http://127.0.0.1:{port}", shown, (mine, *mine.children(recursive=True)))
        finally:
            end_process(process)


def _answers(port: int) -> bool:
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 1, "stream": False}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _cpu(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _measure(contender: Contender, workload: Workload, mock: psutil.Process) -> dict[str, float]:
    load = Load(
        contender.target,
        workload.requests,
        workload.concurrency,
        workload.prompt_tokens,
        workload.output_tokens,
        workload.stream,
        MODEL,
    )
    command = [sys.executable, "-P", "-m", "diptych.bench.peers.client", json.dumps(asdict(load))]
    router, worker = _cpu(contender.processes), _cpu([mock])
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
    if done.returncode:
        raise ConfigError("bench", contender.name, f"{workload.name}: {done.stderr[-1500:]}")
    router, worker = _cpu(contender.processes) - router, _cpu([mock]) - worker
    client = json.loads(done.stdout)
    # The warm-up's requests cost the servers as much as others; the client counts its own after it.
    share = client["requests"] / (client["requests"] + workload.concurrency)
    cpu = client["client_cpu_s"] + share * (router + worker)
    return {
        "requests_per_s": client["requests"] / client["wall_s"],
        "tokens_per_s": client["tokens"] / client["wall_s"],
        "p50_ms": client["p50_ms"],
        "p99_ms": client["p99_ms"],
        "requests_per_core_s": client["requests"] / cpu,
        "tokens_per_core_s": client["tokens"] / cpu,
        "requests_per_router_core_s": client["requests"] / (share * router) if router else 0.0,
        "client_cpu_us_per_request": 1e6 * client["client_cpu_s"] / client["requests"],
        "router_cpu_us_per_request": 1e6 * share * router / client["requests"],
        "worker_cpu_us_per_request": 1e6 * share * worker / client["requests"],
    }


def run(venv: Path, runs: int, scale: float, out: Path) -> None:
    """Raises: ConfigError naming the part that does not start or fails."""
    with progress_on() as progress:
        folder = resolve_model("smollm2", progress)
    workloads = [replace(workload, requests=max(1, int(scale * workload.requests))) for workload in SCENES]
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(temporary_folder("diptych-peers-")))
        secret = root / "secret"
        create_secret(secret)
        mock, (http, decode, _) = stack.enter_context(running_part("diptych.bench.peers.mock", str(secret)))
        ours, (_, rpc) = stack.enter_context(
            running_part("diptych.bench.router.relay_parts", "router", str(folder), decode, str(secret))
        )
        command = "python -P -m diptych.bench.router.relay_parts router MODEL DECODE SECRET"
        contenders = [
            Contender("direct", f"http://127.0.0.1:{http}", "the client at the mock worker", ()),
            Contender("diptych lookaside", f"lookaside://{rpc}", command, (ours,)),
            Contender("diptych proxied", f"grpc://{rpc}", command, (ours,)),
        ]
        worker = f"http://127.0.0.1:{http}"
        for name, arguments in (
            ("sglang-router", ["sglang-router", "launch"]),
            ("vllm-router", ["vllm-router"]),
        ):
            port, prometheus = free_port("127.0.0.1"), free_port("127.0.0.1")
            line = [str(venv / "bin" / arguments[0]), *arguments[1:], "--host", "127.0.0.1", "--port", str(port)]
            line += ["--worker-urls", worker, "--policy", "round_robin", "--log-level", "error"]
            line += ["--prometheus-port", str(prometheus), "--prometheus-host", "127.0.0.1"]
            contenders.append(stack.enter_context(_peer(name, line, port, root)))
        found: dict[str, dict[str, list[dict[str, float]]]] = {
            s.name: {c.name: [] for c in contenders} for s in workloads
        }
        for number in range(runs):
            order = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
            for workload in workloads:
                for contender in order:
                    found[workload.name][contender.name].append(_measure(contender, workload, mock))
            print(f"run {number + 1} of {runs}", file=sys.stderr, flush=True)
    _write(found, workloads, contenders, venv, out)


def _ratios(by: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Ratios of our router to the better peer, for figures where more is better."""
    ours = [name for name in by if name.startswith("diptych")]
    peers = [by[name] for name in by if name not in ours and name != "direct"]
    return {
        name: {
            key: round(by[name][key] / max(peer[key] for peer in peers), 3)
            for key in by[name]
            if "_per_" in key and key.endswith("_s")
        }
        for name in ours
    }


def _median(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}


def _write(
    found: dict[str, dict[str, list[dict[str, float]]]],
    workloads: Sequence[Workload],
    contenders: Sequence[Contender],
    venv: Path,
    out: Path,
) -> None:
    medians = {workload: {name: _median(runs) for name, runs in by.items()} for workload, by in found.items()}
    head = f"{'req/s':>9}{'tok/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'req/core s':>12}{'tok/core s':>12}{'req/router core s':>19}"
    for workload, by in medians.items():
        print(f"\n{workload}\n{'':<20}{head}")
        for name, row in by.items():
            print(
                f"{name:<20}{row['requests_per_s']:>9.0f}{row['tokens_per_s']:>10.0f}{row['p50_ms']:>9.1f}{row['p99_ms']:>9.1f}"
                f"{row['requests_per_core_s']:>12.0f}{row['tokens_per_core_s']:>12.0f}{row['requests_per_router_core_s']:>19.0f}"
            )
        for name, ratios in _ratios(by).items():
            shown = ", ".join(
                f"{key.replace('_per_', '/').removesuffix('_s')} {ratio}" for key, ratio in ratios.items()
            )
            print(f"{name} to the better peer: {shown}")
    packages = sorted(venv.glob("lib/python3*/site-packages"))
    versions = {
        dist.metadata["Name"]: dist.version
        for dist in metadata.distributions(path=[str(path) for path in packages])
        if dist.metadata["Name"] in ("sglang-router", "vllm-router")
    }
    versions |= {name: metadata.version(name) for name in ("diptych", "grpcio", "uvloop", "protobuf")}
    body = {
        "environment": surroundings(),
        "versions": versions,
        "commands": {contender.name: contender.command for contender in contenders},
        "client": "python -P -m diptych.bench.peers.client (HTTP: raw keep-alive; gRPC: the SDK)",
        "scenes": {workload.name: asdict(workload) for workload in workloads},
        "medians": medians,
        "to_the_better_peer": {workload: _ratios(by) for workload, by in medians.items()},
        "runs": found,
    }
    write(out, body)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="virtual environment with the two peers")
    parser.add_argument("--runs", type=int, default=5, help="of each contender in each workload, alternating")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args(arguments)
    run(given.peers, given.runs, given.scale, given.out)


if __name__ == "__main__":
    main()
