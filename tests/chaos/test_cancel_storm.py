"""Clients leave 800 requests, in every phase: blocks, slabs, bookings, descriptors and memory are back without a new request."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from diptych.client import AsyncClient
from diptych_tests import waiting
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, body_of, check, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
ROUNDS, REQUESTS = 4, 200
LONG = 340
"""Tokens of an answer that no client waits for: 200 prompts with them are many times what the pools hold, so most queue."""
MOST_MIB = 12.0
"""By which a process may be larger after four rounds than after the first one: what allocators keep."""


def held(cluster: FakeModelCluster) -> dict[str, tuple[int, float]]:
    """Descriptors, and MiB of its own, of each process."""
    found = {}
    for name, process in cluster.processes.items():
        one = psutil.Process(process.pid)
        found[name] = (one.num_fds(), one.memory_full_info().uss / 2**20)
    return found


async def storm(cluster: FakeModelCluster, client: AsyncClient, rng: random.Random, first: int) -> Counter[str]:
    """One round. By turns a call that is cancelled after a time, a stream after some tokens, an HTTP stream after some lines."""
    outcomes: Counter[str] = Counter()

    async def after_a_time(number: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.0, 3.0)):  # in any phase, whichever it is
                await client.generate(**ask(number, max_tokens=LONG))
                outcomes["whole"] += 1

    async def after_tokens(number: int, tokens: int) -> None:
        async with client.stream(**ask(number, max_tokens=LONG)) as stream:
            async for _ in stream:
                tokens -= 1
                if tokens < 0:
                    return
        outcomes["whole"] += 1

    async def after_lines(http: httpx.AsyncClient, number: int, lines: int) -> None:
        body = body_of(ask(number, max_tokens=LONG), stream=True)
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_lines():
                lines -= 1
                if lines < 0:
                    return
        outcomes["whole"] += 1

    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=300.0, limits=limits) as http:
        leaving = []
        for number in range(first, first + REQUESTS):
            if number % 3 == 0:
                leaving.append(after_a_time(number))
            elif number % 3 == 1:
                leaving.append(after_tokens(number, rng.randrange(20)))
            else:
                leaving.append(after_lines(http, number, rng.randrange(40)))
        await asyncio.gather(*leaving)
    return outcomes


async def test_eight_hundred_requests_are_left(tmp_path: Path) -> None:
    rng = random.Random(7)
    async with fake_model_cluster(tmp_path, decode=2) as cluster, cluster.client(300.0) as client:

        async def nothing_booked() -> bool:
            workers = (await cluster.status())["cluster"]["workers"]
            return not any(one["pending_requests"] or one["pending_tokens"] for one in workers)

        after = []
        for number in range(ROUNDS):
            outcomes = await storm(cluster, client, rng, number * REQUESTS)
            assert outcomes["whole"] < REQUESTS / 10, "they were to be left"
            took_s = await cluster.idle_again()
            await waiting.until(nothing_booked, "the router has nothing booked", every_s=0.02)
            after.append(held(cluster))
            print(f"round {number + 1}: idle after {took_s:.2f} s, {after[-1]}")
        for name, (descriptors, mib) in after[-1].items():
            assert descriptors <= after[0][name][0] + 4, f"{name}: {after}"
            assert mib - after[0][name][1] < MOST_MIB, f"{name}: {after}"
        check(await client.generate(**ask(10**6)), ask(10**6))
