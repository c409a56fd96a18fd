"""Clusters that the benchmark starts on this machine: P/D, and the colocated baseline with as many workers.

The baseline is the same code without a prefill pool: every decode worker computes its own prompts, so prefill and
decode share a worker as in a colocated server. Its router serves but never becomes ready (readiness requires a pair).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.cli.bench.config import ClusterChoice
from diptych.cli.models.store import resolve_model
from diptych.cli.progress import progress_on
from diptych.cli.settings.merge import child_environment
from diptych.cli.temporary import temporary_folder
from diptych.cli.up import embedded_redis
from diptych.cli.up.cluster_plan import ClusterPlan
from diptych.cli.up.config import UpConfig
from diptych.cli.up.processes import free_port, tail
from diptych.cli.up.readiness import first_answer, is_ready
from diptych.cli.up.run_folder import RunFolder
from diptych.cli.up.supervisor import Supervisor, exit_reason
from diptych.common.errors import ConfigError

START_DEADLINE_S = 240.0
STOP_GRACE_S = 4.0


@dataclass(frozen=True, slots=True)
class RunningCluster:
    label: str
    http_url: str
    grpc_address: str
    workers: int


@contextlib.contextmanager
def running(choice: ClusterChoice, *, colocated: bool) -> Iterator[RunningCluster]:
    """Start one cluster, wait for its first token, stop it at the end. Call it on the main thread. Raises: ConfigError
    when it does not start, with the tail of the failing log."""
    with progress_on() as progress:
        model = resolve_model(choice.serve_model, progress)
    config = UpConfig(
        http_port=free_port("127.0.0.1"),
        grpc_port=free_port("127.0.0.1"),
        prefill_workers=1 if colocated else choice.prefill_workers,
        decode_workers=choice.num_workers if colocated else choice.decode_workers,
        threads_per_worker=choice.threads,
        worker_args=choice.cluster_args,
    )
    label = f"colocated {choice.num_workers}" if colocated else f"P/D {choice.prefill_workers}+{choice.decode_workers}"
    with temporary_folder("diptych-bench-") as root:
        folder = RunFolder(Path(root))
        folder.logs.mkdir()
        threads = str(choice.threads)
        env = child_environment(UpConfig) | {
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        supervisor = Supervisor(env, cwd=folder.root)
        plan = ClusterPlan(config, folder, model, model.name, choice.threads)
        try:
            _start(plan, supervisor, colocated)
            yield RunningCluster(label, plan.http_url, plan.grpc_address, choice.num_workers)
        finally:
            supervisor.stop(grace_s=STOP_GRACE_S)


def _start(plan: ClusterPlan, supervisor: Supervisor, colocated: bool) -> None:
    plan.make_secret()
    redis = supervisor.start(plan.redis_spec())
    if not embedded_redis.wait_ready(redis.process, plan.folder.redis_socket, deadline_s=10.0):
        raise ConfigError("redis", str(plan.folder.redis_socket), "the embedded redis does not answer")
    for spec in (*plan.worker_specs(), plan.router_spec()):
        if not (colocated and spec.role == "prefill"):
            supervisor.start(spec)
    until = time.monotonic() + START_DEADLINE_S
    why = "not listening yet"
    while time.monotonic() < until:
        for child in supervisor.dead():
            log = tail(child.spec.log, 15)
            raise ConfigError(child.spec.name, exit_reason(child.process.returncode), f"exited during start-up:\n{log}")
        ready, why = is_ready(plan.probe_host, plan.config.http_port)
        if ready or (colocated and _serves(why)):
            try:
                answer = first_answer(plan.probe_host, plan.config.http_port, timeout_s=60.0, both_pools=not colocated)
                missing = {spec.name for spec in plan.worker_specs() if spec.name in supervisor.children}
                missing -= _seen(answer.explanation)
                if not missing:
                    return
                why = f"not in the router's view yet: {', '.join(sorted(missing))}"
            except (OSError, RuntimeError, ValueError, LookupError) as error:
                why = str(error)
        time.sleep(0.2)
    raise ConfigError("target", plan.http_url, f"not ready after {START_DEADLINE_S:.0f} s: {why}")


def _seen(explanation: Mapping[str, Any]) -> set[str]:
    """Workers among which the router could choose."""
    keys = ("prefill_worker_id", "decode_worker_id")
    return {str(terms[key]) for terms in explanation.get("placement", ()) for key in keys}


def _serves(why: str) -> bool:
    """True when the colocated router lacks only the prefill pool for readiness."""
    return "no usable prefill worker" in why and "no usable decode worker" not in why
