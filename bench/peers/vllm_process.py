"""vLLM on the CPU as a child of the benchmark, from a separate environment (`bench/peers/setup_vllm_cpu.sh`).

    pd          one prefill and one decode instance over NIXL, a core each, behind vllm-router
    colocated   one instance with all cores
    serve       the same

The settings are those of vLLM's documentation for CPUs, at our precision (float32, or the dtype chosen), and the
recipe of its NIXL connector for the KV buffer in host memory. Two changes favour vLLM, which would starve on two
cores without them: NIXL's progress thread sleeps half a millisecond between polls (by the set-up script; it spins by
default), and all threads of an instance are moved back to its cores after the start (the connector moves the compute
thread to the machine's last core, for both instances).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from diptych.cli.temporary import temporary_folder
from diptych.cli.up.processes import free_port, spawn, tail
from diptych.common.errors import ConfigError

HOST = "127.0.0.1"
START_DEADLINE_S = 300.0
STOP_GRACE_S = 10.0
MODES = ("pd", "colocated", "serve")
PACKAGES = ("vllm-cpu", "vllm-router", "nixl", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class VllmChoice:
    """The vLLM processes to start.

    Args:
        environment: folder of the virtual environment.
        model: folder of the model.
        mode: pd, colocated or serve.
        dtype: of weights, computation and KV.
        max_num_seqs: of each instance.
        max_model_len: of each instance.
        kv_gib: host memory for the KV of each instance.
        more: further flags of `vllm serve`, as one string.
    """

    environment: Path
    model: Path
    mode: str = "pd"
    dtype: str = "float32"
    max_num_seqs: int = 64
    max_model_len: int = 2048
    kv_gib: int = 1
    more: str = "--enforce-eager"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError("mode", self.mode, f"must be one of {', '.join(MODES)}")
        if not (self.environment / "bin" / "vllm").is_file():
            rule = "holds no vllm: make it with bench/peers/setup_vllm_cpu.sh"
            raise ConfigError("environment", str(self.environment), rule)

    @property
    def flags(self) -> list[str]:
        """Flags of `vllm serve`, without model, address and connector."""
        sizes = f"--dtype {self.dtype} --max-model-len {self.max_model_len} --max-num-seqs {self.max_num_seqs}"
        return shlex.split(f"{sizes} {self.more}")

    def versions(self) -> dict[str, str]:
        """Versions of the relevant packages in that environment."""
        script = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
        done = subprocess.run(
            [str(self.environment / "bin" / "python"), "-c", script, *PACKAGES],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        found: dict[str, str] = json.loads(done.stdout)
        return found


@dataclass(slots=True)
class VllmServer:
    """Running processes. `pause` and `resume` stop all of them: an idle instance with NIXL polls on its core, which the
    other side of a comparison needs."""

    label: str
    url: str
    processes: list[subprocess.Popen[bytes]]
    logs: Path
    command_lines: list[str] = field(default_factory=list)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Raises: ConfigError when it no longer answers."""
        self._signal(signal.SIGCONT)
        _wait(self, self.url + "/v1/models", 30.0)

    def stop(self) -> None:
        """Stop in reverse order; the rest of a process's session is killed."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        until = time.monotonic() + STOP_GRACE_S
        for process in reversed(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.1, until - time.monotonic()))
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=10)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the whole session of each process: vLLM's engine is a child of its server."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


@contextlib.contextmanager
def running(choice: VllmChoice) -> Iterator[VllmServer]:
    """Start it, wait for its first token, stop it at the end. Call it on the main thread. Raises: ConfigError when it
    does not start, with the tail of the failing log."""
    with temporary_folder("diptych-vllm-") as root:
        server = VllmServer(f"vLLM {choice.mode}", "", [], Path(root))
        try:
            (_start_pd if choice.mode == "pd" else _start_colocated)(choice, server)
            _first_answer(server)
            yield server
        finally:
            server.stop()


def _start_colocated(choice: VllmChoice, server: VllmServer) -> None:
    cores = sorted(os.sched_getaffinity(0))
    server.url = _instance(choice, server, "vllm", cores, [])
    _wait(server, server.url + "/health", START_DEADLINE_S)


def _start_pd(choice: VllmChoice, server: VllmServer) -> None:
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    urls: dict[str, str] = {}
    for name, share in (("prefill", cores[:half]), ("decode", cores[half:] or cores)):
        urls[name] = _instance(choice, server, name, share, ["--kv-transfer-config", json.dumps(connector)])
    for url in urls.values():
        _wait(server, url + "/health", START_DEADLINE_S)
    for process, share in zip(server.processes, (cores[:half], cores[half:] or cores), strict=True):
        put_on_cores(process.pid, share)
    port = free_port(HOST)
    server.url = f"http://{HOST}:{port}"
    flags = f"--host {HOST} --port {port} --vllm-pd-disaggregation --policy round_robin"
    pools = ["--prefill", urls["prefill"], "--decode", urls["decode"]]
    metrics = ["--prometheus-port", str(free_port(HOST))]
    _spawn(choice, server, "router", ["vllm-router", *shlex.split(flags), *pools, *metrics], {})
    _wait(server, server.url + "/v1/models", 60.0)


def put_on_cores(session: int, cores: Sequence[int]) -> None:
    """Move every thread of every process of that session to `cores`."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session:
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, cores)


def _instance(choice: VllmChoice, server: VllmServer, name: str, cores: Sequence[int], more: list[str]) -> str:
    port = free_port(HOST)
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(choice.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_HOST_IP": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(HOST)),
    }
    command = ["vllm", "serve", str(choice.model), "--host", HOST, "--port", str(port), *choice.flags, *more]
    _spawn(choice, server, name, command, env)
    return f"http://{HOST}:{port}"


def _spawn(choice: VllmChoice, server: VllmServer, name: str, command: list[str], env: dict[str, str]) -> None:
    binaries = choice.environment / "bin"
    base = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VLLM", "OMP_"))}
    base |= {"PATH": f"{binaries}:{base.get('PATH', '')}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | env
    server.command_lines.append(shlex.join([*(f"{key}={value}" for key, value in env.items()), *command]))
    full = [str(binaries / command[0]), *command[1:]]
    server.processes.append(spawn(full, log=server.logs / f"{name}.log", env=base, cwd=server.logs))


def _wait(server: VllmServer, url: str, deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    said = "not listening yet"
    while time.monotonic() < until:
        if any(process.poll() is not None for process in server.processes):
            break
        try:
            answer = httpx.get(url, timeout=5.0)
            if answer.status_code == 200:
                return
            said = f"HTTP {answer.status_code}"
        except httpx.HTTPError as error:
            said = str(error) or type(error).__name__
        time.sleep(0.2)
    raise ConfigError("environment", url, f"vLLM does not answer: {said}\n{_logs(server)}")


def _first_answer(server: VllmServer) -> None:
    """A whole answer through all its parts. Raises: ConfigError."""
    try:
        model = httpx.get(server.url + "/v1/models", timeout=10.0).json()["data"][0]["id"]
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=120.0)
        answer.raise_for_status()
        if not answer.json()["choices"][0]["text"]:
            raise ValueError("an empty answer")
    except (httpx.HTTPError, LookupError, ValueError) as error:
        raise ConfigError("environment", server.url, f"no first answer: {error}\n{_logs(server)}") from None


def _logs(server: VllmServer) -> str:
    return "\n".join(f"{path.name}:\n{tail(path, 12)}" for path in sorted(server.logs.glob("*.log")))
