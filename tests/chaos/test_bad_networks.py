"""Workers on hosts of their own (network namespaces) whose links are cut, one-way, lossy or slow: the answer is the
undisturbed one, within a bound, and the pair is used again as soon as the link is back.

The router and Redis are on this side, and reach every worker unless a test says otherwise.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, check, fake_model_cluster
from diptych_tests.network import NEEDS_ROOT, Host, network

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.netns,
    NEEDS_ROOT,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
KV: dict[str, Any] = {"num_layers": 4, "head_dim": 128}
"""A KiB of KV a token: a prompt takes several slabs and some hundred packets."""
BIG: dict[str, Any] = {"fake": KV, "slab_bytes": 40 << 10, "read_base_s": 2.0}
BOUND_S = 20.0
"""What ends by a bound of 2 or 3 s, and not by one of 30 s or more, on a busy machine."""
Ask = Callable[[], Awaitable[Any]]


@asynccontextmanager
async def spread(
    tmp_path: Path, *names: str, **settings: Any
) -> AsyncIterator[tuple[FakeModelCluster, dict[str, Host], Ask]]:
    """A cluster with a host for each worker, its hosts, and a request that has to be answered right and in time."""
    counts = {role: sum(name.startswith(role) for name in names) for role in ("prefill", "decode")}
    with network(*names) as (here, hosts):
        addresses = {name: host.address for name, host in hosts.items()}
        inside = {name: host.inside for name, host in hosts.items()}
        async with (
            fake_model_cluster(
                tmp_path, prefill=counts["prefill"], decode=counts["decode"], host=here, hosts=addresses,
                prefix=lambda name: inside.get(name, []), router={"placement_policy": "round-robin"}, **(BIG | settings),
            ) as cluster,
            cluster.client() as client,
        ):  # fmt: skip
            numbers = itertools.count()

            async def one() -> Any:
                asked = ask(next(numbers))
                answer = await client.generate(**asked)
                check(answer, asked, **KV)
                assert answer.explanation.total_s < BOUND_S
                return answer

            yield cluster, hosts, one


async def until_served_by(one: Ask, name: str) -> None:
    async def served() -> bool:
        return (await one()).explanation.prefill == name

    await waiting.until(served, f"{name} is used")


async def until_failed(one: Ask, name: str) -> Any:
    answers: list[Any] = []

    async def failed() -> bool:
        answers.append(await one())
        return bool(answers[-1].explanation.notes)

    await waiting.until(failed, f"{name} was tried in vain")
    assert f"{name} failed" in answers[-1].explanation.notes[0]
    return answers[-1]


@pytest.mark.parametrize("way", ["both", "decode to prefill", "prefill to decode"])
async def test_a_partition_between_the_pools(tmp_path: Path, way: str) -> None:
    """Both sides still reach the router and Redis, so nobody else notices."""
    async with spread(tmp_path, "prefill-0", "prefill-1", "decode-0") as (cluster, hosts, one):
        await until_served_by(one, "prefill-0")
        decode = hosts["decode-0"]
        hosts["prefill-0"].drop(
            of=None if way == "prefill to decode" else decode, to=None if way == "decode to prefill" else decode
        )
        answer = await until_failed(one, "prefill-0")
        assert answer.explanation.prefill == "prefill-1"
        hosts["prefill-0"].deliver()
        await until_served_by(one, "prefill-0")
        await cluster.until_usable()
        await cluster.idle_again()


@pytest.mark.parametrize("share", [0.05, 0.2])
async def test_lost_packets_between_the_pools(tmp_path: Path, share: float) -> None:
    """Slower, and right. Nobody counts as dead where a twentieth is lost."""
    async with spread(tmp_path, "prefill-0", "decode-0", read_base_s=10.0) as (cluster, hosts, one):
        await until_served_by(one, "prefill-0")
        hosts["prefill-0"].drop(of=hosts["decode-0"], to=hosts["decode-0"], share=share)
        answers = [await one() for _ in range(12)]
        if share < 0.1:
            assert not [answer.explanation.notes for answer in answers if answer.explanation.notes]
            assert await cluster.usable() == {"prefill-0", "decode-0"}
        hosts["prefill-0"].deliver()
        await until_served_by(one, "prefill-0")
        await cluster.idle_again()


async def test_a_slow_link_from_prefill(tmp_path: Path) -> None:
    """At 8 Mbit/s KV takes a while, which shows as transfer; at 64 kbit/s it does not come in time, and decode computes."""
    async with spread(tmp_path, "prefill-0", "decode-0") as (cluster, hosts, one):
        hosts["prefill-0"].limit("8mbit")
        answer = await one()
        assert not answer.explanation.notes
        assert answer.explanation.prefill == "prefill-0"
        assert await cluster.metric("diptych_request_transfer_time_seconds_count") == 1
        hosts["prefill-0"].limit("64kbit")
        answer = await until_failed(one, "prefill-0")
        assert answer.explanation.local_prefill
        hosts["prefill-0"].limit()
        await until_served_by(one, "prefill-0")
        await cluster.idle_again()


async def test_a_host_that_vanishes_while_nothing_happens(tmp_path: Path) -> None:
    """No packet says that it is gone: the router notices by itself, and the next requests do not hang."""
    async with spread(tmp_path, "prefill-0", "prefill-1", "decode-0", "decode-1") as (cluster, hosts, one):
        for _ in range(6):
            await one()
        await cluster.idle_again()
        for name in ("prefill-0", "decode-0"):
            hosts[name].vanish()
        for _ in range(6):
            answer = await one()
            assert answer.explanation.decode == "decode-1"
        await cluster.until_usable("prefill-1", "decode-1")
        await cluster.idle_again("prefill-1", "decode-1")


async def test_a_cable_that_is_out_for_a_moment(tmp_path: Path) -> None:
    """Prefill's host has no link for a while: it is used again without a restart."""
    async with spread(tmp_path, "prefill-0", "decode-0") as (cluster, hosts, one):
        await until_served_by(one, "prefill-0")
        hosts["prefill-0"].link("down")
        for _ in range(3):
            await one()
        hosts["prefill-0"].link("up")
        await until_served_by(one, "prefill-0")
        await cluster.until_usable()
        await cluster.idle_again()
