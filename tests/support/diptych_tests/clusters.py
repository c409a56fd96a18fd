"""A real cluster under test: `diptych up` as a child process, its parts by name, and questions to its workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx

from diptych.cli.up.processes import ProcessIdentity, free_port, require_free_port, spawn
from diptych.cli.up.run_folder import ChildState, ClusterState, RunFolder
from diptych.cli.worker_access import WorkerAccess
from diptych.client import AsyncClient, DiptychError
from diptych.common.compiled import LANES_VARIABLE
from diptych.common.errors import ConfigError
from diptych.common.secret import load_secret
from diptych.rpc.v1 import worker_pb2, worker_pb2_grpc
from diptych_tests import detached, waiting
from diptych_tests.detached import Detached
from diptych_tests.fork_server import ForkedProcess

wait_until = waiting.wait_until
START_DEADLINE_S = 600.0
RPC_S = 300.0
"""For an answer that takes milliseconds, on a machine of any speed."""
AGAIN_S = 240.0
"""Until a killed worker serves again."""
HELD_S, FREE_S = 300.0, 300.0
"""Until a held step is reached; until nothing is held any more, which takes a second on an idle machine."""
KV_BYTES_PER_TOKEN = 46_080
GATED_STEP_TOKENS = 128
"""The most that a step of the fixture `gated_cluster` takes."""
OF_USERS: frozenset[str] = frozenset()
"""Variables that were there before this run of the tests, as tests/conftest.py found them."""


@dataclass
class Cluster:
    process: subprocess.Popen[bytes]
    folder: RunFolder
    output: Path
    ended: bool = False
    """A test ended it itself and checked what was left."""

    @property
    def state(self) -> ClusterState:
        state = self.folder.read_state()
        assert state is not None
        return state

    @property
    def http_url(self) -> str:
        return self.state.http_url

    @property
    def grpc_address(self) -> str:
        return self.state.grpc_address

    @property
    def model(self) -> str:
        return self.state.model

    def child(self, name: str) -> ChildState:
        return next(child for child in self.state.children if child.name == name)

    def kill(self, name: str, signum: signal.Signals = signal.SIGKILL) -> ChildState:
        child = self.child(name)
        ProcessIdentity(child.pid, child.start_time).send(signum)
        return child

    def worker_channel(self, name: str) -> grpc.Channel:
        return WorkerAccess(secret=load_secret(Path(self.state.secret_file))).open(self.child(name).address)

    def audit(self, name: str, *, full: bool = True) -> worker_pb2.AuditResponse:
        """Worker.Audit of one worker; asserts that every law holds."""
        with self.worker_channel(name) as channel:
            answer = worker_pb2_grpc.WorkerStub(channel).Audit(worker_pb2.AuditRequest(full=full), timeout=RPC_S)
        assert not answer.violations, f"{name}: {list(answer.violations)}"
        return answer

    def info(self, name: str) -> worker_pb2.GetInfoResponse:
        with self.worker_channel(name) as channel:
            return worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=RPC_S)

    def stats(self, name: str) -> dict[str, float]:
        """Worker.GetStats of one worker, its engine's numbers: answered in the midst of a step, too."""
        with self.worker_channel(name) as channel:
            answer = worker_pb2_grpc.WorkerStub(channel).GetStats(worker_pb2.GetStatsRequest(), timeout=RPC_S)
        return dict(answer.engine)

    def idle(self, name: str) -> bool:
        """No attempt, no block held but by the prefix cache, every slab free."""
        answer = self.audit(name)
        return (
            sum(answer.attempts.values()) == 0
            and all(
                (blocks.running, blocks.reserved, blocks.free + blocks.cached) == (0, 0, blocks.total)
                for blocks in (answer.blocks, *answer.more_blocks)
            )
            and answer.slabs.free == answer.slabs.total
        )

    def workers(self) -> list[str]:
        return [child.name for child in self.state.children if child.role in ("prefill", "decode")]

    def wait_idle_of(self, name: str, *, deadline_s: float = FREE_S) -> float:
        """As wait_idle, also while a step is held, when no audit is answered before that one is given up, and while the worker is
        about to be started again."""

        def idle() -> bool:
            try:
                return self.idle(name)
            except (grpc.RpcError, StopIteration):
                return False

        return wait_until(idle, deadline_s=deadline_s, what=f"{name} is idle again")

    def wait_idle(self, *, deadline_s: float = FREE_S) -> float:
        return wait_until(
            lambda: all(self.idle(name) for name in self.workers()),
            deadline_s=deadline_s,
            what="workers are idle again",
        )

    def steps(self) -> dict[str, int]:
        return {name: self.audit(name, full=False).steps for name in self.workers()}

    async def serves_again(self, name: str, old_pid: int) -> None:
        """Until the supervisor has started a fresh process, and a request has used it."""
        rng = random.SystemRandom()
        async with AsyncClient(self.grpc_address, timeout_s=RPC_S) as client, asyncio.timeout(AGAIN_S):
            while True:
                prompt = [rng.randrange(1000, 40_000) for _ in range(100)]
                try:
                    answer = await client.generate(
                        token_ids=prompt, max_tokens=4, ignore_eos=True, explain=True, local_prefill_max_tokens=0
                    )
                    facts = answer.explanation
                    pids = (facts.prefill_pid, facts.decode_pid) if facts else ()
                    if old_pid not in pids and self.child(name).pid in pids and facts and not facts.local_prefill:
                        return
                except (DiptychError, StopIteration):
                    pass
                await asyncio.sleep(0.3)  # sleep: asks again, not all the time

    def log(self) -> str:
        return self.output.read_text(errors="replace")


