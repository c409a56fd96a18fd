"""A decode worker with ranks on two hosts, each a network namespace: two pipeline stages of the real model, KV of both from a
prefill worker on a third host. Then the other host is killed, and, after a new start, cut off."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.models.store import resolve_model
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.messages import ScheduledSeq
from diptych_tests.netns_hosts import COMMAND, MARKS, START_S, Hosts, running_hosts

pytestmark = MARKS
TOKENS = 6
PATIENT = ("--handshake-timeout-s", "60", "--leg-silence-s", "60")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with running_hosts(tmp_path, decodes=2) as running:
        yield running


def expected(prompt: list[int]) -> list[int]:
    """Of one process."""
    runner = TorchModelRunner.load(resolve_model("smollm2"), num_blocks=16, block_size=16, num_threads=1)
    params = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)
    blocks, tokens, found = list(range(16)), list(prompt), list[int]()
    start = 0
    while len(found) < TOKENS:
        [(token,)] = runner.execute([ScheduledSeq("a", tokens, start, (blocks,), True, params, len(found))]).token_ids
        start, tokens = start + len(tokens), [token]
        found.append(token)
    return found


class Group:
    """The decode worker and its other host."""

    def __init__(self, hosts: Hosts, wait_until: Callable[..., Any]) -> None:
        self._hosts, self._wait_until = hosts, wait_until
        self.master, self.other = hosts.decodes
        self.flags = (*PATIENT, "--pipeline-parallel-size", "2", "--nnodes", "2", "--master-addr", self.master)
        self.starts = 0

    def start_rank(self) -> None:
        self.starts += 1
        flags = ("--master-addr", self.master, "--node-rank", "1", "--insecure", "--secret-file")
        self._hosts.start(f"rank-{self.starts}", self.other, *COMMAND, "rank", *flags, str(self._hosts.secret_file))

    @property
    def rank(self) -> subprocess.Popen[bytes]:
        return self._hosts.processes[f"rank-{self.starts}"]

    def ended(self) -> None:
        """The worker was lost, and nothing of it is left on either host."""
        assert self._hosts.processes.pop("decode-0").wait(START_S) == 1, self._hosts.logs()
        assert self._hosts.processes.pop(f"rank-{self.starts}").wait(START_S) in (1, -signal.SIGKILL), (
            self._hosts.logs()
        )

        def left() -> list[str]:
            names = (self._hosts.namespace(address) for address in (self.master, self.other))
            return [pid for name in names for pid in self._pids(name)]

        self._wait_until(lambda: not left(), deadline_s=START_S, what="no process is left on the two hosts")

    @staticmethod
    def _pids(namespace: str) -> list[str]:
        return subprocess.run(
            ["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True
        ).stdout.split()


def test_23_a_worker_on_two_hosts_answers_and_ends_with_either(
    hosts: Hosts, cluster_module: Any, fresh_prompt: Callable[[int], list[int]]
) -> None:
    wait_until = cluster_module.wait_until
    group = Group(hosts, wait_until)
    prompt = fresh_prompt(150)
    want = expected(prompt)

    def answer() -> tuple[list[int], dict[str, Any]]:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        found = hosts.get("/v1/completions", body)
        return found["choices"][0]["token_ids"], found["diptych"]

    def serves() -> bool:
        return hosts.ready()

    group.start_rank()
    more = {"decode-0": group.flags, "prefill-0": PATIENT, "router": ("--local-prefill-max-tokens", "0")}
    hosts.start_all(more=more, without=("decode-1",))
    wait_until(serves, deadline_s=START_S, what="the hosts serve", every_s=0.5)
    ids, why = answer()
    assert ids == want
    assert why["kv_bytes"] > 0, "KV of both stages came from prefill"
    [worker] = [one for one in hosts.get("/status.json")["cluster"]["workers"] if one["role"] == "decode"]
    assert (worker["pipeline"], worker["nodes"]) == (2, 2)

    group.rank.send_signal(signal.SIGKILL)
    group.ended()

    group.start_rank()
    hosts.start_worker("decode-0", group.master, *group.flags)
    wait_until(lambda: serves() and decodes(hosts), deadline_s=START_S, what="they serve again", every_s=0.5)
    assert answer()[0] == want

    hosts.network.cut(3 + 2, off=True)  # 2 is the router's, 3 prefill's, 4 and 5 decode's
    group.ended()


def decodes(hosts: Hosts) -> bool:
    """A decode worker is used."""
    workers = hosts.get("/status.json")["cluster"]["workers"]
    return any(one["role"] == "decode" and one["state"] == "ready" and not one["why_not"] for one in workers)
