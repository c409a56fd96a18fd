"""HTML report, one self-contained page: figures, comparison, sweep, latency over time, distributions, timelines of
requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

import msgspec

from diptych.loadtest.figures.record import RequestRecord
from diptych.loadtest.figures.stats import Dist, Summary, by_group, token_gaps
from diptych.loadtest.reports import svg
from diptych.loadtest.reports.json import summary_object
from diptych.loadtest.reports.svg import Series, Span
from diptych.loadtest.runs.compare import Comparison
from diptych.loadtest.runs.result import Report, RunRecord
from diptych.loadtest.runs.sweep import Sweep

TIMELINE_ROWS = 40
PHASES = (
    ("queue", "#9aa3ad"),
    ("prefill", "#2f6fb7"),
    ("transfer", "#d1622b"),
    ("decode", "#3a923a"),
    ("failed", "#b5484a"),
)
_STYLE = """
:root{color-scheme:light dark}body{font:14px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}
td,th{padding:.25em .7em;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child{text-align:left}.w{border-left:4px solid #d1622b;padding:.3em .8em;margin:.5em 0}
.charts{display:flex;flex-wrap:wrap;gap:12px}svg{max-width:100%;height:auto}pre{overflow-x:auto}.m{opacity:.7}
"""


def write(report: Report, path: Path) -> None:
    path.write_text(page(report))


def page(report: Report) -> str:
    body = "".join(_body(report))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _body(report: Report) -> Iterator[str]:
    began = report.began.isoformat(timespec="seconds")
    yield f"<h1>{escape(report.title)}</h1><p class=m>{began}; {escape(report.environment.line)}</p>"
    for note in (*report.notes, *(f"{run.label}: {text}" for run in report.runs for text in run.warnings)):
        yield f"<p class=w>{escape(note)}</p>"
    if report.comparison is not None:
        yield _comparison_table(report.comparison)
    groups = _by_label(report.runs)
    if report.sweeps:
        yield from _sweep_part(list(report.sweeps.values()))
    yield "<h2>Figures</h2>" + _figures(report.runs)
    yield from _tenants(report.runs)
    yield "<h2>Latency over time</h2><p class=m>By the intended send time; a request that failed has no dot.</p>"
    yield "<div class=charts>"
    yield "".join(_over_time(groups))
    yield "</div><h2>Distributions</h2><div class=charts>" + "".join(_distributions(groups)) + "</div>"
    yield "<h2>Single requests</h2><p class=m>Queue, prefill and transfer are the server's times if it reports them; "
    yield "else all until the first token is prefill. Hover for figures.</p>"
    for label, runs in groups.items():
        yield _timelines(label, runs[-1])
    yield "<h2>Settings</h2>"
    for run in report.runs[:1] if len(groups) == 1 else [runs[0] for runs in groups.values()]:
        shown = {"target": run.url, "model": run.model, "config": {k: str(v) for k, v in run.config.as_dict().items()}}
        yield f"<details><summary>{escape(run.label)}</summary><pre>{_pretty(shown)}</pre></details>"
    yield f"<details><summary>machine and versions</summary><pre>{_pretty(report.environment.as_dict())}</pre></details>"
    everything = {f"{run.label} #{run.round}": summary_object(run.summary) for run in report.runs}
    yield f"<details><summary>all figures</summary><pre>{_pretty(everything)}</pre></details>"


def _pretty(value: object) -> str:
    return escape(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


def _by_label(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def _measured(runs: Sequence[RunRecord]) -> list[RequestRecord]:
    return [record for run in runs for record in run.records if not record.warmup]


def _figures(runs: Sequence[RunRecord]) -> str:
    def ms(pick: Callable[[Summary], Dist], what: str) -> Callable[[Summary], str]:
        def text(summary: Summary) -> str:
            value = pick(summary)
            return (
                f"{(value.mean if what == 'mean' else value.percentiles[int(what)]) * 1e3:.1f}" if value.count else "-"
            )

        return text

    rows: list[tuple[str, Callable[[Summary], str]]] = [
        ("requests / ok / failed", lambda s: f"{s.requests} / {s.completed} / {s.failed}"),
        ("outcomes", lambda s: ", ".join(f"{k} {v}" for k, v in s.outcomes.items())),
        ("warm-up, not counted", lambda s: str(s.warmup_requests)),
        ("duration s", lambda s: f"{s.duration_s:.1f}"),
        ("input / output tokens", lambda s: f"{s.input_tokens} / {s.output_tokens}"),
        ("answers/s", lambda s: f"{s.request_rate:.2f}"),
        ("goodput/s (SLO kept)", lambda s: f"{s.goodput:.2f} ({s.slo_attainment:.0%})"),
        ("output tokens/s", lambda s: f"{s.output_rate:.1f}"),
        ("  per worker", lambda s: f"{s.output_rate_per_worker:.1f}" if s.output_rate_per_worker is not None else "-"),
        ("prefix hit rate", lambda s: f"{s.hit_rate:.1%}" if s.hit_rate is not None else "-"),
    ]
    metrics: tuple[tuple[str, Callable[[Summary], Dist]], ...] = (
        ("TTFT", lambda s: s.ttft),
        ("TTFT: queue", lambda s: s.queue),
        ("TTFT: prefill", lambda s: s.prefill),
        ("1st to 2nd token", lambda s: s.first_gap),
        ("transfer", lambda s: s.transfer),
        ("TPOT", lambda s: s.tpot),
        ("ITL per token", lambda s: s.itl),
        ("gap between chunks", lambda s: s.chunk_gap),
        ("E2E", lambda s: s.e2e),
        ("delay of the harness, sends", lambda s: s.send_lag),
    )
    for name, pick in metrics:
        rows += [
            (f"{name} ms, {'p' if what != 'mean' else ''}{what}", ms(pick, what)) for what in ("mean", "50", "90", "99")
        ]
    head = "".join(f"<th>{escape(run.label)}<br>{_rate_text(run)}</th>" for run in runs)
    body = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{escape(text(run.summary))}</td>" for run in runs) + "</tr>"
        for name, text in rows
    )
    lag = "".join(f"<td>{run.lag.loop.p99 * 1e3:.1f}</td>" for run in runs)
    return (
        f"<table><tr><th></th>{head}</tr>{body}<tr><td>delay of the harness, event loop ms, p99</td>{lag}</tr></table>"
    )


def _rate_text(run: RunRecord) -> str:
    if run.config.closed_loop:
        return f"closed, {run.config.max_concurrency} users"
    return f"open, {run.rate:g} req/s" if run.rate else "trace"


def _tenants(runs: Sequence[RunRecord]) -> Iterator[str]:
    for run in runs:
        groups = by_group(_measured([run]), "tenant", run.config.slo_spec())
        if groups:
            rows = "".join(
                f"<tr><td>{escape(name)}</td><td>{s.requests}</td><td>{s.failed}</td><td>{s.ttft.median * 1e3:.0f}</td>"
                f"<td>{s.ttft.p99 * 1e3:.0f}</td><td>{s.output_rate:.1f}</td></tr>"
                for name, s in groups.items()
            )
            yield f"<h3>Tenants, {escape(run.label)}</h3><table><tr><th>tenant</th><th>requests</th><th>failed</th>"
            yield f"<th>TTFT p50 ms</th><th>p99</th><th>tokens/s</th></tr>{rows}</table>"


def _comparison_table(comparison: Comparison) -> str:
    rows = []
    for ratio in comparison.ratios:
        spread = f"{ratio.low:.2f} - {ratio.high:.2f}" if ratio.ratio is not None else "-"
        quotient = f"{ratio.ratio:.2f}" if ratio.ratio is not None else "-"
        rows.append(
            f"<tr><td>{escape(ratio.name)} {ratio.unit}</td><td>{ratio.a:.2f}</td><td>{ratio.b:.2f}</td>"
            f"<td><b>{quotient}</b></td>"
            f"<td>{spread}</td><td>{ratio.better}</td></tr>"
        )
    return (
        f"<h2>{escape(comparison.b)} against {escape(comparison.a)}</h2><p class=m>{comparison.rounds} rounds "
        f"in turns, A B A B; medians; the ratio is taken within a round.</p><table><tr><th></th>"
        f"<th>A: {escape(comparison.a)}</th><th>B: {escape(comparison.b)}</th>"
        f"<th>B / A</th><th>spread</th><th>better</th></tr>{''.join(rows)}</table>"
    )


def sweep_charts(sweeps: Sequence[Sweep]) -> list[str]:
    def lines(value: Callable[..., float]) -> list[Series]:
        return [Series(s.label, [(p.rate, value(p)) for p in s.points]) for s in sweeps]

    ideal = [(p.rate, p.rate) for p in max(sweeps, key=lambda s: s.points[-1].rate).points]
    offered = Series("offered", ideal, color="#888888", dashed=True)
    return [
        svg.chart(
            "Rate against goodput", [*lines(lambda p: p.goodput), offered], x="offered req/s", y="req/s within the SLO"
        ),
        svg.chart("SLO attainment", lines(lambda p: p.attainment), x="offered req/s", y="share", y_max=1.05),
        svg.chart("TTFT p50", lines(lambda p: p.ttft_p50_s * 1e3), x="offered req/s", y="ms"),
        svg.chart("TPOT p50", lines(lambda p: p.tpot_p50_s * 1e3), x="offered req/s", y="ms"),
    ]


def _sweep_part(sweeps: Sequence[Sweep]) -> Iterator[str]:
    yield f"<h2>Sweep</h2><p class=m>SLO {escape(sweeps[0].slo)} (ms), to be met by {sweeps[0].attain:.0%} of the requests</p>"
    yield "<table><tr>"
    yield "<th></th><th>result</th><th>best goodput</th></tr>"
    for one in sweeps:
        yield f"<tr><td>{escape(one.label)}</td><td>{escape(one.verdict)}</td><td>{one.best_goodput:.2f} req/s</td></tr>"
    yield "</table><div class=charts>" + "".join(sweep_charts(sweeps)) + "</div>"


def _over_time(groups: dict[str, list[RunRecord]]) -> Iterator[str]:
    def dots(value: Callable[[RequestRecord], float | None]) -> list[Series]:
        found = []
        for label, runs in groups.items():
            pairs = [(r.intended_s, value(r)) for r in _measured(runs) if r.ok]
            found.append(Series(label, [(at, v * 1e3) for at, v in pairs if v is not None], "dots"))
        return found

    yield svg.chart("TTFT", dots(lambda r: r.ttft_s), x="intended send, s", y="ms")
    yield svg.chart("End to end", dots(lambda r: r.e2e_s), x="intended send, s", y="ms")


def _distributions(groups: dict[str, list[RunRecord]]) -> Iterator[str]:
    def curves(values: Callable[[list[RequestRecord]], Sequence[float]]) -> list[Series]:
        whole = {label: [r for r in _measured(runs) if r.ok] for label, runs in groups.items()}
        return [Series(label, svg.cdf([v * 1e3 for v in values(records)])) for label, records in whole.items()]

    def some(value: Callable[[RequestRecord], float | None]) -> Callable[[list[RequestRecord]], Sequence[float]]:
        return lambda records: [v for v in map(value, records) if v is not None]

    for title, values in (
        ("TTFT", some(lambda r: r.ttft_s)),
        ("TPOT", some(lambda r: r.tpot_s)),
        ("ITL per token", lambda records: token_gaps(records).tolist()),
        ("E2E", some(lambda r: r.e2e_s)),
        ("First to second token", some(lambda r: r.first_gap_s)),
    ):
        yield svg.chart(f"{title}, share at or below", curves(values), x="ms", y="share", log_x=True, y_max=1.0)


def _timelines(label: str, run: RunRecord) -> str:
    records = sorted(_measured([run]), key=lambda record: record.intended_s)
    step = max(1, len(records) // TIMELINE_ROWS)
    rows = [(f"#{record.index}", _spans(record)) for record in records[::step][:TIMELINE_ROWS]]
    return svg.timeline(f"Timelines, {label}", rows, PHASES, x="s since the start")


def _spans(record: RequestRecord) -> list[Span]:
    colors = dict(PHASES)
    if not record.chunk_times:
        text = f"{record.outcome.value}: {record.error[:80]}"
        return [Span(record.intended_s, max(record.end_s, record.intended_s), colors["failed"], text)]
    first, last = record.chunk_times[0], record.chunk_times[-1]
    queue, transfer = record.queue_s or 0.0, record.transfer_s or 0.0
    begin = min(first, record.intended_s + queue)
    moved = min(last, first + transfer)
    color = colors["decode"] if record.ok else colors["failed"]
    return [
        Span(record.intended_s, begin, colors["queue"], f"queue {queue * 1e3:.0f} ms"),
        Span(begin, first, colors["prefill"], f"prefill until the first token {(first - begin) * 1e3:.0f} ms"),
        Span(first, moved, colors["transfer"], f"transfer after the first token {(moved - first) * 1e3:.0f} ms"),
        Span(
            moved, last, color, f"{record.outcome.value}: {record.output_tokens} tokens, {(last - first) * 1e3:.0f} ms"
        ),
    ]
