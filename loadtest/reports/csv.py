"""CSV report: one row a request, times in milliseconds."""

from __future__ import annotations

import csv
from pathlib import Path

from diptych.loadtest.figures.record import RequestRecord
from diptych.loadtest.runs.result import Report

COLUMNS = (
    *("run", "target", "round", "rate", "index", "kind", "session", "tenant", "warmup", "outcome", "status", "error"),
    *("finish_reason", "intended_ms", "sent_ms", "accepted_ms", "first_token_ms", "end_ms", "send_lag_ms", "ttft_ms"),
    *("tpot_ms", "e2e_ms", "first_gap_ms", "max_gap_ms", "input_tokens", "output_tokens", "cached_tokens", "chunks"),
    *(
        "counted_by",
        "queue_ms",
        "prefill_ms",
        "transfer_ms",
        "prefill",
        "decode",
        "transport",
        "kv_bytes",
        "local_prefill",
    ),
)


def write(report: Report, path: Path) -> None:
    """Seed, versions, machine and git hash are comment lines at the top (`#`)."""
    environment = report.environment
    with path.open("w", newline="") as file:
        file.write(f"# {report.title}; {report.began.isoformat(timespec='seconds')}\n# {environment.line}\n")
        file.write(f"# versions {environment.versions}\n# seeds {sorted({run.config.seed for run in report.runs})}\n")
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for number, run in enumerate(report.runs):
            for record in run.records:
                rows.writerow([number, run.label, run.round, run.rate, *_row(record)])


def _row(record: RequestRecord) -> list[object]:
    server = record.server
    return [
        *(record.index, record.kind, record.session, record.tenant, int(record.warmup), record.outcome.value),
        *(record.status, record.error, record.finish_reason, _ms(record.intended_s), _ms(record.sent_s)),
        *(_ms(record.accepted_s), _ms(record.chunk_times[0] if record.chunk_times else None), _ms(record.end_s)),
        *(_ms(record.send_lag_s), _ms(record.ttft_s), _ms(record.tpot_s), _ms(record.e2e_s), _ms(record.first_gap_s)),
        *(_ms(max((gap for gap, _ in record.gaps()), default=None)), record.input_tokens, record.output_tokens),
        *(
            "" if record.cached_tokens is None else record.cached_tokens,
            len(record.chunk_times),
            record.counted_by.value,
        ),
        *(_ms(record.queue_s), _ms(record.prefill_s), _ms(record.transfer_s)),
        *(
            (server.prefill, server.decode, server.transport, server.kv_bytes, int(server.local_prefill))
            if server
            else [""] * 5
        ),
    ]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:.3f}"
