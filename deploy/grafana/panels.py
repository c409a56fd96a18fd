"""The boards' panels: title, unit, and (query, legend) of each series."""

from __future__ import annotations

Series = tuple[str, str]
Panel = tuple[str, str, list[Series]]

WORKERS = 'role=~"prefill|decode"'
WINDOW = "[$__rate_interval]"
# Only there with --tenant-metrics, --shadow-workers, --router-processes, a GPU, claims on cached KV, a lower tier, or adapters.
OPTIONAL = tuple(
    f"diptych_{name}"
    for name in ("tenant_", "shadow_", "router_processes", "gpu_", "kv_claim", "kv_tier_", "adapter", "lora_")
)
# Objectives of the overview's first panels; the alerts of prometheus/rules.yml use the same.
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
    """Share of observations below `seconds`, a bucket's bound."""
    good = f'sum(rate(diptych_{name}_bucket{{le="{seconds}"}}{WINDOW}))'
    return f"{good} / sum(rate(diptych_{name}_count{WINDOW}))", f"within {float(seconds):g} s"


def rate(name: str, by: str, match: str = "") -> list[Series]:
    return [(f"sum by ({by}) (rate(diptych_{name}{{{match}}}{WINDOW}))", f"{{{{{by}}}}}")]


def ratio(top: str, bottom: str, by: str, legend: str) -> Series:
    return f"sum by ({by}) (rate({top}{WINDOW})) / sum by ({by}) (rate({bottom}{WINDOW}))", legend


OVERVIEW: list[Panel] = [
    ("SLO: first token in time", "percentunit", [within("time_to_first_token_seconds", TTFT_SLO_S)]),
    ("SLO: tokens in time", "percentunit", [within("inter_token_latency_seconds", ITL_SLO_S)]),
    ("SLO: successful requests", "percentunit", [(
        f"sum(rate(diptych_request_success_total{WINDOW}))"
        f" / (sum(rate(diptych_request_success_total{WINDOW})) + (sum(rate(diptych_request_errors_total{WINDOW})) or vector(0)))",
        "good",
    )]),
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Inter-token latency", "s", quantiles("inter_token_latency_seconds")),
    ("End to end", "s", quantiles("e2e_request_latency_seconds")),
    ("Answers by finish reason", "reqps", rate("request_success_total", "finished_reason")),
    ("Failed requests by reason", "reqps", [
        *rate("request_errors_total", "reason"),
        (f"sum by (reason) (rate(diptych_unparsed_requests_total{WINDOW}))", "not read: {{reason}}"),
    ]),
    ("Tokens a second", "short", [
        (f'sum(rate(diptych_prompt_tokens_total{{role="router"}}{WINDOW}))', "prompt"),
        (f'sum(rate(diptych_generation_tokens_total{{role="router"}}{WINDOW}))', "generated"),
    ]),
    ("Requests running", "short", [(f"diptych_num_requests_running{{{WORKERS}}}", "{{worker}}")]),
    ("Requests waiting", "short", [(f"diptych_num_requests_waiting{{{WORKERS}}}", "{{worker}}")]),
    ("KV blocks in use", "percentunit", [(f"diptych_kv_cache_usage_perc{{{WORKERS}}}", "{{worker}}")]),
    ("Prefix cache hit rate", "percentunit", [
        ratio("diptych_prefix_cache_hits_total", "diptych_prefix_cache_queries_total", "role", "{{role}}"),
    ]),
    ("View of the cluster is stale", "bool", [("diptych_degraded", "{{worker}}")]),
    ("Successful scrapes", "bool", [('up{job="diptych"}', "{{role}} {{instance}}")]),
]  # fmt: skip

