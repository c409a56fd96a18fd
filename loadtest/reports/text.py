"""The summary on stdout: the format of `vllm bench serve`, followed by additional lines."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.loadtest.figures.stats import Dist
from diptych.loadtest.runs.compare import Comparison
from diptych.loadtest.runs.result import RunRecord
from diptych.loadtest.runs.sweep import Sweep

WIDTH = 56


def run_lines(run: RunRecord) -> Iterator[str]:
    summary = run.summary
    yield f" {run.label} ".center(WIDTH, "=")
    yield _row("Successful requests:", str(summary.completed))
    for name, count in sorted(summary.outcomes.items()):
        if name != "ok":
            yield _row(f"  {name}:", str(count))
    yield _row("Warm-up requests, not counted:", str(summary.warmup_requests))
    yield _row("Benchmark duration (s):", f"{summary.duration_s:.2f}")
    yield _row("Total input tokens:", str(summary.input_tokens))
    yield _row("Total generated tokens:", str(summary.output_tokens))
    yield _row("Request throughput (req/s):", f"{summary.request_rate:.2f}")
    yield _row(f"Goodput, {run.config.slo} (req/s):", f"{summary.goodput:.2f}")
    yield _row("SLO attainment:", f"{summary.slo_attainment:.1%}")
    yield _row("Output token throughput (tok/s):", f"{summary.output_rate:.2f}")
    if summary.output_rate_per_worker is not None:
        yield _row(f"  per worker ({summary.workers}):", f"{summary.output_rate_per_worker:.2f}")
    yield _row("Peak output token throughput (tok/s):", f"{summary.peak_output_rate:.2f}")
    yield _row("Peak concurrent requests:", str(summary.peak_concurrency))
    yield _row("Total token throughput (tok/s):", f"{summary.total_rate:.2f}")
    if summary.hit_rate is not None:
        yield _row("Prefix cache hit rate:", f"{summary.hit_rate:.1%}")
    named = (
        ("Time to First Token (TTFT), from the intended send", summary.ttft),
        ("  of which queue (server's clock)", summary.queue),
        ("  of which prefill (server's clock)", summary.prefill),
        ("First to second token", summary.first_gap),
        ("  of which transfer (server's clock)", summary.transfer),
        ("Time per Output Token, without the first (TPOT)", summary.tpot),
        ("Inter-token Latency (ITL), per token", summary.itl),
        ("Gap between chunks", summary.chunk_gap),
        ("End-to-end Latency (E2EL)", summary.e2e),
        ("Own lag: sends", summary.send_lag),
        ("Own lag: event loop", run.lag.loop),
    )
    for title, value in named:
        if value.count:
            yield from _dist(title, value)
    counted = ", ".join(f"{name} {count}" for name, count in run.summary.counted_by.items())
    yield _row("Tokens counted by:", counted or "-")
    yield "=" * WIDTH
    for text, count in summary.errors.items():
        yield f"{count} x {text}"
    for warning in run.warnings:
        yield f"WARNING: {warning}"


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    yield f"{comparison.b} / {comparison.a}, {comparison.rounds} alternating rounds"
    yield f"{'':<24}{'A':>12}{'B':>12}{'B/A':>8}  spread"
    for ratio in comparison.ratios:
        if ratio.ratio is None:
            spread, quotient = "", "-"
        else:
            spread, quotient = f"{ratio.low:.2f} .. {ratio.high:.2f}", f"{ratio.ratio:.2f}"
        name = f"{ratio.name} ({ratio.unit})" if ratio.unit else ratio.name
        yield f"{name:<24}{ratio.a:>12.2f}{ratio.b:>12.2f}{quotient:>8}  {spread} ({ratio.better} is better)"


def sweep_lines(sweep: Sweep) -> Iterator[str]:
    yield f"{sweep.label}: SLO {sweep.slo}, kept by {sweep.attain:.0%} or more"
    yield f"{'req/s':>8}{'kept':>8}{'goodput':>9}{'tok/s':>9}{'TTFT p50':>10}{'p99':>9}{'TPOT p50':>10}{'p99':>9}{'failed':>8}"
    for p in sweep.points:
        yield (
            f"{p.rate:>8.2f}{p.attainment:>8.0%}{p.goodput:>9.2f}{p.output_rate:>9.1f}{p.ttft_p50_s * 1e3:>10.0f}"
            f"{p.ttft_p99_s * 1e3:>9.0f}{p.tpot_p50_s * 1e3:>10.1f}{p.tpot_p99_s * 1e3:>9.1f}{p.failed:>8}"
        )
    yield f"{sweep.verdict}; best goodput {sweep.best_goodput:.2f} req/s"


def _row(name: str, value: str) -> str:
    return f"{name:<42}{value:>14}"


def _dist(title: str, value: Dist) -> Iterator[str]:
    yield f"--- {title} "[:WIDTH].ljust(WIDTH, "-")
    figures = (("Mean", value.mean), ("Median", value.median), ("P90", value.percentiles[90]), ("P99", value.p99))
    for name, seconds in figures:
        yield _row(f"{name} (ms):", f"{seconds * 1e3:.2f}")
