"""Agents on 2P + 2D: every turn is the whole conversation so far and a tool's result. How many prompt tokens are computed
though a worker has their KV, and the time to first token, with and without pulls, and of vLLM.

    python -P -m diptych.bench.router.agents [--sessions 12] [--turns 8] [--answer 32] [--tool-result 96] [--vllm FOLDER]
        [--out FILE]

Each arm has a cluster of its own (`diptych up`), one after the other, in the order off, on, hints, hints, on, off; "hints" is
"on", and the client says after each answer that its history comes next (`prefetch`), and waits for no reply. With --vllm, an
environment of bench/peers/setup_vllm_cpu.sh, vLLM has two turns in the middle. vLLM is one instance with all cores: its
prefix cache is then one, and nothing is recomputed for lack of a place. The client takes the times of all arms alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from diptych.bench.peers import vllm_process
from diptych.bench.peers.vllm_process import VllmChoice
from diptych.bench.result import RESULTS, surroundings, write
from diptych.bench.router.beside_long_prompts import REQUEST_S, Cluster
from diptych.cli.models.store import resolve_model

HINTS, VLLM = "hints", "vllm"
ARMS = {"off": ("--router-args", "--no-kv-pulls"), "on": (), HINTS: ()}
VLLM_FLAGS = "--enforce-eager --enable-prefix-caching --enable-prompt-tokens-details"
SYSTEM, TASK, RESULT, ANSWER = 256, 64, 96, 32
"""Tokens: of the instructions that all sessions share, of a task, and by default of a tool's result and of an answer."""
TOOL_S = 0.3
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """`held`: leading tokens of its prompt that some worker had computed before, in whole blocks. `cached`: those that the worker
    which computed the prompt had, or had pulled. (`cached_tokens` of an answer also counts what only the other worker had.)
    `ttft_s`: on the client's clock."""

    number: int
    prompt_tokens: int
    held: int
    cached: int
    pulled: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """A server under test. `headers`: of every request. `hints`: it is told what comes next."""

    url: str
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    hints: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """`first_at`: when the first token came."""

    token_ids: tuple[int, ...]
    first_at: float
    cached: int
    pulled: int


async def read_answer(lines: AsyncIterable[str]) -> Answer:
    """A stream's events, ours (with its explanation) or vLLM's (with its usage). Raises: RuntimeError when it has no token."""
    ids, first_at, cached, pulled = list[int](), 0.0, 0, 0
    async for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"the server says {event['error']}")
        new = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
        if new and not ids:
            first_at = time.perf_counter()
        ids += new
        if why := event.get("diptych"):
            cached = why["cached_tokens_decode" if why["local_prefill"] else "cached_tokens_prefill"]
            pulled = sum(pull["num_tokens"] for pull in why["pulls"])
        elif usage := event.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not ids:
        raise RuntimeError("the answer has no token")
    return Answer(tuple(ids), first_at, cached, pulled)


class Agents:
    """Args: answer, tool_result: tokens of each."""

    def __init__(self, place: Place, seed: int, answer: int, tool_result: int) -> None:
        self._place, self._rng = place, random.Random(seed)
        self._answer, self._tool_result = answer, tool_result
        self._http = httpx.AsyncClient(base_url=place.url, timeout=REQUEST_S)
        self._system = self._tokens(SYSTEM)
        self.turns: list[Turn] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000, 40_000) for _ in range(count)]

    async def run(self, sessions: int, turns: int) -> None:
        async with self._http:
            await asyncio.gather(*(self._session(i * TOOL_S, turns) for i in range(sessions)))

    async def _session(self, delay_s: float, turns: int) -> None:
        await asyncio.sleep(delay_s)
        prompt, held, hints = [*self._system, *self._tokens(TASK)], 0, list[asyncio.Task[None]]()
        for number in range(turns):
            began = time.perf_counter()
            answer = await self._ask(prompt)
            self.turns.append(Turn(number, len(prompt), held, answer.cached, answer.pulled, answer.first_at - began))
            history = [*prompt, *answer.token_ids]
            held = (len(history) - 1) // BLOCK * BLOCK
            prompt = [*history, *self._tokens(self._tool_result)]
            if self._place.hints and number + 1 < turns:
                hints.append(asyncio.create_task(self._hint(history)))
            await asyncio.sleep(TOOL_S)
        await asyncio.gather(*hints)

    async def _ask(self, prompt: list[int]) -> Answer:
        body = {
            "model": self._place.model, "prompt": prompt, "max_tokens": self._answer, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with self._http.stream("POST", "/v1/completions", json=body, headers=self._place.headers) as answer:
            answer.raise_for_status()
            return await read_answer(answer.aiter_lines())

    async def _hint(self, history: list[int]) -> None:
        body = {"model": self._place.model, "prompt": history, "prefetch": True}
        answer = await self._http.post("/v1/completions", json=body, headers=self._place.headers)
        if answer.status_code != 529:  # no room for it now
            answer.raise_for_status()


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


@contextmanager
def running(arm: str, vllm: Path | None) -> Iterator[Place]:
    """The arm's server, until the block ends."""
    if arm == VLLM:
        assert vllm is not None
        choice = VllmChoice(vllm, resolve_model("smollm2"), "colocated", more=VLLM_FLAGS)
        with vllm_process.running(choice) as server:
            model = httpx.get(f"{server.url}/v1/models", timeout=10.0).json()["data"][0]["id"]
            yield Place(server.url, model)
        return
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(2, Path(folder), ("--decode-workers", "2", *ARMS[arm]))
        try:
            cluster.wait_ready()
            headers = {"authorization": f"Bearer {cluster.keys['one']}", "x-diptych-explain": "1"}
            yield Place(cluster.url, cluster.model(), headers, hints=arm == HINTS)
        finally:
            cluster.stop()


def run_arm(arm: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    with running(arm, args.vllm) as place:
        agents = Agents(place, seed, args.answer, args.tool_result)
        asyncio.run(agents.run(args.sessions, args.turns))
    found = {"arm": arm, **summary(agents.turns)}
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of an answer")
    parser.add_argument("--tool-result", type=int, default=RESULT, help="tokens of a tool's result")
    parser.add_argument("--arms", nargs="+", default=["off", "on", HINTS, HINTS, "on", "off"], choices=ARMS)
    parser.add_argument("--vllm", type=Path, help="an environment with vLLM for the CPU: a third arm, in the middle")
    parser.add_argument("--out", type=Path, default=RESULTS / "router" / "agents.json")
    args = parser.parse_args()
    began, arms = surroundings(), list(args.arms)
    if args.vllm is not None:
        args.vllm = args.vllm.expanduser().absolute()
        arms[len(arms) // 2 : len(arms) // 2] = [VLLM, VLLM]
    runs = [run_arm(arm, args, seed) for seed, arm in enumerate(arms)]
    lengths = {"system": SYSTEM, "task": TASK, "tool_result": args.tool_result, "answer": args.answer, "tool_s": TOOL_S}
    body = {
        "what": "agents on 2P + 2D, with and without pulls of KV between workers", "sessions": args.sessions,
        "turns": args.turns, "lengths": lengths, "surroundings": began, "runs": runs,
    }  # fmt: skip
    if args.vllm is not None:
        choice = VllmChoice(args.vllm, resolve_model("smollm2"), "colocated", more=VLLM_FLAGS)
        body["vllm"] = {"versions": choice.versions(), "flags": choice.flags}
    write(args.out, body)


if __name__ == "__main__":
    main()
