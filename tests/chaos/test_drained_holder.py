"""A decode worker drains, as a real process: the next turn of its chat is decoded elsewhere, on KV that it still serves."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import ask, check, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
STEPS: dict[str, Any] = {"fake": {"step_s": 0.05}, "prefill_0": {"fake": {"step_s": 0.2}}}
"""Prefill computes 320 tokens a second: the KV of an answer is worth a pull from a decode worker that is busy."""


async def test_the_next_turn_takes_its_kv_from_the_worker_that_drains(tmp_path: Path) -> None:
    async with fake_model_cluster(tmp_path, decode=2, drain_s=600.0, **STEPS) as cluster, cluster.client() as client:
        first = ask(1, max_tokens=96)
        answer = await client.generate(**first)
        check(answer, first)
        holder = answer.explanation.decode
        other = next(name for name in ("decode-0", "decode-1") if name != holder)
        history = [*first["token_ids"], *answer.token_ids]
        second = ask(3, max_tokens=8) | {"token_ids": [*history, *ask(4, num_prompt=21)["token_ids"]]}

        async def is_known() -> bool:
            """And that prefill is idle: a busy engine lets a pull wait for longer than it takes to compute so little."""
            workers = {worker["id"]: worker for worker in (await cluster.status())["cluster"]["workers"]}
            return (workers[holder]["state"], workers["prefill-0"]["running"]) == ("draining", 0)

        # One answer at each, which keeps the holder from leaving.
        async with client.stream(**ask(6, max_tokens=340)) as one, client.stream(**ask(7, max_tokens=340)) as two:
            deltas = [aiter(one), aiter(two)]
            for answers in deltas:
                await anext(answers)
            cluster.kill(holder, signal.SIGTERM)
            await waiting.until(is_known)
            answer = await client.generate(**second)
            check(answer, second)
            why = answer.explanation
            assert why.decode == other
            [pull] = why.pulls
            assert (pull.reader, pull.holder, pull.note) == ("prefill-0", holder, "")
            assert pull.num_tokens > 0
            assert f"KV is taken from {holder}, which drains" in why.notes
            print(f"{pull.num_tokens} tokens in {pull.duration_s:.3f} s; first token after {why.ttft_s:.3f} s")
        await waiting.until(lambda: cluster.processes[holder].poll() is not None)
        third = ask(5, max_tokens=8) | {"token_ids": [*second["token_ids"], *answer.token_ids, 5, 6, 7]}
        answer = await client.generate(**third)
        check(answer, third)
        assert holder not in {one.holder for one in answer.explanation.pulls}
