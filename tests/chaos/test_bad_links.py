"""Links between real processes that a proxy makes slow, shaky or silent, resets or damages: the answer is the
undisturbed one, the cause is named, and everything is free again.

    router -> decode     gRPC: submissions one way, tokens the other
    decode -> prefill    gRPC, and KV over UCX
    all -> Redis
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, check, fake_model_cluster
from diptych_tests.fault_proxy import Link, reset_at

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
KV: dict[str, Any] = {"num_layers": 4, "head_dim": 128}
"""A KiB of KV a token: a prompt takes several slabs and many packets."""
BIG: dict[str, Any] = {"fake": KV, "slab_bytes": 40 << 10, "read_base_s": 2.0}
KV_LINK = "prefill-0 kv"
TURNS = {"placement_policy": "round-robin"}
"""Of these models, the cost of a prompt depends on the machine's load: by it a worker may never be chosen, or decode may
compute the prompt itself and no KV crosses the link."""
BOUND_S = 20.0
"""What ends by a bound of 2 or 3 s, and not by one of 30 s or more, on a busy machine."""


def sequel(answer: Any) -> list[str]:
    return list(answer.explanation.notes)


async def timed(what: Any) -> tuple[Any, float]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    return await what, loop.time() - began


@pytest.mark.slow
async def test_delay_jitter_and_slices_between_router_and_decode(tmp_path: Path) -> None:
    """Only slower: no worker counts as lost, no request is placed twice."""
    async with fake_model_cluster(tmp_path, proxied=("decode-0",)) as cluster, cluster.client() as client:
        for link in (cluster.proxies["decode-0"].up, cluster.proxies["decode-0"].down):
            link.latency_s, link.jitter_s, link.slice_bytes = 0.2, 0.05, 99
        asks = [ask(i) for i in range(4)]
        for asked, answer in zip(asks, await asyncio.gather(*(client.generate(**a) for a in asks)), strict=True):
            check(answer, asked)
            assert not answer.explanation.attempts
        assert await cluster.usable() == {"prefill-0", "decode-0"}
        assert await cluster.metric("diptych_replacements_total") == 0
        await cluster.idle_again()


@pytest.mark.slow
async def test_a_reset_in_the_middle_of_a_message_to_the_router(tmp_path: Path) -> None:
    """Decode lives, and only its stream broke: the answer goes on, at whichever worker, without a lost or doubled token."""
    async with (
        fake_model_cluster(tmp_path, decode=2, proxied=("decode-0", "decode-1")) as cluster,
        cluster.client() as client,
    ):
        names = ("decode-0", "decode-1")
        for name in names:
            await cluster.hold(name, after_steps=8)
        asked = ask(max_tokens=30)
        answering = asyncio.create_task(client.generate(**asked))
        await waiting.until(lambda: any(cluster.gates.held(name) for name in names), every_s=0.01)
        (name,) = (name for name in names if cluster.gates.held(name))
        cluster.proxies[name].down.change = reset_at(20)
        for one in names:
            cluster.gates.open(one)
        answer = await answering
        check(answer, asked)
        assert [attempt.failure for attempt in answer.explanation.attempts] == ["WORKER_LOST", ""]
        await cluster.until_usable()
        await cluster.idle_again()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["up", "down", "both"])
async def test_a_partition_between_router_and_decode(tmp_path: Path, way: str) -> None:
    """One way, or both: nothing breaks, and the worker is missed by its silence. The answer goes on at the other worker; what the
    first one computed meanwhile reaches no client, and it is used again as soon as it answers."""
    settings = {"router": {"worker_dead_s": 1.0}}
    async with (
        fake_model_cluster(tmp_path, decode=2, proxied=("decode-0", "decode-1"), **settings) as cluster,
        cluster.client() as client,
    ):
        names = ("decode-0", "decode-1")
        for name in names:
            await cluster.hold(name, after_steps=8)
        asked = ask(max_tokens=30)
        answering = asyncio.create_task(client.generate(**asked))
        await waiting.until(lambda: any(cluster.gates.held(name) for name in names), every_s=0.01)
        (name,) = (name for name in names if cluster.gates.held(name))
        proxy = cluster.proxies[name]
        (proxy if way == "both" else getattr(proxy, way)).cut()
        for one in names:
            cluster.gates.open(one)
        answer, took_s = await timed(answering)
        check(answer, asked)
        if way != "up":  # tokens still come then, and may all be there before the silence is noticed
            assert [attempt.failure for attempt in answer.explanation.attempts] == ["WORKER_LOST", ""]
        assert took_s < BOUND_S
        proxy.heal()
        await cluster.until_usable()
        check(await client.generate(**ask(1)), ask(1))
        await cluster.idle_again()


async def test_delay_jitter_and_slices_between_decode_and_prefill(tmp_path: Path) -> None:
    """KV over UCX arrives, later; no slab is read twice, and nothing is computed at decode instead."""
    async with (
        fake_model_cluster(
            tmp_path, proxied=("prefill-0", KV_LINK), router=TURNS, **BIG | {"read_base_s": 3600.0}
        ) as cluster,
        cluster.client() as client,
    ):
        for name in ("prefill-0", KV_LINK):
            for link in (cluster.proxies[name].up, cluster.proxies[name].down):
                link.latency_s, link.jitter_s, link.slice_bytes = 0.1, 0.05, 1000
        asks = [ask(i) for i in range(3)]
        for asked, answer in zip(asks, await asyncio.gather(*(client.generate(**a) for a in asks)), strict=True):
            check(answer, asked, **KV)
            assert not answer.explanation.local_prefill
            assert not sequel(answer)
        assert cluster.proxies[KV_LINK].down.carried > 3 * 150 * 1024
        await cluster.idle_again()


@pytest.mark.slow
async def test_a_reset_in_the_middle_of_a_slab(tmp_path: Path) -> None:
    async with (
        fake_model_cluster(tmp_path, prefill=2, proxied=(KV_LINK,), router=TURNS, **BIG) as cluster,
        cluster.client() as client,
    ):
        proxy, numbers = cluster.proxies[KV_LINK], itertools.count()
        proxy.down.change = reset_at(60_000)

        async def one() -> Any:
            asked = ask(next(numbers))
            answer = await client.generate(**asked)
            check(answer, asked, **KV)
            return answer

        async def was_reset() -> bool:
            return bool(sequel(await one()) or proxy.resets)

        async def is_read_again() -> bool:
            return (await one()).explanation.prefill == "prefill-0"

        await waiting.until(was_reset, "a slab is cut off")
        assert proxy.resets == 1
        await waiting.until(is_read_again, "over a new connection")
        assert proxy.connections > 1
        await cluster.idle_again()


def flip_in_kv(link: Link) -> Callable[[], int]:
    """Change one byte of KV, once; the fake model's repeats every 16 bytes. Returns how to read how often that was done."""
    done = 0

    def change(data: bytes) -> bytes:
        nonlocal done
        for at in range(0, len(data) - 64, 16):
            if not done and len(set(data[at : at + 16])) > 4 and data[at : at + 48] == data[at + 16 : at + 64]:
                done = 1
                return data[: at + 24] + bytes([data[at + 24] ^ 1]) + data[at + 25 :]
        return data

    link.change = change
    return lambda: done


