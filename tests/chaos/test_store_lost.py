"""Redis dies, forgets or is full of rubbish under load: no request fails, workers come back by themselves, and the
router knows their caches again."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import asyncio as aioredis

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, check, fake_model_cluster
from diptych_tests.lora import write_adapter

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
AWAY_S = 10.0
"""Longer than a lease (5 s): what is not renewed has ended."""


@asynccontextmanager
async def load(cluster: FakeModelCluster, streams: int = 4) -> AsyncIterator[list[Any]]:
    """Streams of requests, one after the other, which all end well; the list grows by each answer."""
    numbers, answers, ends = itertools.count(10_000), [], asyncio.Event()
    async with cluster.client() as client:

        async def stream() -> None:
            while not ends.is_set():
                asked = ask(next(numbers))
                answer = await client.generate(**asked)
                check(answer, asked)
                assert not answer.explanation.attempts
                answers.append(answer)

        running = [asyncio.create_task(stream()) for _ in range(streams)]
        try:
            yield answers
        finally:
            ends.set()
            await asyncio.gather(*running)


async def served(answers: list[Any], more: int = 8) -> None:
    at = len(answers)
    await waiting.until(lambda: len(answers) >= at + more, f"{more} more answers")


async def degraded(cluster: FakeModelCluster, wanted: bool) -> None:
    async def as_wanted() -> bool:
        return await cluster.metric("diptych_degraded") == wanted

    await waiting.until(as_wanted, f"degraded is {wanted}")


async def registered(cluster: FakeModelCluster, client: Any) -> float:
    """Seconds until every worker's lease is in the store."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def all_there() -> bool:
        return await client.exists(*(f"{{diptych}}:worker:{name}" for name in cluster.workers())) == len(
            cluster.workers()
        )

    await waiting.until(all_there, "every worker has a lease")
    return loop.time() - began


async def index_is_right(cluster: FakeModelCluster) -> None:
    """What the router predicts of a prompt that was seen is what the worker finds."""
    asked = ask(1)
    async with cluster.client() as client:
        check(await client.generate(**asked), asked)

        async def right() -> bool:
            answer = await client.generate(**asked)
            check(answer, asked)
            return answer.explanation.predicted_cached_tokens == answer.usage.cached_tokens == 144

        await waiting.until(right, "the index is right")


@pytest.mark.slow
async def test_redis_is_dead_for_longer_than_a_lease(tmp_path: Path) -> None:
    async with fake_model_cluster(tmp_path, decode=2) as cluster:
        await index_is_right(cluster)
        async with load(cluster) as answers:
            await served(answers)
            cluster.kill_hard("redis")
            await degraded(cluster, True)
            await asyncio.sleep(AWAY_S)  # sleep: leases would end meanwhile
            await served(answers)
            assert await cluster.usable() == set(cluster.workers())
            cluster.start("redis")
            await degraded(cluster, False)
            await served(answers)
        await index_is_right(cluster)
        await cluster.idle_again()


async def test_redis_forgets_everything_and_then_holds_keys_of_other_types(tmp_path: Path) -> None:
    """Adapters are the one thing there that no worker can write again: the router does, and serves them meanwhile."""
    folder = write_adapter(tmp_path / "lora" / "french", {"model.layers.0.self_attn.q_proj": (8, 6)})
    lora = {"enable_lora": True, "max_loras": 2, "lora_dir": [str(folder.parent)]}
    router = {"lora_modules": f"french={folder}"}
    async with (
        fake_model_cluster(tmp_path, decode=2, fake={"max_loras": 2}, router=router, **lora) as cluster,
        load(cluster) as answers,
        cluster.client() as sdk,
    ):
        client = aioredis.Redis(port=cluster.redis_port, protocol=2)

        async def with_adapter() -> tuple[int, ...]:
            return (await sdk.generate(**ask(1), adapter="french")).token_ids

        async def registry_again() -> bool:
            return await client.type("{diptych}:adapters") == b"hash"

        try:
            await registered(cluster, client)
            await waiting.until(registry_again, "the adapter is loaded")
            await served(answers)
            french = await with_adapter()
            assert french != (await sdk.generate(**ask(1))).token_ids
            await client.flushall()
            assert await with_adapter() == french
            await registered(cluster, client)
            await waiting.until(registry_again, "the registry is written again")
            await served(answers)
            keys = await client.keys("*")
            assert len(keys) > len(cluster.workers())
            async with client.pipeline(transaction=True) as both:
                both.flushall()
                for key in keys:
                    both.zadd(key, {"rubbish": 1})
                await both.execute()

            async def leases_again() -> bool:
                types = [await client.type(f"{{diptych}}:worker:{name}") for name in cluster.workers()]
                return all(kind not in (b"zset", b"none") for kind in types)

            await waiting.until(leases_again, "every lease is written again")
            await waiting.until(registry_again, "and the registry")
            await cluster.until_usable()
            await served(answers)
            assert await with_adapter() == french
        finally:
            await client.aclose()
        await index_is_right(cluster)