PD: list[Panel] = [
    ("Where a request's time goes, p95", "s", [
        p95("request_queue_time_seconds", "queue"), p95("request_prefill_time_seconds", "prefill"),
        p95("request_transfer_time_seconds", "transfer"), p95("first_to_second_token_seconds", "first to second token"),
    ]),
    ("From the first token to the second", "s", quantiles("first_to_second_token_seconds")),
    ("KV still on its way after the first token", "s", quantiles("request_transfer_time_seconds")),
    ("KV moved", "Bps", [(f'rate(diptych_kv_transfer_bytes_total{{role="decode"}}{WINDOW})', "{{worker}}")]),
    ("One slab's transfer", "s", quantiles("kv_transfer_seconds")),
    ("Failed transfers by reason", "ops", rate("kv_transfer_failures_total", "reason")),
    ("Slabs by state", "short", [("sum by (role, state) (diptych_kv_slabs)", "{{role}} {{state}}")]),
    ("Prompt tokens by source of their KV", "short", rate("prompt_tokens_by_source_total", "source", WORKERS)),
    ("Waiting, by reason", "short", [("sum by (role, reason) (diptych_num_requests_waiting_by_reason)", "{{role}} {{reason}}")]),
    ("Prompt tokens waiting", "short", [("diptych_waiting_prompt_tokens", "{{worker}}")]),
    ("Prefill rate, measured", "short", [("diptych_prefill_tokens_per_second", "{{worker}}")]),
    ("Decode step, measured", "s", [("diptych_decode_step_seconds", "{{worker}}")]),
    ("Tokens in a step", "short", quantiles("iteration_tokens_total", "role")),
    ("Preemptions", "ops", rate("num_preemptions_total", "worker")),
    ("Engine steps", "ops", rate("engine_steps_total", "worker")),
    ("Prefill busy, of its measured rate", "percentunit", [(
        f'rate(diptych_prompt_tokens_by_source_total{{role="prefill", source="local_compute"}}{WINDOW})'
        ' / ignoring(source) (diptych_prefill_tokens_per_second{role="prefill"} > 0)',
        "{{worker}}",
    )]),
    ("Decode busy, of its steps' time", "percentunit", [(
        f'rate(diptych_engine_steps_total{{role="decode"}}{WINDOW}) * diptych_decode_step_seconds{{role="decode"}}',
        "{{worker}}",
    )]),
    ("Cached blocks: age at eviction", "s", quantiles("kv_block_lifetime_seconds", "role")),
    ("Cached blocks: idle before eviction", "s", quantiles("kv_block_idle_before_evict_seconds", "role")),
    ("Cached blocks: time between two uses", "s", quantiles("kv_block_reuse_gap_seconds", "role")),
    ("Lower tiers: in use", "percentunit", [("diptych_kv_tier_used_bytes / diptych_kv_tier_bytes", "{{worker}} {{tier}}")]),
    ("Lower tiers: cached prompt tokens by tier", "short", rate("kv_tier_hit_tokens_total", "tier")),
    ("Lower tiers: tokens that other workers were offered, by tier", "short", rate("kv_tier_served_tokens_total", "tier")),
    ("Lower tiers: evicted and dropped blocks", "ops", [
        (f"sum by (tier) (rate(diptych_kv_tier_evicted_blocks_total{WINDOW}))", "{{tier}} evicted"),
        (f"sum by (tier) (rate(diptych_kv_tier_dropped_blocks_total{WINDOW}))", "{{tier}} not written in time"),
    ]),
    ("Lower tiers: errors by reason", "ops", rate("kv_tier_errors_total", "reason")),
    ("Requests whose KV lease expired", "ops", rate("kv_expired_requests_total", "worker")),
    ("Claimed KV, by rank of the tenant", "bytes", [("sum by (role, rank) (diptych_kv_claimed_bytes)", "{{role}} {{rank}}")]),
    ("Claims made and ended, by reason", "Bps", [
        *rate("kv_claims_total", "role"), *rate("kv_claims_ended_total", "reason"),
    ]),
    ("Hits that a claim has kept", "short", rate("kv_claim_kept_tokens_total", "worker")),
    ("Adapters: in host memory and on the device", "short", [
        ("diptych_lora_resident", "{{worker}} in host memory"), ("diptych_lora_slots_used", "{{worker}} on the device"),
    ]),
    ("Adapters: bytes in host memory", "bytes", [("diptych_lora_resident_bytes", "{{worker}}")]),
    ("Adapters: in use", "short", [
        ("diptych_lora_running", "{{worker}} adapters computed with"), ("diptych_lora_requests", "{{worker}} requests"),
    ]),
    ("Adapters: loads by outcome", "ops", rate("lora_loads_total", "outcome")),
    ("Adapters: time of a load", "s", quantiles("lora_load_seconds", "role")),
    ("Adapters: installed and evicted", "ops", [
        (f"sum by (worker) (rate(diptych_lora_installs_total{WINDOW}))", "{{worker}} installed"),
        (f"sum by (worker) (rate(diptych_lora_slot_evictions_total{WINDOW}))", "{{worker}} left the device"),
        (f"sum by (worker) (rate(diptych_lora_evictions_total{WINDOW}))", "{{worker}} left host memory"),
    ]),
    ("The pool's blocks", "short", [(
        'diptych_cache_config_info', "{{worker}}: {{num_blocks}} blocks of {{block_size}}",
    )]),
    ("GPU: share of time with a kernel", "percentunit", [
        (f"rate(diptych_gpu_busy_seconds_total{WINDOW})", "{{worker}}"), ("diptych_gpu_utilization", "{{worker}} now"),
    ]),
    ("GPU: memory in use", "percentunit", [("diptych_gpu_memory_used_bytes / diptych_gpu_memory_total_bytes", "{{worker}}")]),
    ("GPU: power", "watt", [("diptych_gpu_power_watts", "{{worker}}"), ("diptych_gpu_power_limit_watts", "{{worker}} limit")]),
    ("GPU: clocks", "hertz", [
        ("diptych_gpu_sm_clock_hertz", "{{worker}} SM"), ("diptych_gpu_sm_clock_max_hertz", "{{worker}} SM, highest"),
        ("diptych_gpu_memory_clock_hertz", "{{worker}} memory"),
    ]),
    ("GPU: share of time with clocks held down", "percentunit", [(
        f"rate(diptych_gpu_throttled_seconds_total{WINDOW})", "{{worker}} {{reason}}",
    )]),
    ("GPU: temperature", "celsius", [("diptych_gpu_temperature_celsius", "{{worker}}")]),
    ("GPU: failed calls of NVML", "ops", rate("gpu_nvml_errors_total", "call")),
    ("GPU: bytes over NVLink", "Bps", [(f"rate(diptych_gpu_nvlink_bytes_total{WINDOW})", "{{worker}} {{direction}}")]),
]  # fmt: skip

