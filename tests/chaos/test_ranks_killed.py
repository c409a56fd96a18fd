"""One rank of a worker under `diptych up` is killed or stopped while streams run: every answer is that of the undisturbed run,
the worker ends with all its ranks, and the supervisor starts it again. DIPTYCH_TEST_KILLS sets how many times (default: 3). In
every phase, with larger models: `make chaos-kill-ranks`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from diptych.cli.up.processes import ProcessIdentity
from diptych.cli.up.run_folder import ChildState
from diptych_tests import waiting
from diptych_tests.kill_run import ranks_of
from diptych_tests.quantized import write_llama

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
VOCAB, STREAMS, ANSWER_S = 320, 4, 600.0
KILLS = int(os.environ.get("DIPTYCH_TEST_KILLS", "3"))
KINDS = (
    ("decode-0", signal.SIGSTOP), ("prefill-0", signal.SIGKILL), ("decode-1", signal.SIGKILL), ("prefill-0", signal.SIGSTOP),
    ("decode-0", signal.SIGKILL), ("decode-1", signal.SIGSTOP),
)  # fmt: skip
FLAGS = (
    "--num-blocks", "96", "--max-model-len", "512", "--prefill-workers", "1", "--decode-workers", "2",
    "--tensor-parallel-size", "2", "--local-prefill-max-tokens", "0", "--startup-timeout-s", "1800",
)  # fmt: skip


def tiny_model(folder: Path) -> Path:
    write_llama(folder, vocab=VOCAB)
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"[UNK]": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


async def ask(client: httpx.AsyncClient, number: int, salt: str) -> list[int]:
    body = {
        "prompt": [(7 * i + 31 * number) % VOCAB for i in range(120)], "max_tokens": 300, "temperature": 1.0, "seed": number,
        "ignore_eos": True, "return_token_ids": True, "cache_salt": salt,
    }  # fmt: skip
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


async def computes(cluster: Any, victim: str, running: asyncio.Task[Any]) -> None:
    await waiting.until(lambda: running.done() or cluster.stats(victim)["num_running"], f"{victim} computes")


async def has_ended(processes: list[ProcessIdentity]) -> float:
    """Seconds until then."""
    began = time.monotonic()
    await waiting.until(lambda: not any(one.alive() for one in processes), "a worker and its ranks have ended")
    return time.monotonic() - began


async def is_back(cluster: Any, child: ChildState) -> None:
    await waiting.until(
        lambda: any(one.name == child.name and one.pid != child.pid for one in cluster.state.children),
        f"{child.name} is started again",
    )


async def test_streams_go_on_when_a_worker_loses_a_rank(cluster_module: Any, tmp_path: Path) -> None:
    flags = ("--model", str(tiny_model(tmp_path / "tiny")), *FLAGS)
    with cluster_module.running_cluster(tmp_path, *flags) as cluster:
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=ANSWER_S) as client:

            async def answers(salt: str) -> list[list[int]]:
                return await asyncio.gather(*(ask(client, number, salt) for number in range(STREAMS)))

            want = await answers("undisturbed")
            for number in range(KILLS):
                victim, signum = KINDS[number % len(KINDS)]
                running = asyncio.create_task(answers(f"kill {number}"))
                await computes(cluster, victim, running)
                child = cluster.child(victim)
                ranks = ranks_of(child)
                assert len(ranks) == 2
                processes = [ProcessIdentity.of(one) for one in (child.pid, *(rank.pid for rank in ranks))]
                ranks[number // len(KINDS) % 2].send_signal(signum)
                found, gone_s = await asyncio.gather(running, has_ended(processes))
                print(f"{number} {victim} {signum.name}: its processes were gone after {gone_s:.1f} s")
                assert found == want, f"{victim} {signum.name}"
                await is_back(cluster, child)
                cluster.wait_idle_of(victim)
            assert await answers("afterwards") == want
            cluster.wait_idle()