async def test_one_byte_of_kv_changes_on_the_wire(tmp_path: Path) -> None:
    """The checksum finds it: the slab is counted, its KV comes from elsewhere, and no token is computed from it."""
    async with (
        fake_model_cluster(tmp_path, proxied=(KV_LINK,), decode_0={"metrics_port": 0}, router=TURNS, **BIG) as cluster,
        cluster.client() as client,
    ):
        flipped = flip_in_kv(cluster.proxies[KV_LINK].down)
        answer = await client.generate(**ask())
        check(answer, ask(), **KV)
        assert flipped() == 1
        assert any("checksum" in note for note in sequel(answer)), sequel(answer)
        assert await cluster.metric("diptych_prefill_faults_total") == 1
        check(await client.generate(**ask(1)), ask(1), **KV)
        await cluster.idle_again()


@pytest.mark.slow
async def test_a_slow_link_has_a_deadline_by_its_bytes(tmp_path: Path) -> None:
    """150 KiB at 100 KiB/s arrive; at 5 KiB/s they would take half a minute: decode computes them, and the deadline bounds the
    wait."""
    async with (
        fake_model_cluster(tmp_path, proxied=(KV_LINK,), router=TURNS, **BIG) as cluster,
        cluster.client() as client,
    ):
        link = cluster.proxies[KV_LINK].down
        link.bytes_per_s, link.slice_bytes = 100 << 10, 1 << 10
        answer, took_s = await timed(client.generate(**ask()))
        check(answer, ask(), **KV)
        assert not sequel(answer)
        assert took_s > 1.0
        assert await cluster.metric("diptych_request_transfer_time_seconds_sum") > 1.0, (
            "the wait is not shown as a transfer"
        )
        link.bytes_per_s = 5 << 10
        answer, took_s = await timed(client.generate(**ask(1)))
        check(answer, ask(1), **KV)
        assert answer.explanation.local_prefill
        assert took_s < BOUND_S
        link.bytes_per_s = 1e9
        await cluster.idle_again()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["up", "down", "both"])
