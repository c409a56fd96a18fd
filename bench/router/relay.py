"""`diptych bench router`: CPU seconds of the router's process, with an engine that costs nothing.

CPU seconds instead of wall time do not depend on other load. Two answer lengths separate the cost of a request from the
cost of a token.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from diptych.bench.part import running_part
from diptych.bench.result import surroundings, write
from diptych.cli.bench.run import Place, opened, run_async
from diptych.cli.models.store import resolve_model
from diptych.cli.progress import progress_on
from diptych.common.errors import ConfigError
from diptych.loadtest.config import BenchConfig
from diptych.loadtest.runs import live
from diptych.loadtest.runs.result import RunRecord, measure

SHORT, LONG = 1, 65
_MODULE = "diptych.bench.router.relay_parts"


@dataclass(frozen=True, slots=True)
class RouterCost:
    """Cost over HTTP or gRPC. `per_request_us` and `per_token_us`: CPU microseconds of the router's process; a request
    of n tokens costs per_request + (n - 1) * per_token. `chunks_per_token`: number of messages per token."""

    face: str
    prompt_tokens: int
    concurrency: int
    per_request_us: float
    per_token_us: float
    chunks_per_token: float

    @property
    def requests_per_core(self) -> float:
        return 1e6 / self.per_request_us

    @property
    def tokens_per_core(self) -> float:
        return 1e6 / self.per_token_us


def run_router_bench(requests: int, prompt_tokens: int, concurrency: int, out: Path) -> int:
    """Measure HTTP and gRPC. Raises: ConfigError when a part does not start."""
    with progress_on() as progress:
        folder = resolve_model("smollm2", progress)
    costs: list[RouterCost] = []
    with (
        running_part(_MODULE, "decode") as (_, decode),
        running_part(_MODULE, "router", str(folder), decode[0]) as (process, (http, rpc)),
    ):
        url = http if http.startswith("http") else f"http://{http}"
        for face, text, api, form in (
            ("HTTP, token ids", url, "completions", "ids"),
            ("HTTP, chat", url, "chat", "messages"),
            ("gRPC, token ids", f"grpc://{rpc}", "grpc", "ids"),
        ):
            config = BenchConfig(
                num_requests=requests, closed_loop=True, max_concurrency=concurrency, input_len=str(prompt_tokens), api=api,
                prompt_form=form, vocab="1000,30000", explain=False, warmup=8,
            )  # fmt: skip
            costs.append(_cost(face, process, text, config, prompt_tokens, concurrency))
    _write(costs, requests, out)
    return 0


def _cost(
    face: str, process: psutil.Process, text: str, config: BenchConfig, prompt_tokens: int, concurrency: int
) -> RouterCost:
    async def measured(chosen: BenchConfig) -> tuple[RunRecord, float]:
        async with opened(chosen, [Place(text)]) as targets:
            target, model, _ = targets[0]
            began, before = time.monotonic(), sum(process.cpu_times()[:2])
            run = await measure(target, model, chosen, chosen.items(), live.silent)
            spent = sum(process.cpu_times()[:2]) - before
            return run, max(1e-6, spent - idle_share * (time.monotonic() - began))

    idle_share = _idle_share(process)
    per_request: dict[int, float] = {}
    chunks = 0.0
    for tokens in (SHORT, LONG):
        run, cpu_s = run_async(measured(dataclasses.replace(config, output_len=str(tokens))))
        if run.summary.failed:
            raise ConfigError("router", face, f"requests failed: {dict(run.summary.errors)}")
        sent = run.summary.requests + run.summary.warmup_requests
        per_request[tokens] = cpu_s / sent
        chunks = sum(len(record.chunk_times) for record in run.records) / (sent * tokens)
    per_token = max(1e-9, (per_request[LONG] - per_request[SHORT]) / (LONG - SHORT))
    return RouterCost(face, prompt_tokens, concurrency, per_request[SHORT] * 1e6, per_token * 1e6, chunks)


def _idle_share(process: psutil.Process, seconds: float = 2.0) -> float:
    """CPU seconds a second of an idle router, to be subtracted."""
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return float(sum(process.cpu_times()[:2]) - before) / seconds


def _write(costs: Sequence[RouterCost], requests: int, out: Path) -> None:
    print(
        f"{'face':<18}{'us/request':>12}{'us/token':>10}{'requests/s/core':>17}{'tokens/s/core':>15}{'chunks/token':>14}"
    )
    for cost in costs:
        print(
            f"{cost.face:<18}{cost.per_request_us:>12.0f}{cost.per_token_us:>10.1f}{cost.requests_per_core:>17.0f}"
            f"{cost.tokens_per_core:>15.0f}{cost.chunks_per_token:>14.2f}"
        )
    faces = [asdict(cost) for cost in costs]
    write(out / "router.json", {"environment": surroundings(), "requests": requests, "faces": faces})
