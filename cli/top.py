"""`diptych top`: the cluster live in a terminal; in a pipe, one line per sample."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from diptych.cli.status_client import StatusClient
from diptych.common.degrees import Degrees
from diptych.common.errors import DiptychError

_BARS = "▁▂▃▄▅▆▇█"
_RECENT_S = 10
_SPARK_S = 60


def sparkline(values: Iterable[float | None]) -> str:
    """One character a value; a blank where there is none."""
    kept = list(values)
    most = max((value for value in kept if value is not None), default=0.0)
    if most <= 0:
        return " " * len(kept)
    return "".join(" " if v is None else _BARS[min(7, int(8 * v / most))] for v in kept)


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def by_age(series: list[dict[str, Any]], field: str, span_s: int = _SPARK_S) -> list[float | None]:
    """The field's value for each of the last seconds, oldest first; None where nothing happened."""
    found = {point["age_s"]: point[field] for point in series}
    return [found.get(age) for age in range(span_s, -1, -1)]


def recent(status: dict[str, Any]) -> dict[str, float | None]:
    """Rates and latencies of the last ten whole seconds."""
    points = [point for point in status["series"] if 1 <= point["age_s"] <= _RECENT_S]

    def worst(field: str) -> float | None:
        return max((p[field] for p in points if p[field] is not None), default=None)

    prompt = sum(p["prompt_tokens"] for p in points)
    return {
        "requests_per_s": sum(p["finished"] for p in points) / _RECENT_S,
        "tokens_per_s": sum(p["tokens"] for p in points) / _RECENT_S,
        "failed": float(sum(p["failed"] for p in points)),
        "ttft_p95": worst("ttft_p95"),
        "itl_p95": worst("itl_p95"),
        "hit": sum(p["cached_tokens"] for p in points) / prompt if prompt else None,
    }


def _gpu(worker: dict[str, Any], prefix: str = "") -> str:
    """How busy its GPU is, and what holds its clocks down; empty: it has none."""
    gpu = worker.get("gpu")
    return f"{prefix}{100 * gpu['busy']:.0f}%{''.join(f'!{reason}' for reason in gpu['throttled'])}" if gpu else ""


def _ranks(worker: dict[str, Any]) -> str:
    """As "3x2", stages second, or "3x2@2" on two hosts; empty: one rank."""
    degrees, nodes = Degrees(worker.get("tensor_parallel", 1), worker.get("pipeline", 1)), worker.get("nodes", 1)
    return degrees.short + (f"@{nodes}" if nodes > 1 else "") if degrees.num_ranks > 1 else ""