def up_command(*flags: str) -> tuple[list[str], int, int]:
    """The command line of `diptych up` on free ports, and the ports."""
    http, rpc = free_port("127.0.0.1"), free_port("127.0.0.1")
    ports = ["--http-port", str(http), "--grpc-port", str(rpc)]
    return [sys.executable, "-P", "-m", "diptych.cli", "up", *ports, *flags], http, rpc


def environment(run_root: Path) -> dict[str, str]:
    """The environment of a user's shell for `diptych up`, with a separate run folder. See docs/testing.md."""
    # LANES_VARIABLE is set for a whole run at one vector width, see tests/hostile.py.
    names = {name for name in OF_USERS if name == LANES_VARIABLE or not name.startswith(("DIPTYCH_", "PYTEST_"))}
    return {name: value for name, value in os.environ.items() if name in names} | {"DIPTYCH_RUN_DIR": str(run_root)}


@dataclass(frozen=True)
class StepGates:
    """Holds steps of the workers of a cluster that was started with `flags`: see worker.step_gate."""

    folder: Path

    @property
    def flags(self) -> tuple[str, str]:
        # A held step must not count as stuck. Ranges are sent while a prompt is computed, whatever this machine's link
        # and speed.
        return "--worker-args", f"--fault-step-gates {self.folder} --stall-bound-s 3600 --kv-overlap on"

    def hold(self, cluster: Cluster, name: str, *, after_steps: int) -> None:
        """Let an idle worker take so many steps more; the next one waits."""
        steps = int(cluster.stats(name)["steps"]) + after_steps
        new = self.folder / f"{name}.new"
        new.write_text(str(steps), encoding="ascii")
        new.replace(self.folder / name)

    def held(self, name: str) -> bool:
        return (self.folder / f"{name}.held").exists()

    async def wait_held(self, name: str, request: asyncio.Future[object] | None = None) -> None:
        """Until a step waits; fails when the request that it serves ends before."""

        def held() -> bool:
            assert request is None or not request.done(), request
            return self.held(name)

        await waiting.until(held, f"a step of {name} waits", deadline_s=HELD_S, every_s=0.01)

    def open(self, name: str) -> None:
        """Release the step. No effect when none is held."""
        (self.folder / name).unlink(missing_ok=True)
        (self.folder / f"{name}.held").unlink(missing_ok=True)  # left by a process that was killed


