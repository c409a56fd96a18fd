"""A full disk under the logs, and a router without file descriptors: serving goes on, or is refused in words, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, body_of, check, expected, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
FILES = 160
CLIENTS = 300


async def restart(cluster: FakeModelCluster, name: str, command: list[str]) -> None:
    cluster.kill_hard(name)
    cluster.start(name, command)


@pytest.mark.slow
async def test_the_disk_of_the_logs_is_full(tmp_path: Path) -> None:
    """Every process writes to a device without space: all start, serve, and end."""
    async with fake_model_cluster(tmp_path, log=Path("/dev/full")) as cluster, cluster.client() as client:
        for number in range(5):
            check(await client.generate(**ask(number)), ask(number))
        await cluster.idle_again()
        for name in ("decode-0", "prefill-0"):  # they drain, and end as asked
            cluster.processes[name].terminate()
            assert await asyncio.to_thread(cluster.processes[name].wait, 300) == 143


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is not installed")
async def test_a_router_without_file_descriptors_serves_again_when_clients_leave(tmp_path: Path) -> None:
    """More clients than it may have sockets: it takes no more, answers those that it has, burns no processor time meanwhile, and
    serves everybody once they have left."""
    async with fake_model_cluster(tmp_path) as cluster:
        await restart(cluster, "router", ["prlimit", f"--nofile={FILES}:{FILES}", *cluster.commands["router"]])
        await cluster.until_usable()
        host, port = cluster.http_url.removeprefix("http://").split(":")
        router = psutil.Process(cluster.processes["router"].pid)
        crowd = [socket.create_connection((host, int(port))) for _ in range(CLIENTS)]
        try:
            await waiting.until(lambda: router.num_fds() >= FILES - 8, "it has no file descriptors left")
            before, loop = router.cpu_times(), asyncio.get_running_loop()
            due = loop.time() + 3.0
            await waiting.until(lambda: loop.time() > due)
            after = router.cpu_times()
            assert after.user + after.system - before.user - before.system < 2.0, "it spins while it can accept nobody"
            assert cluster.processes["router"].poll() is None
        finally:
            for one in crowd:
                one.close()

        async def serves() -> bool:
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient(base_url=cluster.http_url, timeout=10.0) as http:
                    answer = await http.post("/v1/completions", json=body_of(ask(1)))
                    return answer.status_code == 200 and answer.json()["choices"][0]["token_ids"] == expected(ask(1))
            return False

        await waiting.until(serves, "it serves again", deadline_s=60.0)
        await cluster.idle_again()