ROUTER: list[Panel] = [
    ("Requests running and waiting for a first token", "short", [
        ('sum(diptych_num_requests_running{role="router"})', "running"),
        ('sum(diptych_num_requests_waiting{role="router"})', "waiting for a first token"),
    ]),
    ("Checks, template and tokenizer", "s", quantiles("tokenize_seconds")),
    ("Prompts by where they were placed", "reqps", rate("placements_total", "prefill")),
    ("Deviations from the placement", "reqps", rate("fallbacks_total", "to")),
    ("Prefill workers given up by decode, by reason", "reqps", rate("prefill_faults_total", "reason")),
    ("Requests placed again", "reqps", rate("replacements_total", "worker")),
    ("Lost decode workers' requests, by outcome", "reqps", rate("migrations_total", "outcome")),
    ("Answers that went on after a broken stream", "reqps", rate("resumes_total", "outcome")),
    ("From a loss to another worker's acceptance", "s", quantiles("migration_seconds")),
    ("Regret: lateness of the first token", "s", quantiles("placement_regret_seconds")),
    ("First token: error of the prediction", "s", quantiles("predicted_ttft_error_seconds")),
    ("Cached tokens: error of the prediction", "percentunit", [
        ratio("diptych_predicted_cached_tokens_error_total", 'diptych_prompt_tokens_total{role="router"}', "job", "of prompt"),
    ]),
    ("Cached tokens: predicted and actual", "short", [
        (f"sum(rate(diptych_predicted_cached_tokens_total{WINDOW}))", "expected"),
        (f"sum(rate(diptych_prompt_tokens_cached_total{WINDOW}))", "seen"),
    ]),
    ("Share of prompt tokens that were cached", "percentunit", [
        ratio("diptych_prompt_tokens_cached_total", 'diptych_prompt_tokens_total{role="router"}', "job", "cached"),
    ]),
    ("Prompt tokens of a request", "short", quantiles("request_prompt_tokens")),
    ("Generated tokens of a request", "short", quantiles("request_generation_tokens")),
    ("Time of computing, whole request", "s", quantiles("request_inference_time_seconds")),
    ("Decoding, whole request", "s", quantiles("request_decode_time_seconds")),
    ("KV moved, by answers' explanations", "Bps", [
        (f'sum(rate(diptych_kv_transfer_bytes_total{{role="router"}}{WINDOW}))', "routers"),
    ]),
    ("Requests by admission decision", "reqps", rate("admission_total", "verdict")),
    ("Correctness of admission's refusals", "reqps", rate("admission_refusals_judged_total", "right")),
    ("Requests waiting in the router", "short", [("diptych_requests_waiting_turn", "{{worker}}")]),
    ("Placement tickets by outcome", "reqps", rate("placement_tickets_total", "outcome")),
    ("Copies of hot prefixes, since the start", "short", [("diptych_hot_prefix_copies", "{{worker}}")]),
    ("Arrived requests", "reqps", rate("requests_total", "worker")),
    ("Tokens of unfinished answers", "short", rate("unfinished_tokens_total", "of")),
    ("Shadow requests by outcome", "reqps", rate("shadow_requests_total", "outcome")),
    ("Adapters: requests by outcome", "reqps", [
        (f"sum by (adapter, outcome) (rate(diptych_adapter_requests_total{WINDOW}))", "{{adapter}} {{outcome}}"),
    ]),
    ("Adapters: requests that had the canary", "reqps", rate("adapter_canary_requests_total", "adapter")),
    ("Adapters: prompt tokens a second", "short", rate("adapter_prompt_tokens_total", "adapter")),
    ("Adapters: generated tokens a second", "short", rate("adapter_generation_tokens_total", "adapter")),
    ("Adapters: registered, and refused for want of room", "short", [
        ("diptych_adapters_registered", "{{worker}} registered"),
        (f"sum by (worker) (rate(diptych_adapter_turns_refused_total{WINDOW}))", "{{worker}} refused a second"),
    ]),
    ("Cache events missing from some worker", "bool", [("diptych_mode_degraded", "{{worker}}")]),
    ("Processes of each router", "short", [
        ("count by (instance) (diptych_router_processes)", "{{instance}} answering"),
        ("max by (instance) (diptych_router_processes)", "{{instance}}"),
    ]),
]  # fmt: skip

