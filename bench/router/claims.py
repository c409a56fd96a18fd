"""Claims on cached KV, in virtual time: agents that pause, beside chats that fill the caches (docs/decisions/retention.md).
`python -P -m diptych.bench.router.claims [--out FILE]`

30 agents on 2P + 2D, 6 to 8 turns each with pauses of 20 s, and two new chats of others a second. The agents claim their sessions
for two minutes, or claim nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.bench.result import RESULTS, surroundings, write
from diptych.bench.router.quality import PULLS, run, summary
from diptych.bench.router.simulation import SimConfig
from diptych.bench.router.trace import TraceConfig, TraceRequest, make_trace, merged
from diptych.common.request import CacheClaim

AGENTS = TraceConfig(
    duration_s=60.0, sessions_per_s=0.5, system_prompts=4, system_tokens=(1024, 2048), turns=(6, 8), question_tokens=(128, 512),
    answer_tokens=(64, 128), think_s=20.0,
)  # fmt: skip
OTHERS = TraceConfig(duration_s=200.0, sessions_per_s=2.0, turns=(1, 3))
TTL_S = 120.0


def trace_of(
    seed: int, *, claims: bool, of_agents: TraceConfig = AGENTS, of_others: TraceConfig = OTHERS
) -> list[TraceRequest]:
    agents: Sequence[TraceRequest] = make_trace(dataclasses.replace(of_agents, seed=seed))
    if claims:
        agents = [
            dataclasses.replace(one, claim=CacheClaim(TTL_S, session=one.session.to_bytes(16, "little")))
            for one in agents
        ]
    others = make_trace(dataclasses.replace(of_others, seed=seed + 100))
    return merged({"agents": agents, "others": others})


def compare(seed: int, share: float | None, **traces: TraceConfig) -> dict[str, Any]:
    """`share`: of the pool for claims; None: nothing is claimed. `traces`: see trace_of."""
    config = SimConfig(num_prefill=2, num_decode=2, cache_blocks=4096, claim_share=share or 0.0)
    outcomes = run(PULLS, trace_of(seed, claims=share is not None, **traces), config)
    served = [o for o in outcomes if o.refused is None and not o.left]
    return {who: summary([o for o in served if o.request.tenant == who]) for who in ("agents", "others")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=RESULTS / "router" / "claims.json")
    args = parser.parse_args()
    began, runs = surroundings(), []
    for seed in args.seeds:
        for share in (None, 0.25, 0.5, 1.0):
            runs.append({"seed": seed, "claim_share": share, **compare(seed, share)})
            print(runs[-1], flush=True)
    write(args.out, {"what": "claims on cached KV, in virtual time", "surroundings": began, "runs": runs})


if __name__ == "__main__":
    main()
