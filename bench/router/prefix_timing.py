"""Does the time to first token tell that somebody else sent the same prompt? tests/security says it by what is computed; this
measures the time.

    python -P -m diptych.bench.router.prefix_timing [--probes 200] [--tokens 400] [--out FILE]

A `diptych up` with default flags and two tenants. One tenant sends half of ten prompts; then all ten are sent in random order,
once by the other tenant and once (other prompts, half of them sent before) by the same one; and so on with the next ten: what
was sent is still cached. AUC: the probability that a probe of a prompt that was sent is faster than one that was not; 0.5 tells
nothing, 1.0 everything. The second figure shows what the first is worth. Exit status 1: the first is not between 0.4 and 0.6, or
the second is below 0.9.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from diptych.bench.result import spread, surroundings, write
from diptych.bench.router.beside_long_prompts import REQUEST_S, Cluster

VICTIM, ATTACKER = "one", "other"
AT_ONCE = 10


def auc(of_hits: list[float], of_misses: list[float]) -> float:
    pairs = [(hit < miss) + 0.5 * (hit == miss) for hit in of_hits for miss in of_misses]
    return sum(pairs) / len(pairs)


class Prober:
    def __init__(self, cluster: Cluster, num_tokens: int) -> None:
        self._cluster, self._num_tokens = cluster, num_tokens
        self._http = httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_S)
        self._model = cluster.model()
        self._chance = random.Random(11)

    async def ttft_s(self, tenant: str, prompt: list[int]) -> float:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "stream": True}
        headers = {"authorization": f"Bearer {self._cluster.keys[tenant]}"}
        began = time.perf_counter()
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    return time.perf_counter() - began
        raise RuntimeError("the answer has no token")

    async def probe(self, tenant: str, probes: int) -> dict[str, Any]:
        hits: list[float] = []
        misses: list[float] = []
        while len(hits) + len(misses) < probes:
            prompts = [[self._chance.randrange(1000, 40_000) for _ in range(self._num_tokens)] for _ in range(AT_ONCE)]
            sent = set(self._chance.sample(range(AT_ONCE), AT_ONCE // 2))
            for number in sorted(sent):
                await self.ttft_s(VICTIM, prompts[number])
            for number in self._chance.sample(range(AT_ONCE), AT_ONCE):
                (hits if number in sent else misses).append(await self.ttft_s(tenant, prompts[number]))
        return {"auc": auc(hits, misses), "sent_before_s": spread(hits), "new_s": spread(misses)}

    async def close(self) -> None:
        await self._http.aclose()


async def measure(cluster: Cluster, probes: int, num_tokens: int) -> dict[str, Any]:
    prober = Prober(cluster, num_tokens)
    try:
        return {
            "another tenant": await prober.probe(ATTACKER, probes),
            "the same tenant": await prober.probe(VICTIM, probes),
        }
    finally:
        await prober.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = surroundings()
    with tempfile.TemporaryDirectory(prefix="dp", dir="/tmp") as folder:
        cluster = Cluster(1, Path(folder))
        try:
            cluster.wait_ready()
            found = asyncio.run(measure(cluster, args.probes, args.tokens))
        finally:
            cluster.stop()
    for who, what in found.items():
        hit, miss = what["sent_before_s"]["median"], what["new_s"]["median"]
        print(
            f"{who}: AUC {what['auc']:.2f}; {1000 * hit:.0f} ms where it was sent before, {1000 * miss:.0f} ms where not"
        )
    if args.out:
        write(args.out, {"machine": machine, "probes": args.probes, "tokens": args.tokens, **found})
    return 0 if abs(found["another tenant"]["auc"] - 0.5) < 0.1 and found["the same tenant"]["auc"] > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