# Only with `diptych router --tenant-metrics`, which adds the tenant's name as a label.
TENANTS: list[Panel] = [
    ("Requests a second", "reqps", rate("tenant_requests_total", "tenant")),
    ("Requests by outcome", "reqps", [
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

# What a panel shows and how to read it: the text behind the "i" of its title. Every panel has one.
DESCRIPTIONS: dict[str, str] = {
    "SLO: first token in time": (
        "Share of requests whose first token arrived within the objective. Falls before users complain."
    ),
    "SLO: tokens in time": "Share of tokens that arrived within the objective after the previous one.",
    "SLO: successful requests": "Answers among all requests; refused, failed and lost requests count against it.",
    "Time to first token": "From a request's arrival at the router to its first token, queueing and prefill included.",
    "Inter-token latency": "Time between two tokens of one answer after the first, for each choice.",
    "End to end": "From a request's arrival at the router to the end of its answer. Grows with the length of answers.",
    "Answers by finish reason": (
        "stop: a stop token or string; length: max_tokens or the context's end; tool_calls: a call."
    ),
    "Failed requests by reason": (
        "The error's reason, as clients get it. OVERLOADED is shed load; INVALID_ARGUMENT is the client's fault. "
        "not read: requests whose body could not be parsed."
    ),
    "Tokens a second": "Prompt tokens of answered requests, and tokens sent to clients, over all routers.",
    "Requests running": "Requests in each worker's running batch. Decode's share of max_num_seqs is how full it is.",
    "Requests waiting": "Requests queued in each worker: for blocks, for their turn, or on decode for KV from prefill.",
    "KV blocks in use": "Share of each worker's KV blocks in use or reserved. Near 1 decode preempts requests.",
    "Prefix cache hit rate": "Prompt tokens found in the prefix cache, of those looked up, by role.",
    "View of the cluster is stale": (
        "1 while a router cannot read or write Redis: it serves from its last view of the workers."
    ),
    "Successful scrapes": "0: the process does not answer on its metrics port.",
    "Where a request's time goes, p95": ("p95 of each stage; the stages of one request need not add up to these."),
    "From the first token to the second": (
        "The gap in which the KV transfer shows: prefill streams the first token, decode the second."
    ),
    "KV still on its way after the first token": (
        "Time from the first token until all KV of the prompt was verified on decode."
    ),
    "KV moved": "Bytes of KV that each decode worker read and verified.",
    "One slab's transfer": (
        "From decode's request for a slab to its verified content. A jump means that the link or transport changed."
    ),
    "Failed transfers by reason": (
        "Reads that timed out, were damaged, stale or refused. Each was retried or the prompt recomputed."
    ),
    "Slabs by state": (
        "Quarantined slabs wait for proof that a late read cannot land in them; few free slabs throttle prefill."
    ),
    "Prompt tokens by source of their KV": "Computed by the worker, found in its prefix cache, or read from prefill.",
    "Waiting, by reason": "capacity: for blocks or a turn; deferred: decode waits for KV from prefill.",
    "Prompt tokens waiting": (
        "Uncached prompt tokens queued or half computed. Divided by the prefill rate: the queue in seconds."
    ),
    "Prefill rate, measured": "Prompt tokens a second as measured by the worker; placement uses it.",
    "Decode step, measured": (
        "Mean time of one decode step as measured by the worker; the floor of inter-token latency."
    ),
    "Tokens in a step": (
        "Tokens computed or generated in one engine step. Small steps under load mean that something else is the limit."
    ),
    "Preemptions": (
        "Requests whose blocks were taken back because the pool was full; they are recomputed or fetched again."
    ),
    "Engine steps": "Steps a second. 0 with requests running: the engine is stuck.",
    "Prefill busy, of its measured rate": (
        "Computed prompt tokens a second over the measured rate. Near 1: add prefill workers."
    ),
    "Decode busy, of its steps' time": (
        "Steps a second times the time of a step. Near 1 with a long step: add decode workers."
    ),
    "Cached blocks: age at eviction": "Short ages mean that the prefix cache is too small for the load.",
    "Cached blocks: idle before eviction": "Time since a request last used the evicted block.",
    "Cached blocks: time between two uses": (
        "If this is close to the age at eviction, more cache would give more hits."
    ),
    "Lower tiers: in use": "Part of host memory and disk that holds KV blocks; only of workers with such a tier.",
    "Lower tiers: cached prompt tokens by tier": "Where cached prompt tokens came from; only of workers with a lower tier.",
    "Lower tiers: tokens that other workers were offered, by tier": (
        "Tokens a second whose KV pulls of other workers found here: in the pool, in host memory, or in files."
    ),
    "Lower tiers: evicted and dropped blocks": (
        "Evicted to make room; not written in time: they left the first tier while the disk was busy."
    ),
    "Lower tiers: errors by reason": (
        "ENOSPC: the disk is full. corrupt, truncated, foreign, missing: a file was not the block it should be; it was computed. "
        "late: reading took longer than computing."
    ),
    "Requests whose KV lease expired": "Prefill took KV back that decode had not read or acknowledged within its lease.",
    "Adapters: in host memory and on the device": (
        "LoRA adapters of each worker. On the device at most --max-loras, in host memory at most --max-cpu-loras."
    ),
    "Adapters: bytes in host memory": "Of all adapters that a worker has in memory.",
    "Adapters: in use": "Adapters that running requests compute with, and requests that hold one, waiting ones included.",
    "Adapters: loads by outcome": (
        "Loads from folders. refused: for what lies there; full: requests used all adapters in memory; timeout: of the files."
    ),
    "Adapters: time of a load": "From a folder into host memory. Only the requests that name the adapter wait for it.",
    "Adapters: installed and evicted": (
        "Copies to the device, and adapters that left it or host memory for others. Much of both: more are in use than fit."
    ),
    "Adapters: requests by outcome": "Requests by the adapter that they name; the first 64 by name, the others together.",
    "Adapters: requests that had the canary": "Of each adapter's requests, those that its canary version answered.",
    "Adapters: prompt tokens a second": "Prompt tokens of finished requests, by adapter.",
    "Adapters: generated tokens a second": "Tokens of finished answers, by adapter.",
    "Adapters: registered, and refused for want of room": (
        "Names in the registry. Refused: requests that would have waited for a slot, where too many adapters wait already."
    ),
    "Claimed KV, by rank of the tenant": "Cached KV that requests have claimed. At most --claim-share of the pool.",
    "Claims made and ended, by reason": (
        "pressure: claimed KV was evicted, for want of any other: the cache is too small for what is claimed. share: claims "
        "gave way to other claims."
    ),
    "Hits that a claim has kept": "Prompt tokens a second whose KV an eviction had passed over for its claim.",
    "The pool's blocks": "Number and size of the KV blocks, from each worker's configuration.",
    "GPU: share of time with a kernel": (
        "From NVML. Low with requests waiting: steps wait for the host, or requests for something else than the GPU."
    ),
    "GPU: memory in use": "Of all processes on the GPU. The pool of KV blocks is allocated at the start: it stays level.",
    "GPU: power": "What the GPU draws, and what it may. At the limit its clocks fall.",
    "GPU: clocks": "Of the multiprocessors and of the memory. An idle GPU lowers them; a busy one should be at the highest.",
    "GPU: share of time with clocks held down": "By reason. Heat and power brakes cost throughput; a power cap at full load may.",
    "GPU: temperature": "Of the GPU. Above its own limit the clocks fall, with the reason hw_thermal or sw_thermal.",
    "GPU: failed calls of NVML": "By function. A GPU that was lost, or a driver that was replaced under the worker.",
    "GPU: bytes over NVLink": "Both directions. KV that moves while these stay level crosses PCIe.",
    "Requests running and waiting for a first token": "Over all routers. Waiting grows and running does not: the pools are full.",
    "Checks, template and tokenizer": (
        "Time before placement: validation, chat template and tokenizer, with the wait for a thread."
    ),
    "Prompts by where they were placed": (
        "remote: on a prefill worker; local: on decode, where that was predicted to be cheaper."
    ),
    "Deviations from the placement": (
        "A prompt placed on prefill was computed elsewhere. Anything but decode_cache hides a fault."
    ),
    "Prefill workers given up by decode, by reason": (
        "Why decode stopped waiting for a prefill worker and took the next."
    ),
    "Requests placed again": ("Attempts that followed one that a decode worker refused or lost."),
    "Lost decode workers' requests, by outcome": (
        "moved: the same stream went on at another worker. Anything else is an answer that ended with an error."
    ),
    "Answers that went on after a broken stream": (
        "Requests with an id of an answer whose stream broke, mostly since its router died: attached to the decode worker "
        "that goes on with it, or computed again."
    ),
    "From a loss to another worker's acceptance": (
        "Without the time in which the lost worker was not known to be lost, and without computing the context again."
    ),
    "Regret: lateness of the first token": ("Delay of the first token against its prediction; 0 if it was earlier."),
    "First token: error of the prediction": "Absolute error of the predicted time to first token.",
    "Cached tokens: error of the prediction": "Share of prompt tokens by which the predicted cache hit was wrong.",
    "Cached tokens: predicted and actual": ("The two should match; a lasting gap means that cache events are lost."),
    "Share of prompt tokens that were cached": (
        "Cached on prefill or decode, of all prompt tokens of answered requests."
    ),
    "Prompt tokens of a request": "Length of prompts in tokens; compare it with the load that the cluster was sized for.",
    "Generated tokens of a request": "Length of answers in tokens, all choices of a request together.",
    "Time of computing, whole request": "From the start of prefill to the last token, without queues.",
    "Decoding, whole request": "From the first token to the last; grows with the length of answers.",
    "KV moved, by answers' explanations": "Sum over answered requests; compare it with decode's own count.",
    "Requests by admission decision": "admitted, refused, or (in shadow mode) would have been refused.",
    "Correctness of admission's refusals": (
        "yes: the request would have missed its target. Many no: admission is too strict."
    ),
    "Requests waiting in the router": (
        "Requests held in the router because the pool's queue is full for their tenant's share."
    ),
    "Placement tickets by outcome": (
        "Tickets of clients that stream from decode directly: finished, failed, or lapsed (never used). "
        "Withheld: none was given, so the router relays the answer."
    ),
    "Copies of hot prefixes, since the start": ("Requests placed away from the best hit to copy a hot prefix."),
    "Arrived requests": "Every request, answered or not: equal to answers and errors together, and what still runs.",
    "Tokens of unfinished answers": "Prompt and generated tokens of requests that failed or whose client disconnected.",
    "Shadow requests by outcome": "Copies sent to workers under trial (--shadow-workers); clients never see them.",
    "Processes of each router": (
        "With --router-processes only: how many a router should have, and how many answered the scrape. A gap is a process that "
        "is starting again; the router's log says why it ended."
    ),
    "Cache events missing from some worker": (
        "1 while a worker's cache events do not arrive: placement there goes by load alone."
    ),
    "Requests a second": "Requests of each tenant, with any outcome.",
    "Requests by outcome": "Requests of each tenant: answered, or the reason of the error.",
    "Generated tokens a second": "Tokens sent to each tenant's clients.",
    "Prompt tokens a second": "Prompt tokens of each tenant's answered requests, cached ones included.",
    "Share of prompt tokens cached": "Of each tenant; other tenants' prefixes never count.",
    "Time to first token, p95": "Of each tenant's requests. One slow tenant alone: its prompts are long or over its share.",
}
