"""Quality of placement policies: hit rate and time to first token on a prefix-heavy trace, 8 simulated workers, virtual
time.

    python -m diptych.bench.router.quality [--duration 120] [--rates 2 3.5] [--out FILE]

Every policy gets the same trace, cluster and candidates (see simulation.py); only its choice differs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diptych.bench.result import RESULTS, surroundings, write
from diptych.bench.router.approximate_tree import ApproximateTree
from diptych.bench.router.simulation import Outcome, SimConfig, Simulation
from diptych.bench.router.trace import TraceConfig, TraceRequest, make_trace, merged
from diptych.loadtest.reports.svg import bars
from diptych.router.placement.policies import POLICIES, policy_by_name

TREE = ApproximateTree.name
COPIES = "cost, hot copies"
PULLS = "cost, pulls"
HINTS = "cost, pulls, hints"
HINT_AFTER_S = 0.05
GREEDY, MODEST = "greedy", "modest"


def run(name: str, trace: Sequence[TraceRequest], config: SimConfig, seed: int = 0) -> list[Outcome]:
    """One policy over the whole trace."""
    if name == COPIES:
        return run("cost", trace, dataclasses.replace(config, replication=True, kv_pulls=True), seed)
    if name == PULLS:
        return run("cost", trace, dataclasses.replace(config, kv_pulls=True), seed)
    if name == HINTS:
        return run(PULLS, trace, dataclasses.replace(config, hint_after_s=HINT_AFTER_S), seed)
    if name == TREE:
        tree = ApproximateTree(lambda affinity: trace[int.from_bytes(affinity, "little")].keys)
        return Simulation(config, tree, seed, by_session=False).run(trace)
    return Simulation(config, policy_by_name(name), seed).run(trace)


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    prompt = sum(outcome.request.num_tokens for outcome in outcomes)
    cached = sum(outcome.cached for outcome in outcomes)
    off = sum(abs(outcome.predicted_cached - outcome.cached) for outcome in outcomes)
    p50, p95, p99 = np.percentile([outcome.ttft_s for outcome in outcomes], [50, 95, 99])
    return {
        "hit_rate": round(cached / prompt, 4),
        "hit_prediction_error": round(off / prompt, 4),
        "ttft_p50_s": round(float(p50), 4),
        "ttft_p95_s": round(float(p95), 4),
        "ttft_p99_s": round(float(p99), 4),
        "queue_p99_s": round(float(np.percentile([outcome.queued_s for outcome in outcomes], 99)), 4),
    }


def tenants(duration_s: float, seed: int, config: SimConfig) -> dict[str, object]:
    """Ten times as many chats of one tenant as of another, more than the workers can serve, with and without turns."""
    rates = {GREEDY: 6.0, MODEST: 0.6}
    config = dataclasses.replace(config, prefill_tokens_per_s=config.prefill_tokens_per_s / 8)
    trace = merged(
        {
            tenant: make_trace(TraceConfig(seed=seed + i, duration_s=duration_s, sessions_per_s=rate))
            for i, (tenant, rate) in enumerate(rates.items())
        }
    )
    found = {}
    for label, window_s in (("without turns", 0.0), ("with turns", config.turn_window_s)):
        outcomes = run("cost", trace, dataclasses.replace(config, turn_window_s=window_s), seed)
        found[label] = {
            tenant: summary([outcome for outcome in outcomes if outcome.request.tenant == tenant]) for tenant in rates
        }
        print(label, found[label], flush=True)
    return {"chats_per_s": rates, "duration_s": duration_s, "requests": len(trace), "runs": found}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=120.0, help="virtual seconds in which chats begin")
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 3.5], help="new chats per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=3, help="runs of each policy, with other seeds; reported together")
    parser.add_argument("--out", type=Path, default=RESULTS / "router" / "quality.json", help="result file")
    given = parser.parse_args(arguments)
    names = [*POLICIES, TREE, COPIES, PULLS]
    config = SimConfig()
    runs = []
    for rate in given.rates:
        trace_config = TraceConfig(seed=given.seed, duration_s=given.duration, sessions_per_s=rate)
        trace = make_trace(trace_config)
        found = {}
        for name in names:
            drawn = [run(name, trace, config, given.seed + i) for i in range(given.draws)]
            found[name] = summary([outcome for outcomes in drawn for outcome in outcomes])
            print(rate, name, found[name], flush=True)
        runs.append({"trace": dataclasses.asdict(trace_config), "requests": len(trace), "policies": found})
    result = {
        "surroundings": surroundings(),
        "draws": given.draws,
        "cluster": dataclasses.asdict(config),
        "runs": runs,
        "tenants": tenants(given.duration / 3, given.seed, config),
    }
    write(given.out, result)
    panels = []
    for rate, entry in zip(given.rates, runs, strict=True):
        policies = entry["policies"]
        panels += [
            (f"p99 TTFT in s, {rate:g} chats/s", {name: policies[name]["ttft_p99_s"] for name in names}),  # type: ignore[index]
            (f"hit rate in %, {rate:g} chats/s", {name: 100 * policies[name]["hit_rate"] for name in names}),  # type: ignore[index]
        ]
    given.out.with_suffix(".svg").write_text(bars(panels, columns=2), encoding="utf-8")


if __name__ == "__main__":
    main()
