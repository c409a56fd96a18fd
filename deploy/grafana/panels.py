"""The boards' panels: title, unit, and (query, legend) of each series."""

from __future__ import annotations

Series = tuple[str, str]
Panel = tuple[str, str, list[Series]]

WORKERS = 'role=~"prefill|decode"'
WINDOW = "[$__rate_interval]"
# Registered only where a router is told to: --tenant-metrics, --shadow-workers. Their panels are empty otherwise.
OPTIONAL = ("diptych_tenant_", "diptych_shadow_")
# The objectives that the overview's first panels show; the alerts of prometheus/rules.yml use the same.
TTFT_SLO_S, ITL_SLO_S = "1.0", "0.1"


def quantiles(name: str, by: str = "") -> list[Series]:
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return [
        (
            f"histogram_quantile({q}, sum by ({labels}) (rate(diptych_{name}_bucket{WINDOW})))",
            f"p{int(q * 100)}{legend}",
        )
        for q in (0.5, 0.95, 0.99)
    ]


def p95(name: str, legend: str) -> Series:
    return f"histogram_quantile(0.95, sum by (le) (rate(diptych_{name}_bucket{WINDOW})))", legend


def within(name: str, seconds: str) -> Series:
    """Share of what was faster than `seconds`, a bucket's bound."""
    good = f'sum(rate(diptych_{name}_bucket{{le="{seconds}"}}{WINDOW}))'
    return f"{good} / sum(rate(diptych_{name}_count{WINDOW}))", f"within {float(seconds):g} s"


def rate(name: str, by: str, match: str = "") -> list[Series]:
    return [(f"sum by ({by}) (rate(diptych_{name}{{{match}}}{WINDOW}))", f"{{{{{by}}}}}")]


def ratio(top: str, bottom: str, by: str, legend: str) -> Series:
    return f"sum by ({by}) (rate({top}{WINDOW})) / sum by ({by}) (rate({bottom}{WINDOW}))", legend


OVERVIEW: list[Panel] = [
    ("SLO: first token in time", "percentunit", [within("time_to_first_token_seconds", TTFT_SLO_S)]),
    ("SLO: tokens in time", "percentunit", [within("inter_token_latency_seconds", ITL_SLO_S)]),
    ("SLO: requests that ended well", "percentunit", [(
        f"sum(rate(diptych_request_success_total{WINDOW}))"
        f" / (sum(rate(diptych_request_success_total{WINDOW})) + (sum(rate(diptych_request_errors_total{WINDOW})) or vector(0)))",
        "good",
    )]),
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Inter-token latency", "s", quantiles("inter_token_latency_seconds")),
    ("End to end", "s", quantiles("e2e_request_latency_seconds")),
    ("Answers by reason of their end", "reqps", rate("request_success_total", "finished_reason")),
    ("Failed requests by reason", "reqps", rate("request_errors_total", "reason")),
    ("Tokens a second", "short", [
        (f'sum(rate(diptych_prompt_tokens_total{{role="router"}}{WINDOW}))', "prompt"),
        (f'sum(rate(diptych_generation_tokens_total{{role="router"}}{WINDOW}))', "generated"),
    ]),
    ("Requests running", "short", [(f"diptych_num_requests_running{{{WORKERS}}}", "{{instance}}")]),
    ("Requests waiting", "short", [(f"diptych_num_requests_waiting{{{WORKERS}}}", "{{instance}}")]),
    ("KV blocks in use", "percentunit", [(f"diptych_kv_cache_usage_perc{{{WORKERS}}}", "{{instance}}")]),
    ("Prefix cache hit rate", "percentunit", [
        ratio("diptych_prefix_cache_hits_total", "diptych_prefix_cache_queries_total", "role", "{{role}}"),
    ]),
    ("View of the cluster is old", "bool", [("diptych_degraded", "{{instance}}")]),
    ("Scrapes that answer", "bool", [('up{job="diptych"}', "{{instance}}")]),
]  # fmt: skip

PD: list[Panel] = [
    ("Where a request's time goes, p95", "s", [
        p95("request_queue_time_seconds", "queue"), p95("request_prefill_time_seconds", "prefill"),
        p95("request_transfer_time_seconds", "transfer"), p95("first_to_second_token_seconds", "first to second token"),
    ]),
    ("From the first token to the second", "s", quantiles("first_to_second_token_seconds")),
    ("KV still on its way after the first token", "s", quantiles("request_transfer_time_seconds")),
    ("KV moved", "Bps", [(f'rate(diptych_kv_transfer_bytes_total{{role="decode"}}{WINDOW})', "{{instance}}")]),
    ("One slab's transfer", "s", quantiles("kv_transfer_seconds")),
    ("Failed transfers by reason", "ops", rate("kv_transfer_failures_total", "reason")),
    ("Slabs by state", "short", [("sum by (role, state) (diptych_kv_slabs)", "{{role}} {{state}}")]),
    ("Where prompt tokens' KV came from", "short", rate("prompt_tokens_by_source_total", "source", WORKERS)),
    ("Waiting, by reason", "short", [("sum by (role, reason) (diptych_num_requests_waiting_by_reason)", "{{role}} {{reason}}")]),
    ("Prompt tokens that wait", "short", [("diptych_waiting_prompt_tokens", "{{instance}}")]),
    ("Prefill rate, measured", "short", [("diptych_prefill_tokens_per_second", "{{instance}}")]),
    ("A step of decode, measured", "s", [("diptych_decode_step_seconds", "{{instance}}")]),
    ("Tokens in a step", "short", quantiles("iteration_tokens_total", "role")),
    ("Preemptions", "ops", rate("num_preemptions_total", "instance")),
    ("Engine steps", "ops", rate("engine_steps_total", "instance")),
    ("Prefill busy, of its measured rate", "percentunit", [(
        f'rate(diptych_prompt_tokens_by_source_total{{role="prefill", source="local_compute"}}{WINDOW})'
        ' / ignoring(source) (diptych_prefill_tokens_per_second{role="prefill"} > 0)',
        "{{instance}}",
    )]),
    ("Decode busy, of its steps' time", "percentunit", [(
        f'rate(diptych_engine_steps_total{{role="decode"}}{WINDOW}) * diptych_decode_step_seconds{{role="decode"}}',
        "{{instance}}",
    )]),
    ("Cached blocks: age at eviction", "s", quantiles("kv_block_lifetime_seconds", "role")),
    ("Cached blocks: idle before eviction", "s", quantiles("kv_block_idle_before_evict_seconds", "role")),
    ("Cached blocks: pause before the next hit", "s", quantiles("kv_block_reuse_gap_seconds", "role")),
    ("Requests whose lent KV expired", "ops", rate("kv_expired_requests_total", "instance")),
    ("The pool's blocks", "short", [(
        'diptych_cache_config_info', "{{instance}}: {{num_blocks}} blocks of {{block_size}}",
    )]),
]  # fmt: skip

