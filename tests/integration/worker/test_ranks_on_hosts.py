"""A worker with ranks on two hosts, which are loopback addresses: a model, `diptych rank` as the other host, sums over TCP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from diptych.common import child
from diptych.common.errors import ConfigError
from diptych.common.sampling import SamplingParams
from diptych.engine.executor import ExecutorLost
from diptych.engine.messages import ScheduledSeq
from diptych.engine.ranks.executor import RanksExecutor
from diptych.worker.model import LoadedModel, load_model
from diptych_tests.clusters import free_port_pair
from diptych_tests.pd import SECRET_FILE, worker_config
from diptych_tests.quantized import write_llama
from diptych_tests.waiting import wait_until

pytestmark = pytest.mark.multiproc
MASTER, OTHER = "127.0.0.2", "127.0.0.3"
GREEDY = SamplingParams(9, temperature=0.0, ignore_eos=True)
PROMPT = list(range(40, 80))


def settings_of(folder: Path) -> dict[str, Any]:
    return {"model": str(folder), "num_blocks": 16, "secret_file": str(SECRET_FILE), "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_llama(tmp_path_factory.mktemp("hosts") / "model")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@dataclass
class OtherHost:
    """`diptych rank`, and where it joins."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def worker(self, folder: Path, **more: Any) -> LoadedModel:
        where = {
            "nnodes": 2,
            "master_addr": MASTER,
            "master_port": self.port,
            "join_timeout_s": 240.0,
            "rank_silence_s": 240.0,
        }
        return load_model(worker_config("prefill", "p", **settings_of(folder), **where, **more))

    @property
    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def other_host(tmp_path: Path) -> Iterator[Callable[..., OtherHost]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*flags: str) -> OtherHost:
        port, log = free_port_pair(MASTER), tmp_path / "rank.log"
        usual = {"MASTER_ADDR": MASTER, "MASTER_PORT": str(port), "NODE_RANK": "1", "NNODES": "2"}
        command = [
            sys.executable,
            "-P",
            "-m",
            "diptych.cli",
            "rank",
            "--host",
            OTHER,
            "--secret-file",
            str(SECRET_FILE),
        ]
        with log.open("wb") as stderr:
            started.append(child.start([*command, *flags], env=os.environ | usual, stderr=stderr))
        return OtherHost(port, started[-1], log)

    yield start
    for process in started:
        process.kill()
        process.wait()


def step(tokens: list[int], start: int, blocks: list[int]) -> list[ScheduledSeq]:
    return [ScheduledSeq("a", tokens, start, (blocks,), True, GREEDY, 0)]


def never() -> bool:
    return False


def test_23_a_model_on_two_hosts_gives_the_ids_of_one_until_the_other_host_ends(
    folder: Path, other_host: Callable[..., OtherHost]
) -> None:
    one = load_model(worker_config("prefill", "p", **settings_of(folder))).runner
    other = other_host()
    loaded = other.worker(folder, tensor_parallel_size=2)
    executor = loaded.executor
    assert executor is not None
    try:
        assert [part.num_layers for part in loaded.compat.kv_parts] == [2, 2]
        runner: Any = one
        assert executor.execute(step(PROMPT, 0, [3, 5, 7]), never) == runner.execute(step(PROMPT, 0, [3, 5, 7]))
        buffers = []
        for part, kv in enumerate(loaded.compat.kv_parts):  # the KV of both hosts comes here, and goes back
            buffers.append(memoryview(bytearray(kv.bytes_per_token * len(PROMPT))))
            executor.pack([3, 5, 7], len(PROMPT), buffers[-1], part=part)
            assert any(buffers[-1])
            executor.unpack([8, 9, 10], len(PROMPT), buffers[-1], part=part)
        for blocks in ([3, 5, 7], [8, 9, 10]):
            assert executor.execute(step([7], 40, blocks), never) == runner.execute(step([7], 40, [3, 5, 7]))

        assert isinstance(executor, RanksExecutor)
        own = [psutil.Process(rank.process.pid) for rank in executor._started()]
        ranks = other.ranks
        assert (len(own), len(ranks)) == (1, 1)
        listening = [one.laddr for rank in own for one in rank.net_connections() if one.status == "LISTEN"]
        assert {address.ip for address in listening} == {MASTER}, "and those of the worker's ranks on the master's"
        assert other.port + 1 in {address.port for address in listening}
        assert {tuple(one.laddr) for one in ranks[0].net_connections() if one.status == "LISTEN"} <= {
            (OTHER, one.laddr.port) for one in ranks[0].net_connections()
        }, "its listeners are on the address that was named"
        other.process.send_signal(signal.SIGKILL)
        reasons: list[str] = []
        executor.on_lost(reasons.append)
        wait_until(lambda: bool(reasons), what="the worker noticed it")
        with pytest.raises(ExecutorLost):
            executor.execute(step([7], 41, [3, 5, 7]), never)
        wait_until(lambda: not any(one.is_running() for one in ranks), what="its ranks have ended with it")
        assert not any(one.is_running() for one in own)
    finally:
        executor.close()


@pytest.mark.slow
def test_23_stages_on_two_hosts_and_the_end_of_one_rank(folder: Path, other_host: Callable[..., OtherHost]) -> None:
    one: Any = load_model(worker_config("prefill", "p", **settings_of(folder))).runner
    other = other_host()
    executor = other.worker(folder, tensor_parallel_size=2, pipeline_parallel_size=2).executor
    assert executor is not None
    try:
        assert executor.execute(step(PROMPT, 0, [3, 5, 7]), never) == one.execute(step(PROMPT, 0, [3, 5, 7]))
        ranks = other.ranks
        assert len(ranks) == 2
        ranks[1].send_signal(signal.SIGKILL)
        reasons: list[str] = []
        executor.on_lost(reasons.append)
        wait_until(lambda: bool(reasons), what="the worker noticed it")
        with pytest.raises(ExecutorLost):
            executor.execute(step([7], 40, [3, 5, 7]), never)
        assert other.process.wait(240.0) == 1
        wait_until(lambda: not any(one.is_running() for one in ranks), what="the other rank of that host has ended")
    finally:
        executor.close()


@pytest.mark.slow
def test_23_a_host_with_another_model_is_found_at_the_start(
    folder: Path, tmp_path: Path, other_host: Callable[..., OtherHost]
) -> None:
    changed = write_llama(tmp_path / "changed")
    (changed / "tokenizer.json").write_text("{}")
    raw = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(raw | {"rope_theta": 20_000.0}))
    other = other_host("--model", str(changed))
    with pytest.raises(ConfigError, match=r"of node 1 \(127.0.0.1\) has other content than this worker's"):
        other.worker(folder, tensor_parallel_size=2)
    assert other.process.wait(240.0) == 1
    assert "has other content than the worker's folder" in other.log.read_text()
