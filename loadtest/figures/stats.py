"""Figures from records. Pure. Warm-up requests are left out; errors, refusals and cut streams are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diptych.loadtest.figures.record import Outcome, RequestRecord
from diptych.loadtest.figures.slo import Slo, attainment

PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Dist:
    """Seconds. `count` 0: there were no values, and the figures are 0."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    low: float = 0.0
    high: float = 0.0
    percentiles: Mapping[int, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return self.percentiles.get(50, 0.0)

    @property
    def p99(self) -> float:
        return self.percentiles.get(99, 0.0)


def dist(values: Iterable[float | None] | NDArray[np.float64]) -> Dist:
    """None values are left out."""
    if not isinstance(values, np.ndarray):
        values = np.array([value for value in values if value is not None], dtype=np.float64)
    if values.size == 0:
        return Dist()
    found = np.percentile(values, PERCENTILES)
    return Dist(
        count=int(values.size),
        mean=float(values.mean()),
        std=float(values.std()),
        low=float(values.min()),
        high=float(values.max()),
        percentiles={p: float(value) for p, value in zip(PERCENTILES, found, strict=True)},
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in seconds; rates per second over `duration_s` (first intended send to last end)."""

    requests: int
    outcomes: Mapping[str, int]
    warmup_requests: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    request_rate: float
    output_rate: float
    total_rate: float
    goodput: float
    slo_attainment: float
    peak_output_rate: float
    peak_concurrency: int
    ttft: Dist
    tpot: Dist
    itl: Dist
    chunk_gap: Dist
    e2e: Dist
    first_gap: Dist
    queue: Dist
    prefill: Dist
    transfer: Dist
    accept: Dist
    send_lag: Dist
    counted_by: Mapping[str, int]
    errors: Mapping[str, int]
    workers: int = 0
    local_prefills: int = 0
    kv_bytes: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Cached share of the prompt tokens, if the server reports it."""
        if self.cached_tokens is None or not self.input_tokens:
            return None
        return self.cached_tokens / self.input_tokens

    @property
    def output_rate_per_worker(self) -> float | None:
        return self.output_rate / self.workers if self.workers else None

    @property
    def completed(self) -> int:
        return self.outcomes.get(Outcome.OK.value, 0)

    @property
    def failed(self) -> int:
        """Requests that were neither answered completely nor cancelled by the client."""
        return self.requests - self.completed - self.outcomes.get(Outcome.CANCELLED.value, 0)


def summarise(records: Sequence[RequestRecord], slo: Slo, *, workers: int = 0) -> Summary:
    """`workers`: number of workers behind the target; 0: unknown."""
    measured = [record for record in records if not record.warmup]
    whole = [record for record in measured if record.ok]
    reported = [record.cached_tokens for record in whole if record.cached_tokens is not None]
    began = min((record.intended_s for record in measured), default=0.0)
    duration = max((record.end_s for record in measured), default=0.0) - began
    per_second = 1.0 / duration if duration > 0 else 0.0
    # tokens of cut and cancelled answers count for the rates, not for the latencies
    output_tokens = sum(record.output_tokens for record in measured)
    input_tokens = sum(record.input_tokens for record in measured if record.chunk_times)
    facts = [record.server for record in whole if record.server is not None]
    return Summary(
        requests=len(measured),
        outcomes=dict(Counter(record.outcome.value for record in measured)),
        warmup_requests=len(records) - len(measured),
        duration_s=duration,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(reported) if reported else None,
        request_rate=len(whole) * per_second,
        output_rate=output_tokens * per_second,
        total_rate=(input_tokens + output_tokens) * per_second,
        goodput=sum(slo.kept_by(record) for record in measured) * per_second,
        slo_attainment=attainment(measured, slo),
        peak_output_rate=_peak_rate(measured),
        peak_concurrency=_peak_concurrency(measured),
        ttft=dist(record.ttft_s for record in whole),
        tpot=dist(record.tpot_s for record in whole),
        itl=dist(token_gaps(whole)),
        chunk_gap=dist(chunk_gaps(whole)),
        e2e=dist(record.e2e_s for record in whole),
        first_gap=dist(record.first_gap_s for record in whole),
        queue=dist(record.queue_s for record in whole),
        prefill=dist(record.prefill_s for record in whole),
        transfer=dist(record.transfer_s for record in whole),
        accept=dist(record.accepted_s - record.intended_s for record in whole if record.accepted_s is not None),
        send_lag=dist(record.send_lag_s for record in measured),
        counted_by=dict(Counter(record.counted_by.value for record in whole)),
        errors=dict(Counter(_short(record) for record in measured if not record.ok and record.error).most_common(8)),
        workers=workers,
        local_prefills=sum(fact.local_prefill for fact in facts),
        kv_bytes=sum(fact.kv_bytes for fact in facts),
    )


def token_gaps(records: Iterable[RequestRecord]) -> NDArray[np.float64]:
    """Inter-token latencies, one entry a token: a k-token chunk counts k times a k-th of its interval."""
    pairs = [pair for record in records for pair in record.gaps()]
    if not pairs:
        return np.empty(0)
    return np.repeat(np.array([gap for gap, _ in pairs]), np.array([tokens for _, tokens in pairs]))


def chunk_gaps(records: Iterable[RequestRecord]) -> NDArray[np.float64]:
    """Intervals between chunks, whatever their content."""
    rows = [np.diff(np.array(record.chunk_times)) for record in records if len(record.chunk_times) > 1]
    return np.concatenate(rows) if rows else np.empty(0)


def by_group(records: Sequence[RequestRecord], key: str, slo: Slo) -> dict[str, Summary]:
    """Summaries by `tenant` or `kind`; empty for a single group."""
    names = sorted({str(getattr(record, key)) for record in records})
    if len(names) < 2:
        return {}
    return {name: summarise([r for r in records if getattr(r, key) == name], slo) for name in names}


def _short(record: RequestRecord) -> str:
    return f"{record.outcome.value}: {record.error[:120]}"


def _peak_rate(records: Sequence[RequestRecord]) -> float:
    """Most output tokens within one whole second."""
    seconds: Counter[int] = Counter()
    for record in records:
        for at, tokens in zip(record.chunk_times, record.chunk_tokens, strict=True):
            seconds[int(at)] += tokens
    return float(max(seconds.values(), default=0))


def _peak_concurrency(records: Sequence[RequestRecord]) -> int:
    edges = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    running = peak = 0
    for _, step in edges:
        running += step
        peak = max(peak, running)
    return peak
