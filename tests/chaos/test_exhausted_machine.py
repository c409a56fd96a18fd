"""A full disk under what is written, and a router without file descriptors: serving goes on, or is refused in words, and comes
back."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from diptych.cli.bench.run import finish
from diptych.cli.up import command
from diptych.cli.up.progress_log import Stages
from diptych.cli.up.run_folder import RunFolder
from diptych.cli.up.supervisor import ChildSpec, Supervisor
from diptych.common.errors import ConfigError
from diptych.loadtest.config import BenchConfig
from diptych.loadtest.runs.result import begin_report
from diptych_tests import clusters, waiting
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "diptych-test", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here: needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Take all that is free. Returns the file to remove."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return filler


@pytest.mark.slow
async def test_the_disk_of_the_logs_is_full_for_a_while(tmp_path: Path, small_disk: Path) -> None:
    """Access log and logs of every process: what is lost meanwhile is counted in the first lines that fit again."""
    log = small_disk / "all.log"
    async with fake_model_cluster(tmp_path, log=log) as cluster, cluster.client() as client:
        check(await client.generate(**ask(0)), ask(0))
        await waiting.until(lambda: '"outcome": "served"' in log.read_text(), "the access log is written")
        filler = fill(small_disk)
        await waiting.until(lambda: fill(small_disk) and shutil.disk_usage(small_disk).free == 0, "the disk is full")
        full = log.stat().st_size
        for number in range(1, 40):  # more lines than what was left of the last page takes
            check(await client.generate(**ask(number)), ask(number))
        assert log.stat().st_size < full + 4096
        filler.unlink()

        async def said() -> bool:
            check(await client.generate(**ask(0)), ask(0))
            return "log lines were dropped" in log.read_text(errors="replace")[full:]

        await waiting.until(said, "what was lost is said", every_s=0.1)
        await cluster.idle_again()


@pytest.mark.slow
async def test_the_disk_of_the_run_folder_is_full(small_disk: Path) -> None:
    """`diptych up` can write neither its own lines nor its state: it starts a killed worker again all the same, and writes the
    state when there is room."""
    body = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
    with clusters.running_cluster(small_disk) as cluster:
        filler = fill(small_disk)
        killed = cluster.kill("decode-0")
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=300.0) as http:

            async def again() -> bool:
                assert cluster.process.poll() is None, cluster.log()[-3000:]
                workers = (await http.get("/status.json")).json()["cluster"]["workers"]
                one = next((one for one in workers if one["id"] == "decode-0"), None)
                return one is not None and one["pid"] != killed.pid and not one["why_not"]

            await waiting.until(again, "the worker serves again", deadline_s=300.0, every_s=0.2)
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            assert cluster.child("decode-0").pid == killed.pid, "the disk was not full"
            filler.unlink()
            await waiting.until(
                lambda: cluster.child("decode-0").pid != killed.pid, "the state is written", every_s=0.1
            )
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert cluster.process.poll() is None


async def test_a_full_disk_does_not_end_the_supervisor(small_disk: Path) -> None:
    """A killed child is started again; the state is written as soon as there is room."""
    folder = RunFolder(small_disk / "run")
    folder.claim()
    plan: Any = SimpleNamespace(
        folder=folder, addresses={}, metrics={}, http_url="", grpc_address="", redis_url="", secret_file="", model_name="",
        tls_files={},
    )  # fmt: skip
    supervisor, signals = Supervisor(dict(os.environ), small_disk), command._Signals()
    endless = [sys.executable, "-P", "-c", "import time; time.sleep(600)"]
    child = supervisor.start(ChildSpec("a", "test", lambda: endless, small_disk / "a.log", 0))
    command._write_state(plan, supervisor, ready=True)
    first = child.process

    def written() -> int:
        state = folder.read_state()
        assert state is not None
        return state.children[0].pid

    async def others() -> None:
        try:
            filler = fill(small_disk)
            first.kill()
            await waiting.until(lambda: child.process is not first, "it is started again")
            assert written() == first.pid
            filler.unlink()
            await waiting.until(lambda: written() == child.process.pid, "the state is written")
        finally:
            signals.received.append(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:  # children are started on the main thread
        looking = pool.submit(asyncio.run, others())
        command._supervise(plan, supervisor, signals, Stages())
        looking.result()
    supervisor.stop(grace_s=0.1)
    folder.release()


@pytest.mark.parametrize("lines", [1, 3])
def test_lines_about_the_start_that_a_full_disk_does_not_take_are_counted(lines: int, small_disk: Path) -> None:
    program = (
        "import sys; from diptych.cli.up.progress_log import Stages; stages = Stages();"
        f"[stages.done('lost') for _ in range({lines})]; print('did', flush=True); sys.stdin.readline(); stages.done('kept')"
    )
    log = small_disk / "log"
    with log.open("wb") as output:
        filler = fill(small_disk)
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program], stdin=pipe, stdout=pipe, stderr=output
        )  # ends: with its stdin
        assert process.stdout is not None
        assert process.stdout.readline() == b"did\n"
        filler.unlink()
        process.communicate(b"\n", timeout=300)
    assert process.returncode == 0
    assert f"({lines} lines could not be written)" in log.read_text()
    assert "kept" in log.read_text()


def test_reports_that_a_full_disk_does_not_take_are_an_error_in_words(small_disk: Path) -> None:
    fill(small_disk)
    report = begin_report("serve", "a run", datetime.now(UTC))
    with pytest.raises(ConfigError, match="the reports cannot be written there: No space left on device"):
        finish(report, BenchConfig(out=small_disk))


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
                async with httpx.AsyncClient(base_url=cluster.http_url, timeout=300.0) as http:
                    answer = await http.post("/v1/completions", json=body_of(ask(1)))
                    return answer.status_code == 200 and answer.json()["choices"][0]["token_ids"] == expected(ask(1))
            return False

        await waiting.until(serves, "it serves again")
        await cluster.idle_again()
