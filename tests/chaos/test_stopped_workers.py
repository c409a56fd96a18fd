"""Workers of a real cluster that are stopped (SIGSTOP) or fail again and again: who waits, who goes on elsewhere, and who is used
again."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, check, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
DECODES = ("decode-0", "decode-1")


async def load_of(cluster: FakeModelCluster, name: str) -> dict[str, Any]:
    """What the router knows of a worker."""
    return next(worker for worker in (await cluster.status())["cluster"]["workers"] if worker["id"] == name)


async def test_a_worker_that_stops_for_less_than_the_bound_is_only_slow(tmp_path: Path) -> None:
    """No answer is moved, none is placed again, and no worker is left alone: prefill and decode, in the midst of four answers."""
    async with (
        fake_model_cluster(tmp_path, router={"worker_dead_s": 60.0}, leg_silence_s=60.0) as cluster,
        cluster.client() as client,
    ):
        await cluster.hold("decode-0", after_steps=8)
        asks = [ask(i, max_tokens=30) for i in range(4)]
        answering = [asyncio.create_task(client.generate(**asked)) for asked in asks]
        await cluster.gates.wait_held("decode-0", answering[0])
        for name in ("decode-0", "prefill-0"):
            cluster.freeze(name)
        cluster.gates.open("decode-0")

        async def missed() -> bool:
            return all([(await load_of(cluster, name))["silent_s"] > 1.0 for name in ("decode-0", "prefill-0")])

        await waiting.until(missed, "the router has heard nothing for a second")
        for name in ("decode-0", "prefill-0"):
            cluster.thaw(name)
        for asked, answer in zip(asks, await asyncio.gather(*answering), strict=True):
            check(answer, asked)
            assert not answer.explanation.attempts
            assert not answer.explanation.notes
        assert await cluster.metric("diptych_replacements_total") == 0
        assert await cluster.usable() == {"prefill-0", "decode-0"}
        await cluster.idle_again()


@pytest.mark.slow
async def test_a_stopped_worker_keeps_no_booked_load(tmp_path: Path) -> None:
    """Five answers move to the other decode worker; what the router has booked is what runs, and the stopped one comes back with
    nothing."""
    async with (
        fake_model_cluster(tmp_path, decode=2, router={"worker_dead_s": 1.0}) as cluster,
        cluster.client() as client,
    ):
        for name in DECODES:
            await cluster.hold(name, after_steps=6)
        asks = [ask(i, max_tokens=40) for i in range(5)]
        answering = [asyncio.create_task(client.generate(**asked)) for asked in asks]

        await waiting.until(lambda: any(cluster.gates.held(name) for name in DECODES), every_s=0.01)
        lost = next(name for name in DECODES if cluster.gates.held(name))
        (other,) = set(DECODES) - {lost}
        cluster.freeze(lost)
        cluster.gates.open(other)
        for asked, answer in zip(asks, await asyncio.gather(*answering), strict=True):
            check(answer, asked)
            assert answer.explanation.decode == other
        cluster.gates.open(lost)
        for name in DECODES:
            load = await load_of(cluster, name)
            assert (load["pending_tokens"], load["pending_requests"]) == (0, 0)
        cluster.thaw(lost)
        await cluster.until_usable()
        await cluster.idle_again()

        async def has_nothing() -> bool:
            load = await load_of(cluster, lost)
            return (load["pending_tokens"], load["running"], load["waiting"]) == (0, 0, 0)

        await waiting.until(has_nothing, "it reports no load")


async def test_a_client_leaves_while_prefill_is_stopped_and_then_it_is_killed(tmp_path: Path) -> None:
    """Decode waits for no word of it; where it comes back as another process, everything is free there, too."""
    async with (
        fake_model_cluster(tmp_path, router={"worker_dead_s": 60.0}, leg_silence_s=60.0) as cluster,
        cluster.client() as client,
    ):
        await cluster.hold("prefill-0", after_steps=1)
        answering = asyncio.create_task(client.generate(**ask()))
        await cluster.gates.wait_held("prefill-0", answering)
        cluster.freeze("prefill-0")
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await waiting.until(lambda: no_attempt(cluster, "decode-0"), "decode lets go while prefill is stopped")
        cluster.kill_hard("prefill-0")
        cluster.gates.open("prefill-0")
        await cluster.idle_again("decode-0")
        cluster.start("prefill-0")
        await cluster.until_usable()
        answer = await client.generate(**ask(1))
        check(answer, ask(1))
        assert answer.explanation.prefill == "prefill-0"
        await cluster.idle_again()


async def no_attempt(cluster: FakeModelCluster, name: str) -> bool:
    """It has no request, and no block but in its cache. A slab may wait for the proof that nobody writes into it."""
    audit = await asyncio.to_thread(cluster.audit, name)
    return not sum(audit.attempts.values()) + audit.blocks.running + audit.blocks.reserved


@pytest.mark.slow
async def test_a_prefill_worker_that_fails_is_left_alone_and_comes_back(tmp_path: Path) -> None:
    """Its KV never arrives. After some failures its breaker opens: from then on no request waits for it. Once the link
    is whole one probe brings it back for good."""
    settings: dict[str, Any] = {"read_base_s": 0.5, "router": {"placement_policy": "round-robin"}}
    async with (
        fake_model_cluster(tmp_path, prefill=2, proxied=("prefill-0 kv",), **settings) as cluster,
        cluster.client() as client,
    ):
        numbers = itertools.count()

        async def one() -> Any:
            number = next(numbers)
            answer = await client.generate(**ask(number))
            check(answer, ask(number))
            return answer

        cluster.proxies["prefill-0 kv"].cut()
        await waiting.until(lambda: opens(cluster, one), "the breaker opens", deadline_s=120.0)
        for _ in range(5):
            assert not (await one()).explanation.notes
        cluster.proxies["prefill-0 kv"].heal()

        async def serves() -> bool:
            return (await one()).explanation.prefill == "prefill-0"

        await waiting.until(serves, "it is probed, and used again", deadline_s=120.0)
        await waiting.until(lambda: closed(cluster), "its breaker is closed")
        await cluster.idle_again()


async def opens(cluster: FakeModelCluster, one: Any) -> bool:
    await one()
    return (await load_of(cluster, "prefill-0"))["breaker"] == "open"


async def closed(cluster: FakeModelCluster) -> bool:
    return (await load_of(cluster, "prefill-0"))["breaker"] == "closed"