def models_of(status: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(model, its workers) of every model that the router serves."""
    every = [status, *status.get("more_models", [])]
    return [(one["model"], (one["cluster"] or {}).get("workers", [])) for one in every]


def line_of(status: dict[str, Any], at: str) -> str:
    """One sample as one line of fields `name=value`."""
    now = recent(status)
    hit = "-" if now["hit"] is None else f"{100 * now['hit']:.0f}%"
    parts = [
        at,
        "ready" if status["ready"] else "not-ready",
        f"running={status['running']:.0f}",
        f"waiting={status['waiting']:.0f}",
        f"req/s={now['requests_per_s']:.1f}",
        f"tok/s={now['tokens_per_s']:.1f}",
        f"ttft_p95={seconds(now['ttft_p95']).replace(' ', '')}",
        f"itl_p95={seconds(now['itl_p95']).replace(' ', '')}",
        f"hit={hit}",
        f"failed={now['failed']:.0f}",
    ]
    for _, workers in models_of(status):
        for worker in workers:
            state = "down" if worker["why_not"] else f"{100 * worker['kv_usage']:.0f}%kv"
            ranks = f"/ranks:{_ranks(worker)}" if _ranks(worker) else ""
            parts.append(
                f"{worker['id']}={worker['running']}r/{worker['waiting']}w/{state}{_gpu(worker, '/gpu:')}{ranks}"
            )
    return " ".join(parts)


def view(status: dict[str, Any], width: int, url: str = "") -> Any:
    """The same for a terminal of so many columns, as a rich renderable. `url`: the router's."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now, series = recent(status), status["series"]
    models = models_of(status)
    head = Text(f"{', '.join(name for name, _ in models)}{url and f' at {url}'}  ", style="bold")
    head.append("ready" if status["ready"] else "not ready", style="green" if status["ready"] else "bold red")
    head.append(
        f"   running {status['running']:.0f}, waiting {status['waiting']:.0f}, "
        f"{now['requests_per_s']:.1f} answers/s, {now['tokens_per_s']:.1f} tokens/s, {now['failed']:.0f} failed"
    )
    if adapters := status.get("adapters"):
        head.append(f", {len(adapters)} adapters ({status.get('adapters_waiting', 0)} requests wait for a slot)")
    seconds_shown = max(5, min(_SPARK_S, width - 20))  # beside a title and a number
    plots = Table(box=None, pad_edge=False, show_header=False)
    for title, field, shown in (
        ("TTFT p95", "ttft_p95", seconds(now["ttft_p95"])),
        ("ITL p95", "itl_p95", seconds(now["itl_p95"])),
        ("tokens/s", "tokens", f"{now['tokens_per_s']:.1f}"),
    ):
        plots.add_row(title, Text(sparkline(by_age(series, field, seconds_shown)), style="cyan"), shown)
    workers = _workers(models, width)
    stages = Text("time p50  ", style="dim")
    stages.append(", ".join(f"{name.replace('_', ' ')} {seconds(s['p50'])}" for name, s in status["stages"].items()))
    reasons = [Text(reason, style="yellow") for reason in status["reasons"]]
    return Group(head, *reasons, Text(), plots, Text(), workers, Text(), stages)


_GAP = 2
"""Characters between two columns."""
_LEFT = ("model", "worker", "role", "state", "index")
_LEFT_OUT_FIRST = (
    "index",
    "prefill tok/s",
    "step",
    "prompt tokens",
    "waiting",
    "role",
    "ranks",
    "GPU",
    "KV",
    "running",
)
"""Where a terminal is too narrow for all columns: names and states are never cut."""


def _workers(models: list[tuple[str, list[dict[str, Any]]]], width: int) -> Any:
    """One row a worker, as a rich table."""
    from rich.table import Table
    from rich.text import Text

    rows = [
        {
            "model": model,
            "worker": w["id"],
            "role": w["role"],
            "state": w["why_not"] or w["state"],
            "running": f"{w['running']}/{w['max_num_seqs']}",
            "waiting": str(w["waiting"]),
            "prompt tokens": str(w["waiting_prompt_tokens"]),
            "KV": f"{100 * w['kv_usage']:.0f}%",
            "prefill tok/s": f"{w['prefill_tokens_per_s']:.0f}",
            "step": seconds(w["decode_step_s"] or None),
            "GPU": _gpu(w),
            "ranks": _ranks(w),
            "index": w["index_mode"],
        }
        for model, found in models
        for w in found
    ]
    useless = {"model"} if len(models) == 1 else set()
    useless |= {name for name in ("GPU", "ranks") if not any(row[name] for row in rows)}
    names = [name for name in (rows[0] if rows else ("worker",)) if name not in useless]

    def wants(name: str) -> int:
        cells = [row[name] for row in rows]
        words = [word for cell in (name, *(cells if name == "state" else ())) for word in cell.split()]
        return _GAP + max(map(len, words if name == "state" else [*words, *cells]))

    for name in _LEFT_OUT_FIRST:
        if sum(map(wants, names)) - _GAP > width and name in names:
            names.remove(name)
    table = Table(box=None, pad_edge=False)
    for name in names:
        wraps = name in ("worker", "state")
        justify: Any = "left" if name in _LEFT else "right"
        table.add_column(name.replace(" ", "\n"), justify=justify, overflow="fold", no_wrap=not wraps)
    for row, down in zip(rows, (w["why_not"] for _, found in models for w in found), strict=True):
        state = Text(row["state"], style="red" if down else "green")
        table.add_row(*(state if name == "state" else row[name] for name in names))
    return table


def run_top(
    client: StatusClient,
    *,
    every_s: float,
    count: int,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Sample repeatedly. `count`: number of samples; 0: until Ctrl-C. Returns: 0; 1 when the last sample failed."""
    if sys.stdout.isatty():
        return _run_live(client, every_s, count, sleep)
    looks, failed = 0, False
    while not count or looks < count:
        if looks:
            sleep(every_s)
        looks += 1
        at = datetime.now().strftime("%H:%M:%S")
        try:
            print(line_of(client.get(), at), flush=True)
            failed = False
        except DiptychError as error:
            print(f"{at} no answer: {error.message}", flush=True)
            failed = True
    return int(failed)


def _run_live(client: StatusClient, every_s: float, count: int, sleep: Callable[[float], None]) -> int:
    from rich.live import Live
    from rich.text import Text

    looks, failed = 0, False
    with Live(Text("asking ..."), screen=count == 0, auto_refresh=False) as live:
        try:
            while not count or looks < count:
                if looks:
                    sleep(every_s)
                looks += 1
                try:
                    live.update(view(client.get(), live.console.width, client.url), refresh=True)
                    failed = False
                except DiptychError as error:
                    live.update(Text(f"no answer: {error.message}", style="bold red"), refresh=True)
                    failed = True
        except KeyboardInterrupt:
            return 0
    return int(failed)
