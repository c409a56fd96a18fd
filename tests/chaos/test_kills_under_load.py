"""kill -9 of random workers under sixteen streams: every answer is that of the undisturbed run.

DIPTYCH_TEST_KILLS sets the number of kills (default 6), DIPTYCH_TEST_SEED their order.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.cli.up.processes import ProcessIdentity
from diptych.client import AsyncClient, Completion, DiptychError
from diptych_tests import waiting

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

KILLS = int(os.environ.get("DIPTYCH_TEST_KILLS", "6"))
SEED = int(os.environ.get("DIPTYCH_TEST_SEED", "1"))
STREAMS, ANSWER_S, AGAIN_S = 16, 600.0, 240.0
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
PLAIN: dict[str, Any] = {
    "max_tokens": 120, "temperature": 1.0, "ignore_eos": True, "explain": True, "local_prefill_max_tokens": 0,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 0.8, "repetition_penalty": 1.2, "min_tokens": 90, "ignore_eos": False},
    {"logprobs": 2},
    {"regex": "((red|green|blue|tall|small|old|new) ){40}end", "ignore_eos": False},
    {"n": 3, "max_tokens": 60},
    {"n": 1, "best_of": 2, "max_tokens": 60},
    {"max_tokens": 2},
    {"stop": ["and the", ". She", "."]},
]


def outcome(answer: Completion) -> Any:
    choices = [(one.token_ids, one.text, one.finish_reason, one.stop_string) for one in answer.choices]
    return choices, (answer.usage.prompt_tokens, answer.usage.completion_tokens)


def serves(cluster: Any) -> bool:
    """All workers are there, and the router uses them."""
    children = [child for child in cluster.state.children if child.name in WORKERS]
    if len(children) < len(WORKERS) or not all(ProcessIdentity(one.pid, one.start_time).alive() for one in children):
        return False
    try:
        workers = httpx.get(f"{cluster.http_url}/status.json", timeout=300.0).json()["cluster"]["workers"]
    except (httpx.TransportError, TypeError):
        return False
    pids = {child.pid for child in children}
    return {worker["id"] for worker in workers if not worker["why_not"] and worker["pid"] in pids} == set(WORKERS)


def migration_metrics(cluster: Any) -> str:
    text = httpx.get(f"{cluster.http_url}/metrics", timeout=300.0).text
    return "\n".join(line for line in text.splitlines() if line.startswith("diptych_migration"))


async def test_every_answer_is_that_of_the_undisturbed_run(cluster_module: Any, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    asks = [PLAIN | kind | {"prompt": f"Story number {i}. Once upon a time", "seed": i} for i, kind in enumerate(KINDS)]
    answers: list[tuple[int, Completion]] = []
    failed: list[tuple[int, DiptychError]] = []
    with cluster_module.running_cluster(tmp_path, "--prefill-workers", "2", "--decode-workers", "3") as cluster:
        async with AsyncClient(cluster.grpc_address, timeout_s=ANSWER_S) as client:
            want = [outcome(await client.generate(**ask)) for ask in asks]
            numbers, ends = itertools.count(), asyncio.Event()

            async def stream() -> None:
                while not ends.is_set():
                    number = next(numbers) % len(asks)
                    try:
                        answers.append((number, await client.generate(**asks[number])))
                    except DiptychError as error:
                        failed.append((number, error))

            streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
            for _ in range(KILLS):
                await waiting.until(lambda: asyncio.to_thread(serves, cluster), deadline_s=AGAIN_S, every_s=0.2)
                at, steps = len(answers), rng.randrange(1, 12)
                await waiting.until(lambda at=at, steps=steps: len(answers) >= at + steps, deadline_s=ANSWER_S)
                cluster.kill(rng.choice(WORKERS))
            ends.set()
            await asyncio.gather(*streams)
        cluster_module.wait_until(lambda: serves(cluster), deadline_s=AGAIN_S, what="it serves")
        cluster.wait_idle()
        metrics = migration_metrics(cluster)
    attempts = [answer.explanation.attempts for _, answer in answers if answer.explanation is not None]
    moved = [one for one in attempts if one]
    gaps = [
        answer.explanation.longest_gap_s for _, answer in answers if answer.explanation and answer.explanation.attempts
    ]
    print(f"{KILLS} kills, {len(answers)} answers, {len(moved)} moved, the longest gap {max(gaps, default=0.0):.1f} s")
    print(metrics)
    assert not failed, f"seed {SEED}: {failed}"
    wrong = [(number, answer) for number, answer in answers if outcome(answer) != want[number]]
    assert not wrong, f"seed {SEED}: {wrong[0]}, expected {want[wrong[0][0]]}"
    assert moved, "no answer was moved: the test shows nothing"
