"""A hot document in virtual time: whether its copies on purpose (replication.py) gain anything beside pulls by cost.
`python -P -m diptych.bench.router.hot_prefix [--out FILE]`

    document   4,000 tokens, 2P + 2D, steps of 20 ms with 512 tokens, questions of 64 tokens, Poisson at half of what both prefill
               workers can compute; one of them has the document at first
    prompt     a system prompt of 8,192 tokens on 4P + 4D that is rare at first, and suddenly hot
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diptych.bench.result import RESULTS, surroundings, write
from diptych.bench.router.simulation import SimConfig, Simulation
from diptych.bench.router.trace import HEADER, TraceConfig, TraceRequest, make_trace
from diptych.common.block_identity import BlockHasher
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.policies import policy_by_name

STEP_S, STEP_TOKENS, QUESTION, ANSWER = 0.02, 512, 64, 8
DOCUMENT = SimConfig(
    num_prefill=2, num_decode=2, cache_blocks=65_536, prefill_fixed_s=0.0, least_step_s=STEP_S, step_tokens=STEP_TOKENS,
    prefill_tokens_per_s=STEP_TOKENS / STEP_S, step_s=STEP_S, step_per_sequence_s=0.0, local_prefill_max_tokens=0,
    admission="off",
)  # fmt: skip
HALF = DOCUMENT.num_prefill * STEP_TOKENS / STEP_S / QUESTION / 2
FIRST_S = 1.0
"""The document is computed once before."""
WAYS: dict[str, dict[str, Any]] = {
    "no pulls": {},
    "pulls by cost": {"kv_pulls": True},
    "pulls by cost, and copies on purpose": {"kv_pulls": True, "replication": True},
}


def document(rate: float, count: int, seed: int) -> list[TraceRequest]:
    """`count` questions about one document, and the first one alone."""
    rng, trace, at = random.Random(seed), [], FIRST_S
    text = [rng.randrange(128_000) for _ in range(4000)]
    for number in range(count + 1):
        hasher = BlockHasher(HEADER)
        hasher.update(text)
        hasher.update([rng.randrange(128_000) for _ in range(QUESTION)])
        num_tokens, keys = hasher.num_tokens, tuple(hasher.keys)
        when, at = (at, at + rng.expovariate(rate)) if number else (0.0, at)
        trace.append(TraceRequest(number, number, when, num_tokens, ANSWER, keys, as_keys(keys), keys))
    return trace


def hot_prompt(rate: float, seed: int) -> list[TraceRequest]:
    config = TraceConfig(
        seed=seed, duration_s=12.0, sessions_per_s=rate, system_prompts=1, system_tokens=(8192, 8192), turns=(1, 1),
        question_tokens=(256, 512),
    )  # fmt: skip
    return [request for i, request in enumerate(make_trace(config)) if request.at > 6.0 or i % 15 == 0]


def measure(config: SimConfig, trace: Sequence[TraceRequest], begin_s: float) -> dict[str, Any]:
    """Of the requests from `begin_s` on; `replicated`: of the second half of these."""
    simulation = Simulation(config, policy_by_name("cost"), 1)
    outcomes = [o for o in simulation.run(trace) if o.refused is None and not o.left and o.request.at >= begin_s]
    outcomes.sort(key=lambda outcome: outcome.request.at)
    ttft = [outcome.ttft_s for outcome in outcomes]
    p50, p99 = np.percentile(ttft, [50, 99])
    return {
        "requests": len(ttft),
        "ttft_p50_s": round(float(p50), 4),
        "ttft_p99_s": round(float(p99), 4),
        "replicated_ttft_p99_s": round(float(np.percentile(ttft[len(ttft) // 2 :], 99)), 4),
        "copies_on_purpose": simulation.replication.num_copies if simulation.replication is not None else 0,
    }


FIT = STEP_TOKENS // QUESTION
"""Questions of one step."""


def alternating(arrivals: Sequence[float]) -> list[float]:
    """TTFT if a step began every half of STEP_S, on the two workers in turn, and took whoever waits. Two workers that
    always have something to compute begin as many steps, and arrivals wait least where the gaps between these are equal."""
    ttft, begins, taken = [], 0.0, 0
    for at in arrivals:
        if at > begins or taken == FIT:
            gaps = max(1, math.ceil((at - begins) / (STEP_S / 2)))
            begins, taken = begins + gaps * STEP_S / 2, 0
        taken += 1
        ttft.append(begins + STEP_S - at)
    return ttft


def first_to_begin(arrivals: Sequence[float]) -> list[float]:
    """TTFT if each request went to the worker whose next step with room begins first, known exactly. A worker that has nothing
    to do begins at once."""
    ttft, workers = [], [(-STEP_S, 0), (-STEP_S, 0)]  # the last step that begins, and the questions in it
    for at in arrivals:
        joined = [
            (begins, taken + 1) if begins > at and taken < FIT else (max(at, begins + STEP_S), 1)
            for begins, taken in workers
        ]
        which = min((0, 1), key=lambda i: joined[i][0])
        workers[which] = joined[which]
        ttft.append(joined[which][0] + STEP_S - at)
    return ttft


def bounds(trace: Sequence[TraceRequest]) -> dict[str, dict[str, float]]:
    """Of placements of these questions on two workers that both have the document."""
    arrivals = [request.at for request in trace if request.at >= FIRST_S]
    found = {}
    for rule in (alternating, first_to_begin):
        p50, p99 = np.percentile(rule(arrivals), [50, 99])
        found[rule.__name__] = {"ttft_p50_s": round(float(p50), 4), "ttft_p99_s": round(float(p99), 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS / "router" / "hot-prefix.json")
    args = parser.parse_args()
    began, runs = surroundings(), []
    for seed in args.seeds:
        cases = [("document, unloaded", DOCUMENT, document(1.0, 30, seed), FIRST_S)]
        cases += [("document, half of capacity", DOCUMENT, document(HALF, 1200, seed), FIRST_S)]
        cases += [(f"prompt, {rate} a second", SimConfig(), hot_prompt(rate, seed), 6.0) for rate in (15, 25)]
        for what, config, trace, begin_s in cases:
            for way, changes in WAYS.items():
                found = measure(dataclasses.replace(config, **changes), trace, begin_s)
                runs.append({"what": what, "seed": seed, "way": way, **found})
                print(runs[-1], flush=True)
    of_many = bounds(document(HALF, 20_000, args.seeds[0]))
    print(of_many)
    write(args.out, {"what": "a hot document, in virtual time", "surroundings": began, "runs": runs, "bounds": of_many})


if __name__ == "__main__":
    main()
