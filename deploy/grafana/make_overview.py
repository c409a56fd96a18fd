"""Write dashboards/overview.json: the board is a table of panels here, and never edited by hand.

python deploy/grafana/make_overview.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent / "dashboards" / "overview.json"
WORKERS = 'role=~"prefill|decode"'
Series = tuple[str, str]  # query, legend


def quantiles(name: str) -> list[Series]:
    return [
        (f"histogram_quantile({q}, sum by (le) (rate(diptych_{name}_bucket[$__rate_interval])))", f"p{int(q * 100)}")
        for q in (0.5, 0.95, 0.99)
    ]


def rate(name: str, by: str, match: str = "") -> list[Series]:
    return [(f"sum by ({by}) (rate(diptych_{name}{{{match}}}[$__rate_interval]))", f"{{{{{by}}}}}")]


# title, unit, series
PANELS: list[tuple[str, str, list[Series]]] = [
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Inter-token latency", "s", quantiles("inter_token_latency_seconds")),
    ("End to end", "s", quantiles("e2e_request_latency_seconds")),
    ("Answers by reason of their end", "reqps", rate("request_success_total", "finished_reason")),
    ("Failed requests by reason", "reqps", rate("request_errors_total", "reason")),
    ("Prompts by where they were placed", "reqps", rate("placements_total", "prefill")),
    ("Tokens a second", "short", [
        ('sum(rate(diptych_prompt_tokens_total{role="router"}[$__rate_interval]))', "prompt"),
        ('sum(rate(diptych_generation_tokens_total{role="router"}[$__rate_interval]))', "generated"),
    ]),
    ("Requests running", "short", [(f"diptych_num_requests_running{{{WORKERS}}}", "{{instance}}")]),
    ("Requests waiting", "short", [(f"diptych_num_requests_waiting{{{WORKERS}}}", "{{instance}}")]),
    ("KV blocks in use", "percentunit", [(f"diptych_kv_cache_usage_perc{{{WORKERS}}}", "{{instance}}")]),
    ("Prefix cache hit rate", "percentunit", [(
        "sum by (role) (rate(diptych_prefix_cache_hits_total[$__rate_interval]))"
        " / sum by (role) (rate(diptych_prefix_cache_queries_total[$__rate_interval]))",
        "{{role}}",
    )]),
    ("Where prompt tokens' KV came from", "short", rate("prompt_tokens_by_source_total", "source", WORKERS)),
    ("KV moved", "Bps", [('rate(diptych_kv_transfer_bytes_total{role="decode"}[$__rate_interval])', "{{instance}}")]),
    ("One slab's transfer", "s", quantiles("kv_transfer_seconds")),
    ("Failed transfers by reason", "ops", rate("kv_transfer_failures_total", "reason")),
    ("Slabs by state", "short", [("sum by (role, state) (diptych_kv_slabs)", "{{role}} {{state}}")]),
    ("Preemptions", "ops", rate("num_preemptions_total", "instance")),
    ("Engine steps", "ops", rate("engine_steps_total", "instance")),
    ("Requests placed again", "reqps", rate("replacements_total", "instance")),
    ("View of the cluster is old", "bool", [("diptych_degraded", "{{instance}}")]),
    ("Scrapes that answer", "bool", [('up{job="diptych"}', "{{instance}}")]),
]  # fmt: skip


def board() -> dict[str, object]:
    source = {"type": "prometheus", "uid": "prometheus"}
    panels = []
    for number, (title, unit, series) in enumerate(PANELS):
        targets = [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend, "datasource": source}
            for i, (query, legend) in enumerate(series)
        ]
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": title,
                "datasource": source,
                "gridPos": {"x": 8 * (number % 3), "y": 7 * (number // 3), "w": 8, "h": 7},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": targets,
            }
        )
    return {
        "uid": "diptych-overview",
        "title": "Diptych overview",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": panels,
    }


def main() -> int:
    text = json.dumps(board(), indent=1) + "\n"
    if "--check" in sys.argv:
        return int(TARGET.read_text(encoding="utf-8") != text)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
