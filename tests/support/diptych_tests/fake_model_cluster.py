"""A cluster of separate processes: Redis, the shipped router, and shipped workers with a fake model (worker_process.py).

The model's tokens are a hash of its KV, so a wrong, lost or doubled block changes the answer. Nothing supervises the processes: a
test kills, stops and starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import psutil

from diptych.cli.up.embedded_redis import server_binary
from diptych.cli.up.processes import free_port
from diptych.cli.up.run_folder import ChildState, ClusterState, RunFolder
from diptych.client import AsyncClient, Completion
from diptych.common.clock import FakeClock
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.common.secret import create_secret
from diptych.engine.config import EngineConfig
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest, KvMode
from diptych.engine.offline import OfflineEngine
from diptych_tests import fork_server, pd, router_fleet, waiting
from diptych_tests.clusters import Cluster, StepGates, end
from diptych_tests.fault_proxy import FaultProxy, fault_proxy
from diptych_tests.fork_server import SUPPORT, ForkedProcess

LOOPBACK = "127.0.0.1"
SHOWN = "127.0.0.2"
"""Where workers behind a proxy are, for the others."""
VOCAB = 1000
BLOCK = 16
Prefix = Callable[[str], list[str]]
POISON = 999
"""A row that computes this token comes out bad, as NaN logits would (worker_process.py)."""
WORKER: dict[str, object] = {
    "block_size": BLOCK, "num_blocks": 256, "max_num_batched_tokens": 64, "max_step_time_s": 0.0, "mixed_step_time_s": 0.0,
    "transport": "ucx", "slab_bytes": 4096, "num_slabs": 8, "kv_overlap": "on", "insecure": True, "grammar_backend": "none",
    "slab_lease_s": 5.0, "read_base_s": 3.0, "drain_s": 10.0, "check_invariants": True,
}  # fmt: skip


class FakeModelCluster(Cluster):
    """See the module. `proxies` has those that were asked for, by the name of the process behind it: "redis", a worker's (its
    gRPC), and "NAME kv" (UCX of a prefill worker)."""

    def __init__(
        self,
        folder: Path,
        *,
        log: Path | None = None,
        model_folder: Path | None = None,
        prefix: Prefix | None = None,
        host: str = LOOPBACK,
        hosts: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(process=None, folder=RunFolder(folder / "run"), output=folder / "router.log")  # type: ignore[arg-type]
        self.host, self._hosts = host, hosts or {}
        self.root, self._log = folder, log
        self._prefix = prefix or (lambda name: [])
        self.gates = StepGates(folder / "gates")
        self.gates.folder.mkdir()
        self.proxies: dict[str, FaultProxy] = {}
        self.processes: dict[str, ForkedProcess | subprocess.Popen[bytes]] = {}
        self.commands: dict[str, list[str]] = {}
        """With which each process was started, and is started again."""
        self.redis_port = free_port(LOOPBACK)
        self._workers: dict[str, tuple[str, str]] = {}
        """Role and address, by name."""
        self._ports = (free_port(LOOPBACK), free_port(LOOPBACK))
        self._secret = folder / "secret"
        create_secret(self._secret)
        self.model_folder = model_folder or router_fleet.make_model_folder(folder / "tiny", VOCAB)
        # As of a user's shell, without this project's own variables.
        mine = ("DIPTYCH_", "PYTEST_")
        path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        self.env |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self._ports[0]}"

    @property
    def grpc_address(self) -> str:
        return f"{self.host}:{self._ports[1]}"

    @property
    def redis_url(self) -> str:
        """As router and workers have it."""
        port = self.proxies["redis"].port if "redis" in self.proxies else self.redis_port
        return f"redis://{self.host}:{port}/0"

    @property
    def state(self) -> ClusterState:
        children = [
            ChildState(name, role, process.pid, psutil.Process(process.pid).create_time(), address, "")
            for name, (role, address) in self._all().items()
            if (process := self.processes[name]).poll() is None
        ]
        return ClusterState(
            os.getpid(), 0.0, True, self.http_url, self.grpc_address, self.redis_url, "tiny", children,
            secret_file=str(self._secret),
        )  # fmt: skip

    def _all(self) -> Mapping[str, tuple[str, str]]:
        others = {name: (name, "") for name in self.processes if name not in self._workers}
        return {**others, **self._workers}

    def log(self) -> str:
        return "\n".join(f"--- {p.stem}\n{p.read_text(errors='replace')[-2500:]}" for p in self.root.glob("*.log"))

    # ---- processes ----

    def start(self, name: str, command: list[str] | None = None) -> None:
        """Start a process, or start it again as it was."""
        self.commands[name] = [*self._prefix(name), *command] if command else self.commands[name]
        with (self._log or self.root / f"{name}.log").open("ab", buffering=0) as output:
            self.processes[name] = fork_server.start(
                self.commands[name], env=self.env, cwd=self.root, stdout=output, stderr=output, new_session=True
            )

    def start_redis(self) -> None:
        command = [str(server_binary()), "--port", str(self.redis_port), "--bind", self.host]
        self.start(
            "redis", [*command, "--protected-mode", "no", "--save", "", "--appendonly", "no", "--daemonize", "no"]
        )

    def start_router(self, **settings: object) -> None:
        given = {
            "http_port": self._ports[0], "grpc_port": self._ports[1], "redis_url": self.redis_url,
            "model": self.model_folder, "secret_file": self._secret, "local_prefill_max_tokens": 0, "host": self.host,
        } | settings  # fmt: skip
        flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        self.start("router", [sys.executable, "-P", "-m", "diptych.cli", "router", "--insecure", *flags])

    def worker_command(self, name: str, role: str, port: int, **settings: object) -> list[str]:
        given = WORKER | {
            "role": role, "worker_id": name, "port": port, "host": self._hosts.get(name, self.host),
            "model": str(self.model_folder),
            "redis_url": self.redis_url, "secret_file": str(self._secret), "fault_step_gates": str(self.gates.folder),
            "stall_bound_s": 3600.0,
        } | settings  # fmt: skip
        return [sys.executable, "-P", "-m", "diptych_tests.worker_process", json.dumps(given)]

    async def add_worker(
        self,
        name: str,
        role: str,
        stack: AsyncExitStack,
        *,
        proxied: bool = False,
        kv_proxied: bool = False,
        **settings: Any,
    ) -> None:
        fake = dict(settings.pop("fake", {}))
        port = free_port(LOOPBACK)
        address = f"{self._hosts.get(name, self.host)}:{port}"
        if proxied:
            self.proxies[name] = await stack.enter_async_context(
                fault_proxy(lambda: (LOOPBACK, port), host=SHOWN, port=port)
            )
            settings["advertise_host"] = SHOWN
            address = f"{SHOWN}:{port}"
        if kv_proxied:
            file = self.root / f"{name}.kv"
            proxy = await stack.enter_async_context(fault_proxy(lambda: (LOOPBACK, int(file.read_text()))))
            self.proxies[f"{name} kv"] = proxy
            fake["kv_proxy"] = [str(file), proxy.port]
        self._workers[name] = (role, address)
        self.start(name, self.worker_command(name, role, port, fake=fake, **settings))

    async def hold(self, name: str, *, after_steps: int) -> None:
        """See StepGates. On a thread: the worker may be behind a proxy of this loop."""
        await asyncio.to_thread(self.gates.hold, self, name, after_steps=after_steps)

    def freeze(self, name: str) -> None:
        """SIGSTOP, and wait until every thread is stopped."""
        pid = self.processes[name].pid
        os.kill(pid, signal.SIGSTOP)

        def stopped() -> bool:
            tasks = Path(f"/proc/{pid}/task").iterdir()
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] in "Tt" for task in tasks)

        waiting.wait_until(stopped, what=f"{name} is stopped", every_s=0.001)

    def thaw(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGCONT)

    def kill_hard(self, name: str) -> None:
        """kill -9, and wait until it is gone."""
        self.processes[name].kill()
        self.processes[name].wait(300)

    async def close(self) -> None:
        for name in self._workers:
            self.gates.open(name)
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes.values():
            await asyncio.to_thread(end, process)

    # ---- what the router says ----

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.http_url, timeout=300.0) as http:
            return await http.get(path)

    async def status(self) -> dict[str, Any]:
        return (await self.get("/status.json")).json()

    async def usable(self) -> set[str]:
        """Workers on which the router places; empty while it does not answer."""
        pids = {self.processes[name].pid for name in self._workers}
        with contextlib.suppress(httpx.TransportError, TypeError, KeyError):
            workers = (await self.status())["cluster"]["workers"]
            return {worker["id"] for worker in workers if not worker["why_not"] and worker["pid"] in pids}
        return set()

    async def until_usable(self, *names: str, deadline_s: float = waiting.DEADLINE_S) -> None:
        """Until the router places on these workers (none: on all), and on no other one."""
        wanted = set(names or self._workers)

        async def as_wanted() -> bool:
            ended = [name for name in wanted if self.processes[name].poll() is not None]
            assert not ended, f"{ended} ended\n{self.log()}"
            return await self.usable() == wanted

        try:
            await waiting.until(as_wanted, f"{wanted} are used", deadline_s=deadline_s, every_s=0.1)
        except TimeoutError as error:
            raise AssertionError(f"{error}: {await self.usable()}\n{self.log()}") from None

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of the router's series of this name with these labels; 0 where there is none."""
        total = 0.0
        for line in (await self.get("/metrics")).text.splitlines():
            series, _, value = line.rpartition(" ")
            bare, _, rest = series.partition("{")
            if bare == name and all(f'{key}="{given}"' in rest for key, given in labels.items()):
                total += float(value)
        return total

    async def idle_again(self, *names: str, deadline_s: float = waiting.DEADLINE_S) -> float:
        """Seconds until these workers (none: all that run) hold nothing; their laws hold."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for name in names or self.workers():
            left = deadline_s - (loop.time() - began)
            await asyncio.to_thread(self.wait_idle_of, name, deadline_s=left)
        return loop.time() - began

    def client(self, timeout_s: float = 120.0) -> AsyncClient:
        return AsyncClient(self.grpc_address, timeout_s=timeout_s)


def ask(number: int = 0, *, num_prompt: int = 150, max_tokens: int = 20, **more: Any) -> dict[str, Any]:
    """A request over the SDK; no two numbers share a prefix."""
    rng = random.Random(number)
    return {
        "token_ids": [rng.randrange(3, POISON) for _ in range(num_prompt)], "max_tokens": max_tokens, "temperature": 1.0,
        "seed": number, "ignore_eos": True, "explain": True,
    } | more  # fmt: skip


def body_of(asked: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The same request as a body of /v1/completions, with the ids in the answer."""
    plain = {name: value for name, value in asked.items() if name not in ("token_ids", "explain")}
    return plain | {"prompt": asked["token_ids"], "return_token_ids": True} | more