ROUTER: list[Panel] = [
    ("Requests running and waiting for a first token", "short", [
        ('sum(diptych_num_requests_running{role="router"})', "running"),
        ('sum(diptych_num_requests_waiting{role="router"})', "wait for a first token"),
    ]),
    ("Checks, template and tokenizer", "s", quantiles("tokenize_seconds")),
    ("Prompts by where they were placed", "reqps", rate("placements_total", "prefill")),
    ("What did not go as placed, by where it went", "reqps", rate("fallbacks_total", "to")),
    ("Prefill workers given up by decode, by reason", "reqps", rate("prefill_faults_total", "reason")),
    ("Requests placed again", "reqps", rate("replacements_total", "instance")),
    ("Regret: first token later than expected", "s", quantiles("placement_regret_seconds")),
    ("Expected against seen first token", "s", quantiles("predicted_ttft_error_seconds")),
    ("Cached tokens: error of the expectation", "percentunit", [
        ratio("diptych_predicted_cached_tokens_error_total", 'diptych_prompt_tokens_total{role="router"}', "job", "of prompt"),
    ]),
    ("Cached tokens: expected and seen", "short", [
        (f"sum(rate(diptych_predicted_cached_tokens_total{WINDOW}))", "expected"),
        (f"sum(rate(diptych_prompt_tokens_cached_total{WINDOW}))", "seen"),
    ]),
    ("Prompt tokens that nobody had to compute", "percentunit", [
        ratio("diptych_prompt_tokens_cached_total", 'diptych_prompt_tokens_total{role="router"}', "job", "cached"),
    ]),
    ("Prompt tokens of a request", "short", quantiles("request_prompt_tokens")),
    ("Generated tokens of a request", "short", quantiles("request_generation_tokens")),
    ("Time of computing, whole request", "s", quantiles("request_inference_time_seconds")),
    ("Decoding, whole request", "s", quantiles("request_decode_time_seconds")),
    ("KV that answers say they moved", "Bps", [
        (f'sum(rate(diptych_kv_transfer_bytes_total{{role="router"}}{WINDOW}))', "routers"),
    ]),
    ("Requests as admission judged them", "reqps", rate("admission_total", "verdict")),
    ("Refusals, or would-be ones, that were right", "reqps", rate("admission_refusals_judged_total", "right")),
    ("Requests that wait for their turn", "short", [("diptych_requests_waiting_turn", "{{instance}}")]),
    ("Placement tickets by what became of them", "reqps", rate("placement_tickets_total", "outcome")),
    ("Copies of hot prefixes, since the start", "short", [("diptych_hot_prefix_copies", "{{instance}}")]),
    ("Shadow requests by outcome", "reqps", rate("shadow_requests_total", "outcome")),
    ("Cache news missing from some worker", "bool", [("diptych_mode_degraded", "{{instance}}")]),
]  # fmt: skip

# Only with `diptych router --tenant-metrics`: a tenant's name is a label then.
TENANTS: list[Panel] = [
    ("Requests a second", "reqps", rate("tenant_requests_total", "tenant")),
    ("Requests by how they ended", "reqps", [
        (f"sum by (tenant, outcome) (rate(diptych_tenant_requests_total{WINDOW}))", "{{tenant}} {{outcome}}"),
    ]),
    ("Generated tokens a second", "short", rate("tenant_generation_tokens_total", "tenant")),
    ("Prompt tokens a second", "short", rate("tenant_prompt_tokens_total", "tenant")),
    ("Share of prompt tokens cached", "percentunit", [
        ratio("diptych_tenant_prompt_tokens_cached_total", "diptych_tenant_prompt_tokens_total", "tenant", "{{tenant}}"),
    ]),
    ("Time to first token, p95", "s", [(
        f"histogram_quantile(0.95, sum by (le, tenant) (rate(diptych_tenant_time_to_first_token_seconds_bucket{WINDOW})))",
        "{{tenant}}",
    )]),
]  # fmt: skip

BOARDS: dict[str, tuple[str, list[Panel]]] = {
    "overview": ("Diptych overview", OVERVIEW),
    "pd": ("Diptych prefill, decode and KV", PD),
    "router": ("Diptych router", ROUTER),
    "tenants": ("Diptych tenants", TENANTS),
}
