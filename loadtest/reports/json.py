"""Results as JSON: the fields of `vllm bench serve` with its names and units, and everything else under `diptych`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec

from diptych.loadtest.figures.record import RequestRecord
from diptych.loadtest.figures.stats import Dist, Summary, by_group
from diptych.loadtest.runs.result import Report, RunRecord

_METRICS = (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2el"))
_OURS = ("queue", "prefill", "transfer", "accept", "first_gap", "chunk_gap", "send_lag")


def run_object(run: RunRecord, report: Report, *, detailed: bool) -> dict[str, Any]:
    """One run. `detailed` adds the lists of requests."""
    summary, config = run.summary, run.config
    found: dict[str, Any] = {
        "date": report.began.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "grpc" if run.url.startswith("grpc") else f"openai-{config.api}",
        "backend": "grpc" if run.url.startswith("grpc") else f"openai-{config.api}",
        "label": run.label,
        "model_id": run.model,
        "tokenizer_id": run.model,
        "num_prompts": summary.requests,
        "request_rate": "inf" if run.rate == math.inf else run.rate or None,
        "burstiness": "inf" if config.burstiness == math.inf else config.burstiness,
        "max_concurrency": config.max_concurrency or None,
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_rate,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_rate,
        "total_token_throughput": summary.total_rate,
        "max_output_tokens_per_s": summary.peak_output_rate,
        "max_concurrent_requests": summary.peak_concurrency,
    }
    for ours, theirs in _METRICS:
        found |= _vllm_fields(theirs, getattr(summary, ours))
    if detailed:
        found |= _lists([record for record in run.records if not record.warmup])
    found["diptych"] = {
        "environment": report.environment.as_dict(),
        "config": _plain(config.as_dict()),
        "seed": config.seed,
        "round": run.round,
        "summary": summary_object(summary),
        "tenants": {k: summary_object(s) for k, s in by_group(run.records, "tenant", config.slo_spec()).items()},
        "lag": {
            "loop": dist_object(run.lag.loop),
            "send": dist_object(run.lag.send),
            "cpu_share": run.lag.cpu_share,
        },
        "warnings": list(run.warnings),
    }
    return found


def summary_object(summary: Summary) -> dict[str, Any]:
    """All figures; times in milliseconds."""
    found: dict[str, Any] = {}
    for spec in dataclasses.fields(summary):
        value = getattr(summary, spec.name)
        if isinstance(value, Dist):
            found[spec.name + "_ms"] = dist_object(value)
        else:
            found[spec.name] = _plain(value)
    found["hit_rate"] = summary.hit_rate
    found["output_rate_per_worker"] = summary.output_rate_per_worker
    return found


def dist_object(value: Dist) -> dict[str, float]:
    found: dict[str, float] = {"count": value.count, "mean": value.mean * 1e3, "std": value.std * 1e3}
    found |= {"min": value.low * 1e3, "max": value.high * 1e3}
    return found | {f"p{p}": seconds * 1e3 for p, seconds in value.percentiles.items()}


def write(report: Report, path: Path, *, detailed: bool = True) -> None:
    """A single run is an object as from `vllm bench serve --save-result`; several are under `runs`."""
    runs = [run_object(run, report, detailed=detailed) for run in report.runs]
    if len(runs) == 1:
        body: dict[str, Any] = runs[0]
    else:
        body = {"kind": report.kind, "date": report.began.strftime("%Y%m%d-%H%M%S"), "runs": runs}
    extra: dict[str, Any] = {"kind": report.kind, "title": report.title, "notes": report.notes}
    if report.comparison is not None:
        extra["comparison"] = _plain(dataclasses.asdict(report.comparison))
    if report.sweeps:
        extra["sweeps"] = {k: _plain(dataclasses.asdict(value)) for k, value in report.sweeps.items()}
    body.setdefault("diptych", {}).update(extra)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_plain(body)), indent=1) + b"\n")


def _vllm_fields(name: str, value: Dist) -> dict[str, float]:
    return {
        f"mean_{name}_ms": value.mean * 1e3,
        f"median_{name}_ms": value.median * 1e3,
        f"std_{name}_ms": value.std * 1e3,
        f"p50_{name}_ms": value.median * 1e3,
        f"p90_{name}_ms": value.percentiles.get(90, 0.0) * 1e3,
        f"p95_{name}_ms": value.percentiles.get(95, 0.0) * 1e3,
        f"p99_{name}_ms": value.p99 * 1e3,
    }


def _lists(records: list[RequestRecord]) -> dict[str, Any]:
    """Seconds, one entry a request; a request without answer has 0 and an empty list, as in vLLM's files."""
    return {
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [round(record.ttft_s or 0.0, 6) for record in records],
        "itls": [[round(gap, 6) for gap, tokens in record.gaps() for _ in range(tokens)] for record in records],
        "start_times": [round(record.intended_s, 6) for record in records],
        "errors": [record.error for record in records],
    }


def _plain(value: Any) -> Any:
    """JSON has no infinity, and keys are strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