async def test_a_partition_between_the_pools(tmp_path: Path, way: str) -> None:
    """KV stops, in one direction or both, while the router and Redis reach everybody: the other prefill worker serves; nothing
    stays behind, and the pair is used again once the link is back."""
    async with (
        fake_model_cluster(tmp_path, prefill=2, proxied=(KV_LINK,), router=TURNS, **BIG) as cluster,
        cluster.client() as client,
    ):
        proxy, numbers = cluster.proxies[KV_LINK], itertools.count()

        async def one() -> Any:
            asked = ask(next(numbers))
            answer, took_s = await timed(client.generate(**asked))
            check(answer, asked, **KV)
            assert took_s < BOUND_S
            return answer

        async def until_prefill_0(*, fails: bool) -> Any:
            while True:
                answer = await one()
                if sequel(answer) if fails else answer.explanation.prefill == "prefill-0":
                    return answer

        await until_prefill_0(fails=False)
        (proxy if way == "both" else getattr(proxy, way)).cut()
        answer = await until_prefill_0(fails=True)
        assert "prefill-0 failed" in sequel(answer)[0]
        assert answer.explanation.prefill == "prefill-1"
        proxy.heal()
        await until_prefill_0(fails=False)
        await cluster.idle_again()


async def test_a_client_that_leaves_in_the_middle_of_a_transfer(tmp_path: Path) -> None:
    """The KV is under way and stands still: both pools let go, and nobody counts it as an answer."""
    async with (
        fake_model_cluster(
            tmp_path, proxied=(KV_LINK,), router=TURNS, **BIG | {"read_base_s": 3600.0, "slab_lease_s": 3600.0}
        ) as cluster,
        cluster.client() as client,
    ):
        link = cluster.proxies[KV_LINK].down
        check(await client.generate(**ask()), ask(), **KV)
        before = link.carried
        link.change = lambda data: (link.cut(), data)[1] if link.carried > before + 30_000 else data
        answering = asyncio.create_task(client.generate(**ask(1)))
        await waiting.until(lambda: not link.opened.is_set(), "a slab is under way")

        async def has_first_token() -> bool:  # it may come later than the first slabs
            return await cluster.metric("diptych_time_to_first_token_seconds_count") == 2

        await waiting.until(has_first_token, "the router has the first token")
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await waiting.until(lambda: idle_blocks(cluster), "no block is held")
        link.change = None
        link.heal()
        await cluster.idle_again()
        assert await cluster.metric("diptych_request_success_total") == 1

        async def counted() -> bool:
            return await cluster.metric("diptych_unfinished_tokens_total", of="prompt") == len(ask(1)["token_ids"])

        await waiting.until(counted, "it counts as a request whose client left")


async def idle_blocks(cluster: FakeModelCluster) -> bool:
    """No attempt, and no block but in the caches: the slab that was being read is in quarantine still."""
    audits = [await asyncio.to_thread(cluster.audit, name) for name in cluster.workers()]
    return not any(sum(audit.attempts.values()) + audit.blocks.running + audit.blocks.reserved for audit in audits)


@pytest.mark.slow
async def test_a_slow_and_broken_link_to_redis(tmp_path: Path) -> None:
    """Delayed, sliced, reset and silent: no request waits for it, and workers stay in use."""
    async with fake_model_cluster(tmp_path, proxied=("redis",)) as cluster, cluster.client() as client:
        proxy, numbers = cluster.proxies["redis"], iter(range(1000))

        async def serve(times: int) -> None:
            for number in (next(numbers) for _ in range(times)):
                answer, took_s = await timed(client.generate(**ask(number)))
                check(answer, ask(number))
                assert took_s < BOUND_S
                assert not answer.explanation.attempts

        for link in (proxy.up, proxy.down):
            link.latency_s, link.jitter_s, link.slice_bytes = 0.15, 0.1, 50
        await serve(5)
        for link in (proxy.up, proxy.down):
            link.latency_s, link.jitter_s, link.slice_bytes = 0.0, 0.0, 1 << 16
        for _ in range(5):
            proxy.reset()
            await serve(2)
        proxy.cut()

        async def degraded() -> bool:
            await serve(1)
            return await cluster.metric("diptych_degraded") == 1

        await waiting.until(degraded, "the router says that its view may be stale")
        await serve(5)
        proxy.heal()

        async def whole() -> bool:
            await serve(1)
            return await cluster.metric("diptych_degraded") == 0

        await waiting.until(whole, "the store is back")
        await cluster.until_usable()
        await cluster.idle_again()
