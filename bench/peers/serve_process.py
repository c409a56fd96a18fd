"""`diptych serve` as a child of the benchmark: router and worker in one process."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from diptych.cli.bench.cluster import RunningCluster
from diptych.cli.settings.merge import child_environment
from diptych.cli.temporary import temporary_folder
from diptych.cli.up.config import UpConfig
from diptych.cli.up.processes import free_port, spawn, tail
from diptych.cli.up.readiness import first_answer, is_ready
from diptych.common.errors import ConfigError

HOST = "127.0.0.1"
START_DEADLINE_S = 240.0
STOP_GRACE_S = 10.0


def command_of(model: Path, http_port: int, grpc_port: int, threads: int, more: Sequence[str]) -> list[str]:
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    return [
        sys.executable,
        "-P",
        "-m",
        "diptych.cli",
        "serve",
        "--model",
        str(model),
        *ports,
        "--threads",
        str(threads),
        *more,
    ]


@contextlib.contextmanager
def serving(model: Path, threads: int, more: Sequence[str]) -> Iterator[RunningCluster]:
    """Start it, wait for its first answer, stop it at the end. Call it on the main thread.

    Args: more: further flags of `diptych serve`.
    Raises: ConfigError when it does not start, with the tail of its log.
    """
    http_port, grpc_port = free_port(HOST), free_port(HOST)
    counts = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    with temporary_folder("diptych-serve-") as root:
        log = Path(root) / "serve.log"
        command = command_of(model, http_port, grpc_port, threads, more)
        process = spawn(command, log=log, env=child_environment(UpConfig) | counts, cwd=Path(root))
        url = f"http://{HOST}:{http_port}"
        try:
            until, why = time.monotonic() + START_DEADLINE_S, "not listening yet"
            while time.monotonic() < until and process.poll() is None:
                ready, why = is_ready(HOST, http_port)
                if ready:
                    break
                time.sleep(0.2)
            else:
                raise ConfigError("target", url, f"diptych serve does not answer: {why}\n{tail(log, 15)}")
            first_answer(HOST, http_port, timeout_s=60.0, both_pools=False)
            yield RunningCluster("serve", url, f"{HOST}:{grpc_port}", 1)
        finally:
            process.terminate()
            try:
                process.wait(STOP_GRACE_S)
            finally:
                process.kill()
