"""Verdicts of `diptych doctor` on serving: batches, preemptions, cache, queues, tokenizer, KV, balance, fallbacks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from diptych.cli.doctor.adapters import MORE_SLOTS, slots_are_short, slots_explain_the_queue
from diptych.cli.doctor.facts import Facts, Worker
from diptych.cli.doctor.verdict import Level, Verdict, amount, bad, info, milliseconds, ok, warn
from diptych.common.errors import WorkerDrainedError, from_reason

SMALL_BATCH_SHARE = 0.25
LOW_HIT_RATE = 0.02
LONG_GAP_S = 2.0
"""Longer than any step that computes prompts beside decoding sequences."""
MIN_PROMPT_TOKENS = 5_000
"""With fewer tokens the hit rate is not meaningful."""
MIN_TRANSFERS = 20
"""With fewer, the first small ones, which are all fixed cost, decide the median."""
FULL, ALMOST_FULL = 0.97, 0.85
BUSY, IDLE = 0.8, 0.4


def batches(facts: Facts) -> Iterator[Verdict]:
    for worker in facts.of("decode"):
        steps, tokens = worker.rise("steps"), worker.rise("generation_tokens_total")
        running, waiting = worker.now("num_running"), worker.now("num_waiting")
        most = worker.setting("max_num_seqs", 1)
        if steps < 1:
            yield info("batch", f"{worker.id}: idle during the sample")
            continue
        per_step = tokens / steps
        seen = f"{worker.id}: {per_step:.1f} tokens a step, {running:.0f} of {most} running, {waiting:.0f} wait"
        if waiting and slots_are_short(worker):
            yield warn("batch", seen, f"requests wait for slots of their adapters: {MORE_SLOTS}")
        elif waiting and running < SMALL_BATCH_SHARE * most:
            yield warn(
                "batch",
                seen,
                "requests wait though the batch has room: KV blocks are short (--num-blocks, --kv-memory-bytes), "
                "or long prompts hold them",
            )
        elif running >= most:
            yield warn("batch", seen, "the batch is full: raise --max-num-seqs, or add a decode worker")
        else:
            yield ok("batch", seen)


def preemptions(facts: Facts) -> Iterator[Verdict]:
    for worker in facts.of("decode"):
        rise, total = worker.rise("preemptions_total"), worker.now("preemptions_total")
        steps = max(worker.now("steps"), 1.0)
        seen = f"{worker.id}: {rise:.0f} preemptions during the sample, {total:.0f} since its start"
        if rise > 0 or total / steps > 0.01:
            report = bad if rise > 0 else warn
            yield report(
                "preemptions",
                seen,
                "too many requests for its KV blocks: more --num-blocks, a lower --max-num-seqs, or a host tier "
                "(--num-host-blocks)",
            )
        else:
            yield ok("preemptions", seen)


def swap(facts: Facts) -> Iterator[Verdict]:
    for worker in facts.of("decode"):
        preempted = worker.now("preemptions_total")
        slots = worker.setting("num_host_blocks", 0)
        if not slots:
            if preempted:
                yield warn(
                    "swap",
                    f"{worker.id}: {preempted:.0f} preempted requests were recomputed; there is no host tier",
                    "try --num-host-blocks; `diptych capacity --prefill-rate --copy-rate` shows from which length swapping pays",
                )
            continue
        point = worker.swap_from_tokens
        if point is None:
            yield info("swap", f"{worker.id}: {slots} host blocks; the cost of a swap is not measured yet")
        elif math.isinf(point):
            yield warn(
                "swap",
                f"{worker.id}: recomputing is always faster than the host tier ({amount(worker.now('copy_bytes_per_s'))}B/s)",
                "the host tier uses memory without benefit here: --num-host-blocks 0, or pinned memory and a faster link",
            )
        else:
            mode = worker.settings.get("preemption_mode", "auto")
            level = Level.WARN if mode == "recompute" else Level.OK
            yield Verdict(
                "swap",
                level,
                f"{worker.id}: from {point:.0f} tokens on a swap is cheaper than recomputing; mode {mode}",
                "--preemption-mode auto chooses the cheaper one" if level is Level.WARN else "",
            )


def cache(facts: Facts) -> Iterator[Verdict]:
    for worker in facts.cluster.get("workers", []):
        if worker.get("index_mode") != "EXACT":
            yield warn(
                "cache",
                f"the router's index of {worker['id']}'s cache is {worker.get('index_mode')}",
                "placement on it is an estimate: check that the worker reaches Redis, and how full Redis is",
            )
    for role in ("prefill", "decode"):
        prompt, cached = facts.total("prompt_tokens_total", role), facts.total("cached_tokens_total", role)
        if not prompt:
            continue
        seen = f"{role}: {100 * cached / prompt:.0f}% of {prompt:,.0f} prompt tokens were cached"
        if prompt >= MIN_PROMPT_TOKENS and cached / prompt < LOW_HIT_RATE:
            yield warn(
                "cache",
                seen,
                "if prompts share a prefix, something differs in it (a date, an id, another tenant's salt); "
                "`diptych explain ID` shows the hit of one request",
            )
        else:
            yield ok("cache", seen)


def queues(facts: Facts) -> Iterator[Verdict]:
    queue, prefill = facts.stage("queue"), facts.stage("prefill")
    transfer, second, decode = facts.stage("transfer"), facts.stage("second_token"), facts.stage("decode")
    if queue is None or prefill is None:
        yield info("time", "no request ended at this router recently: no stage times")
        return
    gap = facts.stage("longest_gap", "p95")
    parts = [("queue", queue), ("prefill", prefill), ("transfer", transfer), ("second token", second)]
    parts.append(("all after the first token", decode))
    seen = "p50 " + ", ".join(f"{name} {milliseconds(value)}" for name, value in parts if value is not None)
    slow_transfers = transfer is not None and transfer > 0.05 and transfer > 0.5 * prefill
    transfers = facts.samples("transfer")
    if queue > 0.1 and queue > prefill:
        why = "requests wait longer than they compute"
        if slots_explain_the_queue(facts):
            step = f"{why}, for slots of their adapters: {MORE_SLOTS}"
        else:
            step = f"{why}: add workers to the pool that the balance below names, or shed earlier"
        yield bad("time", seen, step)
    elif transfer is not None and slow_transfers and transfers >= MIN_TRANSFERS:
        yield warn(
            "time",
            seen,
            f"transferring KV takes {transfer / prefill:.1f} times as long as computing it: see transport and link; "
            "more --num-slabs",
        )
    elif gap is not None and gap > LONG_GAP_S:
        yield warn(
            "time",
            f"p95 of an answer's longest gap between tokens {milliseconds(gap)}",
            "answers stop after their first token: see preemptions, batch and cores; `diptych explain ID` shows the gap "
            "of one request",
        )
    elif slow_transfers:
        yield info("time", f"{seen} (of {transfers} transfers: too few to judge, {MIN_TRANSFERS} are needed)")
    else:
        yield ok("time", seen)


def tokenizer(facts: Facts) -> Iterator[Verdict]:
    p95, prefill = facts.stage("tokenize", "p95"), facts.stage("prefill")
    if p95 is None:
        return
    seen = f"p95 {milliseconds(p95)} for checks, template and tokenizer"
    if p95 > 0.05 and (prefill is None or p95 > 0.1 * prefill):
        yield warn("tokenizer", seen, "the router has too few threads: add a router replica, or look for huge prompts")
    else:
        yield ok("tokenizer", seen)


def kv_headroom(facts: Facts) -> Iterator[Verdict]:
    for worker in facts.answering:
        usage = worker.now("kv_usage")
        seen = f"{worker.id}: {100 * usage:.0f}% of its KV blocks are in use or reserved"
        if usage > ALMOST_FULL:
            report = bad if usage > FULL else warn
            yield report(
                "kv",
                seen,
                "more --kv-memory-bytes or --num-blocks, a smaller --max-model-len, or another worker of this role",
            )
        else:
            yield ok("kv", seen)


def utilization(worker: Worker, interval_s: float) -> float | None:
    """Share of its measured rate that a worker used during the sample; None: no rate is measured yet."""
    if worker.role == "prefill":
        rate = worker.now("prefill_tokens_per_s")
        return worker.rise("computed_tokens_total") / (rate * interval_s) if rate > 0 else None
    step_s = worker.now("decode_step_s")
    return worker.rise("steps") * step_s / interval_s if step_s > 0 else None


def balance(facts: Facts) -> Iterator[Verdict]:
    if facts.one_process:
        return
    means = {}
    for role in ("prefill", "decode"):
        known = [value for w in facts.of(role) if (value := utilization(w, facts.interval_s)) is not None]
        if known:
            means[role] = min(1.0, sum(known) / len(known))
    if len(means) < 2:
        yield info("balance", "no rates are measured yet: send some load and retry")
        return
    prefill, decode = means["prefill"], means["decode"]
    seen = f"during the sample prefill was busy {100 * prefill:.0f}%, decode {100 * decode:.0f}%"
    waiting = facts.total("waiting_prompt_tokens", "prefill")
    if prefill > BUSY and decode < IDLE:
        step = (
            f"prefill is the bottleneck ({waiting:.0f} tokens wait there): turn a decode worker into a prefill worker"
        )
        yield warn("balance", seen, step)
    elif decode > BUSY and prefill < IDLE:
        yield warn("balance", seen, "decode is the bottleneck: turn a prefill worker into a decode worker")
    elif prefill > BUSY and decode > BUSY:
        yield warn("balance", seen, "both pools are at their limit: add workers, or shed load earlier")
    else:
        yield ok("balance", seen)


def _counts(reasons: Mapping[str, float]) -> str:
    return ", ".join(f"{number:.0f} {reason}" for reason, number in sorted(reasons.items()))


def _clients_mistake(reason: str) -> bool:
    """Whether the same request would fail at any time: the server is well."""
    error = from_reason(reason, "")
    return error.http_status < 500 and not error.retryable


def fallbacks(facts: Facts) -> Iterator[Verdict]:
    placed = sum(facts.counter("placements").values())
    went = {name: number for name, number in facts.counter("fallbacks").items() if name != "decode_cache"}
    faults, errors = facts.counter("prefill_faults"), facts.counter("request_errors")
    total = sum(went.values())
    drained = min(total, faults.get(WorkerDrainedError.reason, 0.0))
    """Of workers that were stopped in order, or changed their role: planned, and no fault."""
    if total > drained:
        kinds = ", ".join(f"{number:.0f} to {name}" for name, number in sorted(went.items()))
        why = _counts(faults)
        share = (total - drained) / max(placed, 1.0)
        report = bad if share > 0.05 else warn
        yield report(
            "fallbacks",
            f"{total:.0f} of {placed:.0f} attempts deviated from their placement: {kinds}"
            + (f" ({why})" if why else ""),
            "the reasons give the cause; the answer's `diptych.notes` and `diptych explain ID` name the worker",
        )
    else:
        left = f", but for {drained:.0f} whose worker was drained" if drained else ""
        yield ok("fallbacks", f"all {placed:.0f} attempts ran as placed{left}")
    theirs = {name: number for name, number in errors.items() if _clients_mistake(name)}
    ours = {name: number for name, number in errors.items() if name not in theirs and name != "CLIENT_LEFT"}
    if theirs:
        yield info("errors", f"of the requests themselves: {_counts(theirs)}")
    if ours:
        yield warn(
            "errors",
            _counts(ours),
            "each is in the router's log, with its request id",
        )
