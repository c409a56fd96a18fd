"""Overload in virtual time: five times what the cluster can serve, from clients that retry, through the router's admission,
turns and placement (simulation.py).

    python -m diptych.bench.router.overload [--out FILE]

Phases: half the capacity, then five times it, then half again. A request is good if its first token came within the
target (or its answer within the deadline, where that is the limit). Peak is the best goodput at steady offered loads
around the capacity. A refusal is wrong if the same run, with this one request admitted all the same, serves it in time.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diptych.bench.result import RESULTS, surroundings, write
from diptych.bench.router.simulation import Outcome, SimConfig, Simulation
from diptych.bench.router.trace import HEADER, TraceRequest
from diptych.common.block_identity import BlockHasher
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.policies import policy_by_name

BEFORE_S, OVERLOAD_S, AFTER_S = 10.0, 20.0, 20.0
RECOVERY_S = 10.0
ATTEMPTS = 4
MODEST = "modest"


@dataclass(frozen=True, slots=True)
class Load:
    """A workload.

    Args:
        prompt, answer: least and most tokens.
        prefixes: number of shared prefixes of `prefix` tokens each, one before every prompt; 0: none.
        target_s: of the first token, from arrival (--max-ttft-s); 0: none.
        within_s: least and most deadline of a request, for its whole answer.
        modest_per_s: requests per second of a second tenant, which never changes; 0: there is none.
        leaves: part of the clients that leave before their deadline if they still wait in the router.
    """

    name: str
    prompt: tuple[int, int] = (400, 1200)
    answer: tuple[int, int] = (16, 64)
    prefixes: int = 0
    prefix: int = 1024
    target_s: float = 0.0
    within_s: tuple[float, float] = (600.0, 600.0)
    modest_per_s: float = 0.0
    leaves: float = 0.0


LOADS = (
    Load("target", target_s=2.0),
    Load("deadlines", within_s=(2.0, 10.0)),
    Load("target, shared prefixes", prefixes=8, target_s=2.0),
    Load("target, mixed lengths", prompt=(32, 8000), target_s=3.0),
    Load("target, a modest tenant", target_s=2.0, modest_per_s=2.0),
    Load("deadlines, clients leave", within_s=(2.0, 20.0), leaves=0.3),
)
CONFIG = SimConfig(num_prefill=2, num_decode=2, prefill_tokens_per_s=4000.0)


def requests(load: Load, phases: Sequence[tuple[float, float]], seed: int) -> list[TraceRequest]:
    """`phases`: (seconds, requests per second), one after the other."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(128_000) for _ in range(load.prefix)] for _ in range(load.prefixes)]
    found: list[TraceRequest] = []
    start = 0.0
    arrivals: list[tuple[float, str]] = []
    for seconds, rate in phases:
        at = start
        while (at := at + rng.expovariate(rate)) < start + seconds:
            arrivals.append((at, "greedy"))
        start += seconds
    at = 0.0
    while load.modest_per_s and (at := at + rng.expovariate(load.modest_per_s)) < start:
        arrivals.append((at, MODEST))
    for number, (at, tenant) in enumerate(sorted(arrivals)):
        hasher = BlockHasher(HEADER)
        if prefixes:
            hasher.update(rng.choice(prefixes))
        hasher.update([rng.randrange(128_000) for _ in range(rng.randint(*load.prompt))])
        num_tokens, keys = hasher.num_tokens, tuple(hasher.keys)
        within_s = rng.uniform(*load.within_s)
        patience_s = rng.uniform(0.0, within_s) if rng.random() < load.leaves else math.inf
        found.append(
            TraceRequest(
                number, number, at, num_tokens, rng.randint(*load.answer), keys, as_keys(keys), keys,
                tenant, within_s, patience_s,
            )
        )  # fmt: skip
    return found


def is_good(load: Load, outcome: Outcome) -> bool:
    if outcome.ttft_s <= 0:
        return False
    limit_s = outcome.request.within_s
    return outcome.finished_s <= limit_s and outcome.ttft_s <= (load.target_s or limit_s)


def run(
    load: Load,
    trace: Sequence[TraceRequest],
    *,
    admission: str = "on",
    excused: Collection[int] = (),
    surge_ends: float = math.inf,
    seed: int = 0,
) -> list[Outcome]:
    """A client sends a request up to ATTEMPTS times; it waits Retry-After, and up to half as long again. Clients that came
    before `surge_ends` are gone then: they send nothing any more."""
    gc.collect()  # the simulation before refers to itself and has large tables: those of all loads were 1.5 GB
    config = dataclasses.replace(CONFIG, admission=admission, max_ttft_s=load.target_s)
    sent: dict[int, int] = {}

    def retry(request: TraceRequest, retry_after_s: float) -> TraceRequest | None:
        origin = request.session
        sent[origin] = sent.get(origin, 1) + 1
        at = simulation.now + retry_after_s * (1.0 + 0.5 * random.Random(request.number).random())
        if sent[origin] > ATTEMPTS or request.at < surge_ends <= at:
            return None
        return dataclasses.replace(request, number=len(trace) * sent[origin] + origin, at=at)

    simulation = Simulation(config, policy_by_name("cost"), seed, excused=excused, retry=retry)
    return simulation.run(trace)


def capacity(load: Load) -> float:
    """Requests per second that the prefill workers compute at most."""
    tokens = sum(load.prompt) / 2 + (load.prefix * 0.05 if load.prefixes else 0)
    return CONFIG.num_prefill * CONFIG.prefill_tokens_per_s / tokens


