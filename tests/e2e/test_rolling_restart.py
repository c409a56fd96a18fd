"""Every process of a cluster is restarted in turn, under load: no request fails and every answer is the undisturbed one."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diptych.cli.up.processes import free_port, spawn

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
PROMPTS = [[1000 + 37 * n + i for i in range(70)] for n in range(4)]
NUM_TOKENS = 6
RESTART_S = 300.0


class Unreachable(Exception):
    """Connection refused; a load balancer would try the next router."""


def ask(url: str, prompt: list[int]) -> str:
    """The text of one answer. Raises: Unreachable before anything was sent; AssertionError when the request failed."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=150)
    try:
        connection.connect()
    except OSError as error:
        raise Unreachable from error
    try:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, f"HTTP {answer.status}: {text}"
        choice = json.loads(text)["choices"][0]
        assert choice["finish_reason"] == "length"
        return str(choice["text"])
    finally:
        connection.close()


def get(url: str, path: str) -> tuple[int, bytes]:
    """(status, body); status 0: connection refused."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=300.0)
    try:
        connection.request("GET", path)
        with connection.getresponse() as answer:
            return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def ready(url: str) -> bool:
    return get(url, "/ready")[0] == 200


class Load:
    """Threads that send requests without pause, to whichever router listens."""

    def __init__(self, urls: list[str], expected: dict[int, str], threads: int = 2) -> None:
        self.urls, self._expected = urls, expected
        self.answers, self.problems = 0, []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), name=f"load-{i}") for i in range(threads)]

    def _run(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            turn += 1
            which = turn % len(PROMPTS)
            try:
                text = self._try(PROMPTS[which], turn)
                if text != self._expected[which]:
                    self.problems.append(f"another text: {text!r}, not {self._expected[which]!r}")
                self.answers += 1
            except (AssertionError, OSError, http.client.HTTPException, ValueError) as error:
                self.problems.append(repr(error))

    def _try(self, prompt: list[int], turn: int) -> str:
        until = time.monotonic() + RESTART_S
        while True:
            for url in (self.urls[turn % 2], self.urls[(turn + 1) % 2]):
                try:
                    return ask(url, prompt)
                except Unreachable:
                    continue
            assert time.monotonic() < until, "no router listens"
            time.sleep(0.1)  # sleep: asks again, not all the time

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(200)


@contextmanager
def second_router(
    cluster, folder: Path, env: dict[str, str]
) -> Iterator[tuple[list[subprocess.Popen[bytes]], str, list[str]]]:
    """A second router of the cluster: (its process, its URL, its command line)."""
    port = free_port("127.0.0.1")
    command = [
        *(sys.executable, "-P", "-m", "diptych.cli", "router", "--model", model_folder(cluster)),
        *("--served-model-name", cluster.model, "--redis-url", cluster.state.redis_url),
        *("--secret-file", str(cluster.folder.secret), "--http-port", str(port)),
        *("--grpc-port", str(free_port("127.0.0.1"))),
    ]
    processes = [spawn(command, log=folder / "router-1.log", env=env, cwd=folder)]
    try:
        yield processes, f"http://127.0.0.1:{port}", command
    finally:
        processes[-1].terminate()
        processes[-1].wait(timeout=300.0)


def model_folder(cluster) -> str:
    import psutil

    arguments = psutil.Process(cluster.child("router").pid).cmdline()
    return arguments[arguments.index("--model") + 1]


def test_no_request_fails_while_every_process_is_restarted(cluster_module, tmp_path) -> None:
    flags = [
        *("--prefill-workers", "2", "--decode-workers", "2", "--num-blocks", "128", "--max-model-len", "512"),
        *("--worker-args", "--drain-s 120"),
    ]
    wait_until = cluster_module.wait_until
    with cluster_module.running_cluster(tmp_path, *flags) as cluster:
        env = cluster_module.environment(cluster.folder.root)
        with second_router(cluster, tmp_path, env) as (processes, other, command):
            wait_until(lambda: ready(other), deadline_s=RESTART_S, what="the second router serves")
            expected = {i: ask(cluster.http_url, prompt) for i, prompt in enumerate(PROMPTS)}
            with Load([cluster.http_url, other], expected) as load:
                for name in cluster.workers():
                    before, served = cluster.child(name), load.answers
                    cluster.kill(name, signal.SIGTERM)

                    def back(name: str = name, pid: int = before.pid) -> bool:
                        child = [c for c in cluster.state.children if c.name == name and c.pid != pid]
                        return bool(child) and usable(other, name, child[0].pid)

                    wait_until(back, deadline_s=RESTART_S, what=f"{name} is back\n{cluster.log()[-2000:]}", every_s=0.3)
                    wait_until(lambda n=served: load.answers >= n + 2, deadline_s=RESTART_S, what="answers still come")
                # One router, while the other serves: first the cluster's own, which its supervisor starts again ...
                pid = cluster.child("router").pid
                cluster.kill("router", signal.SIGTERM)
                wait_until(
                    lambda: (
                        cluster.child("router").pid != pid and ready(cluster.http_url) if has_router(cluster) else False
                    ),
                    deadline_s=RESTART_S,
                    what="the router is back",
                    every_s=0.3,
                )
                # ... then the second one.
                processes[-1].send_signal(signal.SIGTERM)
                assert processes[-1].wait(timeout=300.0) == 143
                processes.append(spawn(command, log=tmp_path / "router-1.log", env=env, cwd=tmp_path))
                wait_until(lambda: ready(other), deadline_s=RESTART_S, what="the second router is back", every_s=0.3)
                served = load.answers
                wait_until(lambda: load.answers >= served + 4, deadline_s=RESTART_S, what="answers still come")
            assert load.problems == []
            assert load.answers >= 14


def has_router(cluster) -> bool:
    return any(child.name == "router" for child in cluster.state.children)


def usable(url: str, name: str, pid: int) -> bool:
    """Whether a router places on this incarnation of a worker."""
    status, body = get(url, "/status.json")
    workers = json.loads(body)["cluster"]["workers"] if status == 200 else []
    return any(worker["id"] == name and worker["pid"] == pid and not worker["why_not"] for worker in workers)