def expected(asked: Mapping[str, Any], **fake: Any) -> list[int]:
    """What one undisturbed engine answers. `fake`: of the workers."""
    model = pd.fake_model(num_blocks=256, **fake)
    engine = OfflineEngine(LocalExecutor(model.runner), EngineConfig(num_blocks=256), model.identity, clock=FakeClock())
    names = {field.name for field in fields(SamplingParams)}
    sampling = SamplingParams(**{name: value for name, value in asked.items() if name in names})
    request = EngineRequest("a", Prompt(tuple(asked["token_ids"])), sampling, mode=KvMode.LOCAL)
    return engine.generate([request])[0].token_ids


def check(answer: Completion, asked: Mapping[str, Any], **fake: Any) -> None:
    """The answer is whole, the undisturbed one, and counted once."""
    tokens = expected(asked, **fake)
    assert list(answer.token_ids) == tokens
    assert answer.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(asked["token_ids"]), len(tokens))


@asynccontextmanager
async def fake_model_cluster(
    folder: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    proxied: tuple[str, ...] = (),
    router: Mapping[str, object] | None = None,
    log: Path | None = None,
    model_folder: Path | None = None,
    prefix: Prefix | None = None,
    host: str = LOOPBACK,
    hosts: Mapping[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[FakeModelCluster]:
    """Runs until the block ends; ready at its begin.

    Args:
        proxied: in front of what there are proxies, see FakeModelCluster.
        router: settings of the router.
        log: one file for the output of all processes; None: one each.
        model_folder: with a tokenizer; None: one of 1,000 words, and a context of 512.
        prefix: what stands in front of the command of a process, by its name; it has to exec the command.
        host: address of Redis and the router.
        hosts: addresses of workers that are elsewhere, by name.
        settings: of every worker; those of one by its name with an underscore, as `decode_0={...}`.
    """
    own = {name.replace("_", "-"): settings.pop(name) for name in [*settings] if name[-1].isdigit()}
    cluster = FakeModelCluster(folder, log=log, model_folder=model_folder, prefix=prefix, host=host, hosts=hosts)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(cluster.close)
        cluster.start_redis()
        if "redis" in proxied:
            cluster.proxies["redis"] = await stack.enter_async_context(
                fault_proxy(lambda: (LOOPBACK, cluster.redis_port))
            )
        for role, count in (("prefill", prefill), ("decode", decode)):
            for name in (f"{role}-{i}" for i in range(count)):
                await cluster.add_worker(
                    name, role, stack,
                    proxied=name in proxied, kv_proxied=f"{name} kv" in proxied, **(settings | own.get(name, {})),
                )  # fmt: skip
        cluster.start_router(**(router or {}))
        await cluster.until_usable()
        yield cluster