def goodput(load: Load, outcomes: Sequence[Outcome], since: float, until: float) -> float:
    """Good answers per second, by the arrival of the attempt."""
    good = [o for o in outcomes if is_good(load, o) and since <= o.request.at < until]
    return len(good) / (until - since)


def tokens_per_s(load: Load, outcomes: Sequence[Outcome], since: float, until: float) -> float:
    """Prompt tokens of good answers per second."""
    good = [o.request.num_tokens for o in outcomes if is_good(load, o) and since <= o.request.at < until]
    return sum(good) / (until - since)


def peak(load: Load, seed: int) -> tuple[float, float]:
    """The most good answers per second, and prompt tokens of theirs."""
    best, tokens = 0.0, 0.0
    for part in (0.75, 0.9, 1.05):
        trace = requests(load, [(BEFORE_S + OVERLOAD_S, part * capacity(load))], seed)
        outcomes = run(load, trace)
        best = max(best, goodput(load, outcomes, BEFORE_S, BEFORE_S + OVERLOAD_S))
        tokens = max(tokens, tokens_per_s(load, outcomes, BEFORE_S, BEFORE_S + OVERLOAD_S))
    return best, tokens


def wrong_refusals(
    load: Load, trace: Sequence[TraceRequest], outcomes: Sequence[Outcome], most: int, seed: int
) -> list[int]:
    """Numbers of refused attempts, of a sample of `most`, that are served in time when admitted all the same. `outcomes`: those
    of the trace."""
    refused = [o.request.number for o in outcomes if o.refused is not None]
    wrong = []
    for number in random.Random(seed).sample(refused, min(most, len(refused))):
        again = run(load, trace, excused=(number,))
        (outcome,) = [o for o in again if o.request.number == number]
        if outcome.ttft_s > 0 and outcome.ttft_s <= min(load.target_s or math.inf, outcome.request.within_s):
            wrong.append(number)
    return wrong


def measure(load: Load, seed: int = 1, *, admission: str = "on", samples: int = 20) -> dict[str, object]:
    rate = capacity(load)
    trace = requests(load, [(BEFORE_S, 0.5 * rate), (OVERLOAD_S, 5.0 * rate), (AFTER_S, 0.5 * rate)], seed)
    ends = BEFORE_S + OVERLOAD_S
    outcomes = run(load, trace, admission=admission, surge_ends=ends)
    during = (BEFORE_S + 5.0, ends)
    best, best_tokens = peak(load, seed)
    got, got_tokens = goodput(load, outcomes, *during), tokens_per_s(load, outcomes, *during)
    greedy = [o for o in outcomes if o.request.tenant != MODEST]
    modest = [o for o in outcomes if o.request.tenant == MODEST]
    accepted = [o for o in outcomes if o.ttft_s > 0 and during[0] <= o.request.at < during[1]]
    before, after = (
        [o for o in greedy if since <= o.request.at < until]
        for since, until in ((5.0, BEFORE_S), (ends + RECOVERY_S, ends + AFTER_S))
    )
    refused = [o for o in outcomes if o.refused is not None]
    waited = [o.refused_at - o.request.at for o in refused]
    short = requests(load, [(4.0, 0.5 * rate), (6.0, 5.0 * rate)], seed + 1)
    wrong = wrong_refusals(load, short, run(load, short), samples, seed) if admission == "on" else []
    return {
        "admission": admission,
        "attempts_sent": len(outcomes),
        "peak_goodput_per_s": round(best, 2),
        "goodput_per_s": round(got, 2),
        "goodput_of_peak": round(got / best, 3),
        "tokens_of_peak": round(got_tokens / best_tokens, 3),
        "accepted": len(accepted),
        "accepted_in_time": round(sum(is_good(load, o) for o in accepted) / max(1, len(accepted)), 4),
        "refused": len(refused),
        "refused_after_s": [round(float(v), 3) for v in np.percentile(waited, [50, 99])] if waited else [],
        "refusals_checked": min(samples, len(refused)) if admission == "on" else 0,
        "wrong_refusals": len(wrong),
        "in_time_before": round(sum(is_good(load, o) for o in before) / max(1, len(before)), 4),
        "in_time_10_s_after": round(sum(is_good(load, o) for o in after) / max(1, len(after)), 4),
        "modest": len(modest),
        "modest_in_time": round(sum(is_good(load, o) for o in modest) / max(1, len(modest)), 4),
        "modest_ttft_p99_s": round(float(np.percentile([o.ttft_s or math.inf for o in modest], 99)), 3)
        if modest
        else 0.0,
    }


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=20, help="refusals of each load that are checked one by one")
    parser.add_argument("--only", default="", help="name of one load")
    parser.add_argument("--out", type=Path, default=RESULTS / "router" / "overload.json", help="result file")
    given = parser.parse_args(arguments)
    found = []
    for load in LOADS:
        if given.only and load.name != given.only:
            continue
        for mode in ("on", "off"):
            figures = measure(load, given.seed, admission=mode, samples=given.samples)
            show(f"{load.name}: {figures}")
            found.append({"load": dataclasses.asdict(load), **figures})
    if not given.only:
        cluster = {"cluster": dataclasses.asdict(CONFIG), "seed": given.seed}
        write(given.out, {"surroundings": surroundings(), **cluster, "runs": found})


if __name__ == "__main__":
    main()
