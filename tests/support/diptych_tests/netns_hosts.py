"""The topology of compose.yaml on hosts without containers: router and Redis, prefill, and each decode worker in a network
namespace of its own behind one bridge. Real processes, the real model, KV over UCX."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.models.store import resolve_model
from diptych.cli.up.embedded_redis import server_binary
from diptych.cli.up.processes import spawn
from diptych.common.secret import create_secret

MARKS = [
    pytest.mark.multiproc,
    pytest.mark.netns,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
START_S = 240.0
COMMAND = (sys.executable, "-P", "-m", "diptych.cli")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Network:
    """A bridge, and hosts behind it. Host number n has the address `self.address(n)`, this side number 1."""

    def __init__(self, stack: ExitStack) -> None:
        self._number = 1 + os.getpid() % 250
        self.bridge = f"dpb{self._number:x}"
        self._stack = stack
        ip("link", "add", self.bridge, "type", "bridge")
        stack.callback(ip, "link", "del", self.bridge)
        ip("addr", "add", f"{self.address(1)}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def address(self, host: int) -> str:
        return f"10.213.{self._number}.{host}"

    def cut(self, host: int, *, off: bool) -> None:
        """Take the host's cable out, or put it back."""
        ip("link", "set", f"{self.bridge}h{host}o", "down" if off else "up")

    def add_host(self, number: int) -> str:
        """A namespace with one interface. Returns its name."""
        name = f"{self.bridge}h{number}"
        ip("netns", "add", name)
        self._stack.callback(ip, "netns", "del", name)
        ip("link", "add", f"{name}o", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", f"{name}o", "master", self.bridge)
        ip("link", "set", f"{name}o", "up")
        ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        return name


class Hosts:
    """Processes of the hosts, by name: redis and router, prefill-0, decode-0, ... The hosts' numbers are 2, 3, 4, ..."""

    def __init__(self, network: Network, stack: ExitStack, folder: Path, decodes: int) -> None:
        self.router, self.prefill, *self.decodes = (network.address(n) for n in range(2, 4 + decodes))
        addresses = (self.router, self.prefill, *self.decodes)
        self._names = {address: network.add_host(n) for n, address in enumerate(addresses, 2)}
        self.network = network
        self._stack, self._folder = stack, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.secret_file = folder / "secret"
        self.secret = create_secret(self.secret_file)
        env = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
        self._env = env | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}

    def start(self, name: str, address: str, *command: str) -> None:
        """`ip netns exec` execs the command, so the pid is the command's."""
        log = self._folder / f"{name}.log"
        inside = ["ip", "netns", "exec", self._names[address], *command]
        process = spawn(inside, log=log, env=self._env, cwd=self._folder)
        self.processes[name] = process
        self._stack.callback(self.stop, process)

    @staticmethod
    def stop(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(timeout=300.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=300)

    def namespace(self, address: str) -> str:
        """Of the host with this address."""
        return self._names[address]

    def start_all(self, *, more: Mapping[str, Sequence[str]] | None = None, without: Container[str] = ()) -> None:
        """Args: more: flags of workers and of the router, by name. without: names of workers that are not started."""
        redis = [str(server_binary()), "--bind", self.router, "--port", "6379", "--protected-mode", "no"]
        self.start("redis", self.router, *redis, "--save", "", "--appendonly", "no")
        model = str(resolve_model("smollm2"))
        self._common = ["--model", model, "--redis-url", f"redis://{self.router}:6379/0", "--insecure"]
        self._common += ["--secret-file", str(self.secret_file), "--max-model-len", "1024"]
        workers = [("prefill", 0, self.prefill), *(("decode", i, address) for i, address in enumerate(self.decodes))]
        for role, number, address in workers:
            if (name := f"{role}-{number}") not in without:
                self.start_worker(name, address, *(more or {}).get(name, ()))
        ports = ["--host", self.router, "--http-port", "8000", "--grpc-port", "50050"]
        self.start("router", self.router, *COMMAND, "router", *self._common, *ports, *(more or {}).get("router", ()))

    def start_worker(self, name: str, address: str, *flags: str) -> None:
        """Args: name: role-number."""
        own = ["--worker-id", name, "--host", address, "--port", "50051", "--num-blocks", "128"]
        own += ["--transport", "ucx", "--require-transport", "ucx:tcp", "--threads", "1", "--drain-s", "1"]
        self.start(name, address, *COMMAND, name.partition("-")[0], *self._common, *own, *flags)

    def logs(self) -> str:
        tails = {path.stem: path.read_text(errors="replace")[-1500:] for path in self._folder.glob("*.log")}
        return "\n".join(f"--- {name}\n{text}" for name, text in tails.items())

    def get(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "x-diptych-explain": "1"}
        request = urllib.request.Request(f"http://{self.router}:8000{path}", data, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=300) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def ready(self) -> bool:
        ended = {name: process.returncode for name, process in self.processes.items() if process.poll() is not None}
        assert not ended, f"ended: {ended}\n{self.logs()}"
        try:
            return bool(self.get("/ready")["ready"])
        except OSError:
            return False

    def ask(self, prompt: list[int]) -> tuple[str, dict[str, Any]]:
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = self.get("/v1/completions", body)
        assert answer["choices"][0]["finish_reason"] == "length"
        return answer["choices"][0]["text"], answer["diptych"]


@contextlib.contextmanager
def running_hosts(folder: Path, *, decodes: int = 1) -> Iterator[Hosts]:
    """The hosts, without processes. Skips the test where there are no network namespaces."""
    with ExitStack() as stack:
        try:
            hosts = Hosts(Network(stack), stack, folder, decodes)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield hosts