@contextlib.contextmanager
def running_cluster(root: Path, *flags: str, extra_env: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Start, wait until it serves, and stop it by its pid; checks that nothing is left behind."""
    command, _, _ = up_command(*flags)
    output = root / "up.log"
    folder = RunFolder(root / "run")
    process = spawn(
        command, log=output, env=environment(folder.root) | dict(extra_env or {}), cwd=root
    )  # killed with this process, whatever ends it
    try:
        running = Cluster(process, folder, output)

        def ready() -> bool:
            assert process.poll() is None, f"diptych up ended with {process.returncode}:\n{running.log()[-6000:]}"
            state = folder.read_state()
            return state is not None and state.ready

        wait_until(ready, deadline_s=START_DEADLINE_S, what=f"the cluster serves\n{running.log()[-3000:]}")
        state = running.state
        yield running
        if running.ended:
            return
        state = running.state
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=RPC_S) == 143
        left = [child for child in state.children if ProcessIdentity(child.pid, child.start_time).alive()]
        assert not left, f"processes left behind: {left}"
        assert [path.name for path in folder.root.iterdir()] == ["logs"]
    finally:
        end(process)


@contextlib.contextmanager
def detached_cluster(root: Path, *flags: str) -> Iterator[Cluster]:
    """As running_cluster, by `up --detach`, whose output is in `root / "detach.log"`. Killed at the end if a test has not
    stopped it, and with this process, whatever ends it."""
    command, _, _ = up_command("--detach", *flags)
    folder, said = RunFolder(root / "run"), root / "detach.log"
    env = environment(folder.root)
    watcher, code = Detached(command, env, str(root), str(folder.root), str(said), START_DEADLINE_S).start()
    try:
        assert code == 0, said.read_text(errors="replace")[-6000:]
        yield Cluster(None, folder, folder.logs / "up.log")  # type: ignore[arg-type]
    finally:
        detached.end(watcher)


def end(process: ForkedProcess | subprocess.Popen[bytes], within_s: float = 20.0) -> None:
    """Send SIGTERM, then SIGKILL after `within_s`; no effect when it has ended."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=300.0)


@dataclass(frozen=True)
class Serving:
    """A `diptych serve` process under test."""

    process: subprocess.Popen[bytes]
    http_url: str
    grpc_address: str
    metrics_url: str
    output: Path

    def log(self) -> str:
        return self.output.read_text(errors="replace")


def free_port_pair(host: str) -> int:
    """A port that is free, like the one after it: for the hosts of a worker."""
    for _ in range(100):
        port = free_port(host)
        with contextlib.suppress(ConfigError):
            require_free_port("port", host, port + 1)
            return port
    raise AssertionError("no two ports in a row are free")


@contextlib.contextmanager
def running_serve(root: Path, *flags: str, extra_env: Mapping[str, str] | None = None) -> Iterator[Serving]:
    """One colocated process, until it is ready; ended by its pid if the test has not done so."""
    ports = {name: free_port("127.0.0.1") for name in ("http", "grpc", "metrics")}
    http, rpc, metrics = (f"127.0.0.1:{port}" for port in ports.values())
    command = [sys.executable, "-P", "-m", "diptych.cli", "serve"]
    command += [text for name, port in ports.items() for text in (f"--{name}-port", str(port))]
    env = environment(root / "run") | dict(extra_env or {})
    process = spawn([*command, *flags], log=root / "serve.log", env=env, cwd=root)
    serving = Serving(process, f"http://{http}", rpc, f"http://{metrics}/metrics", root / "serve.log")

    def ready() -> bool:
        assert process.poll() is None, serving.log()[-6000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{serving.http_url}/ready", timeout=RPC_S).status_code == 200
        return False

    try:
        wait_until(ready, deadline_s=START_DEADLINE_S, what="`diptych serve` is ready", every_s=0.1)
        yield serving
    finally:
        end(process)
