"""Pulls of cached blocks between workers, in virtual time: prompt tokens that are computed though a worker has them, and the
time to first token. `python -P -m diptych.bench.router.pulls [--out FILE]`

    chats    the trace of quality.py on 4P + 4D
    agents   12 sessions of 8 turns at once on 2P + 2D: every turn is the conversation so far and a tool's result
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diptych.bench.result import RESULTS, surroundings, write
from diptych.bench.router.quality import PULLS, run
from diptych.bench.router.simulation import Outcome, SimConfig
from diptych.bench.router.trace import TraceConfig, TraceRequest, make_trace

SMALL = SimConfig(num_prefill=2, num_decode=2)
AGENTS = TraceConfig(
    duration_s=2.0, sessions_per_s=12.0, system_prompts=1, system_tokens=(1024, 1024), turns=(8, 8), question_tokens=(256, 1024),
    answer_tokens=(64, 256), think_s=0.5,
)  # fmt: skip


def traces(seed: int) -> dict[str, tuple[list[TraceRequest], SimConfig]]:
    chats = TraceConfig(seed=seed, duration_s=60.0, sessions_per_s=3.5)
    agents = make_trace(dataclasses.replace(AGENTS, seed=seed))
    sessions = sorted({request.session for request in agents})[:12]
    return {
        "chats": (make_trace(chats), SimConfig()),
        "agents": ([request for request in agents if request.session in sessions], SMALL),
    }


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """`recomputed`: tokens that were computed though a worker had them, as a part of all prompt tokens. `later`: of the requests
    after the first of their session."""
    first: dict[int, int] = {}
    for outcome in outcomes:
        first.setdefault(outcome.request.session, outcome.request.number)
    later = [o for o in outcomes if first[o.request.session] != o.request.number]
    prompt = sum(o.request.num_tokens for o in outcomes)
    again = sum(max(0, o.computed - (o.request.num_tokens - o.held)) for o in outcomes)
    p50, p99 = np.percentile([o.ttft_s for o in later], [50, 99])
    return {
        "requests": len(outcomes), "prompt_tokens": prompt, "recomputed": round(again / prompt, 4),
        "later_ttft_p50_s": round(float(p50), 4), "later_ttft_p99_s": round(float(p99), 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=RESULTS / "router" / "pulls.json")
    args = parser.parse_args()
    began, runs = surroundings(), []
    for seed in args.seeds:
        for what, (trace, config) in traces(seed).items():
            for name in ("cost", PULLS):
                runs.append({"trace": what, "seed": seed, "policy": name, **summary(run(name, trace, config))})
                print(runs[-1], flush=True)
    write(args.out, {"what": "pulls of KV between workers, in virtual time", "surroundings": began, "runs": runs})


if __name__ == "__main__":
    main()
