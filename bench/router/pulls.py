"""Pulls of cached blocks between workers, in virtual time: prompt tokens that are computed though a worker has them, and the
time to first token. `python -P -m diptych.bench.router.pulls [--out FILE]`

    chats    the trace of quality.py on 4P + 4D
    agents   12 sessions of 8 turns at once on 2P + 2D: every turn is the conversation so far and a tool's result
    writers  the same with longer answers and shorter results, so that more of a turn's new tokens are the last answer's

With hints the client says after each answer that it comes next (`prefetch`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diptych.bench.result import RESULTS, surroundings, write
from diptych.bench.router.quality import HINTS, PULLS, run
from diptych.bench.router.simulation import Outcome, SimConfig
from diptych.bench.router.trace import TraceConfig, TraceRequest, make_trace

SMALL = SimConfig(num_prefill=2, num_decode=2)
AGENTS = TraceConfig(
    duration_s=2.0, sessions_per_s=12.0, system_prompts=1, system_tokens=(1024, 1024), turns=(8, 8), question_tokens=(256, 1024),
    answer_tokens=(64, 256), think_s=0.5,
)  # fmt: skip
WRITERS = dataclasses.replace(AGENTS, question_tokens=(128, 512), answer_tokens=(128, 384))


def traces(seed: int) -> dict[str, tuple[list[TraceRequest], SimConfig]]:
    chats = TraceConfig(seed=seed, duration_s=60.0, sessions_per_s=3.5)
    return {
        "chats": (make_trace(chats), SimConfig()),
        "agents": (_twelve(dataclasses.replace(AGENTS, seed=seed)), SMALL),
        "writers": (_twelve(dataclasses.replace(WRITERS, seed=seed)), SMALL),
    }


def _twelve(config: TraceConfig) -> list[TraceRequest]:
    trace = make_trace(config)
    sessions = sorted({request.session for request in trace})[:12]
    return [request for request in trace if request.session in sessions]


def summary(outcomes: Sequence[Outcome], config: SimConfig) -> dict[str, Any]:
    """`recomputed`: tokens that were computed though a worker had them, as a part of all prompt tokens. `later`: of the requests
    after the first of their session. `floor`: without any wait, with the KV of every worker where the prompt is computed."""
    first: dict[int, int] = {}
    for outcome in outcomes:
        first.setdefault(outcome.request.session, outcome.request.number)
    later = [o for o in outcomes if first[o.request.session] != o.request.number]
    prompt = sum(o.request.num_tokens for o in outcomes)
    again = sum(max(0, o.computed - (o.request.num_tokens - o.held)) for o in outcomes)
    p50, p99 = np.percentile([o.ttft_s for o in later], [50, 99])
    fresh = np.array([o.request.num_tokens - o.held for o in later])
    floor = config.prefill_fixed_s + float(np.percentile(fresh, 50)) / config.prefill_tokens_per_s
    return {
        "requests": len(outcomes), "prompt_tokens": prompt, "recomputed": round(again / prompt, 4),
        "later_ttft_p50_s": round(float(p50), 4), "later_ttft_p99_s": round(float(p99), 4),
        "later_ttft_floor_p50_s": round(floor, 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=RESULTS / "router" / "pulls.json")
    args = parser.parse_args()
    began, runs = surroundings(), []
    for seed in args.seeds:
        for what, (trace, config) in traces(seed).items():
            for name in ("cost", PULLS, HINTS):
                runs.append({"trace": what, "seed": seed, "policy": name, **summary(run(name, trace, config), config)})
                print(runs[-1], flush=True)
    write(args.out, {"what": "pulls of KV between workers, in virtual time", "surroundings": began, "runs": runs})


if __name__ == "__main__":
    main()
