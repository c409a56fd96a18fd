"""Agents on 2P + 2D: every turn is the whole conversation so far and a tool's result. How many prompt tokens are computed
though a worker has their KV, and the time to first token, with and without pulls.

    python -P -m diptych.bench.router.agents [--sessions 12] [--turns 8] [--answer 32] [--tool-result 96] [--out FILE]

Each arm has a cluster of its own (`diptych up`), one after the other, in the order off, on, on, off.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from diptych.bench.result import RESULTS, surroundings, write
from diptych.bench.router.beside_long_prompts import REQUEST_S, Cluster

ARMS = {"off": ("--router-args", "--no-kv-pulls"), "on": ()}
SYSTEM, TASK, RESULT, ANSWER = 256, 64, 96, 32
"""Tokens: of the instructions that all sessions share, of a task, and by default of a tool's result and of an answer."""
TOOL_S = 0.3
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """`held`: leading tokens of its prompt that some worker had computed before, in whole blocks. `cached`: those that the worker
    which computed the prompt had, or had pulled. (`cached_tokens` of an answer also counts what only the other worker had.)"""

    number: int
    prompt_tokens: int
    held: int
    cached: int
    pulled: int
    ttft_s: float


class Agents:
    """Args: answer, tool_result: tokens of each."""

    def __init__(self, cluster: Cluster, seed: int, answer: int, tool_result: int) -> None:
        self._cluster, self._rng, self._model = cluster, random.Random(seed), cluster.model()
        self._answer, self._tool_result = answer, tool_result
        self._http = httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_S)
        self._system = self._tokens(SYSTEM)
        self.turns: list[Turn] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000, 40_000) for _ in range(count)]

    async def run(self, sessions: int, turns: int) -> None:
        async with self._http:
            await asyncio.gather(*(self._session(i * TOOL_S, turns) for i in range(sessions)))

    async def _session(self, delay_s: float, turns: int) -> None:
        await asyncio.sleep(delay_s)
        prompt, held = [*self._system, *self._tokens(TASK)], 0
        for number in range(turns):
            answer = await self._ask(prompt)
            why = answer["diptych"]
            cached = why["cached_tokens_decode" if why["local_prefill"] else "cached_tokens_prefill"]
            self.turns.append(
                Turn(
                    number, len(prompt), held, cached, sum(pull["num_tokens"] for pull in why["pulls"]),
                    why["ttft_s"],
                )
            )  # fmt: skip
            history = [*prompt, *answer["choices"][0]["token_ids"]]
            held = (len(history) - 1) // BLOCK * BLOCK
            prompt = [*history, *self._tokens(self._tool_result)]
            await asyncio.sleep(TOOL_S)

    async def _ask(self, prompt: list[int]) -> dict[str, Any]:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": self._answer, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {self._cluster.keys['one']}", "x-diptych-explain": "1"}
        answer = await self._http.post("/v1/completions", json=body, headers=headers)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Of one run. `recomputed`: tokens that were computed though a worker had them, as a part of all prompt tokens."""
    later = [turn.ttft_s for turn in turns if turn.number]
    total = sum(turn.prompt_tokens for turn in turns)
    return {
        "requests": len(turns),
        "prompt_tokens": total,
        "cached": round(sum(turn.cached for turn in turns) / total, 4),
        "pulled": round(sum(turn.pulled for turn in turns) / total, 4),
        "recomputed": round(sum(max(0, turn.held - turn.cached) for turn in turns) / total, 4),
        "ttft_later_p50_s": round(statistics.median(later), 4),
        "ttft_later_p90_s": round(statistics.quantiles(later, n=10)[-1], 4),
    }


def run_arm(arm: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(2, Path(folder), ("--decode-workers", "2", *ARMS[arm]))
        try:
            cluster.wait_ready()
            agents = Agents(cluster, seed, args.answer, args.tool_result)
            asyncio.run(agents.run(args.sessions, args.turns))
        finally:
            cluster.stop()
    found = {"arm": arm, **summary(agents.turns)}
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of an answer")
    parser.add_argument("--tool-result", type=int, default=RESULT, help="tokens of a tool's result")
    parser.add_argument("--arms", nargs="+", default=["off", "on", "on", "off"], choices=ARMS)
    parser.add_argument("--out", type=Path, default=RESULTS / "router" / "agents.json")
    args = parser.parse_args()
    began = surroundings()
    runs = [run_arm(arm, args, seed) for seed, arm in enumerate(args.arms)]
    lengths = {"system": SYSTEM, "task": TASK, "tool_result": args.tool_result, "answer": args.answer, "tool_s": TOOL_S}
    body = {
        "what": "agents on 2P + 2D, with and without pulls of KV between workers", "sessions": args.sessions,
        "turns": args.turns, "lengths": lengths, "surroundings": began, "runs": runs,
    }  # fmt: skip
    write(args.out, body)


if __name__ == "__main__":
    main()
