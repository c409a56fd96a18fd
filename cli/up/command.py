"""`diptych up`: a whole cluster as processes of this machine, and `diptych down`.

    claim the run folder, check ports -> model -> secret -> redis -> workers -> router -> /ready -> one token -> supervise

The supervisor is one thread without an event loop. A child that exits during the start ends the start, with the tail of
its log; later it is restarted, as a new incarnation, with a growing delay. Every exit (Ctrl-C, SIGTERM, an error,
SIGKILL of the supervisor) ends all children; the run folder keeps only its logs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from diptych.cli.settings.merge import child_environment
from diptych.cli.up import embedded_redis
from diptych.cli.up.cluster_plan import ClusterPlan
from diptych.cli.up.config import UpConfig, threads_for
from diptych.cli.up.gpus import GpuAssignment, assign_gpus, describe_assignments
from diptych.cli.up.processes import ProcessIdentity, require_free_port, tail
from diptych.cli.up.progress_log import Stages
from diptych.cli.up.readiness import NotServingYet, first_answer, is_ready, unserved_adapters
from diptych.cli.up.run_folder import ChildState, ClusterState, RunFolder
from diptych.cli.up.startup_message import has_chat_template, startup_message
from diptych.cli.up.supervisor import Child, Supervisor, exit_reason
from diptych.common.cores import usable_cores
from diptych.common.errors import ConfigError
from diptych.common.tls import load_cluster_tls, load_server_tls
from diptych.worker.role_spec import ROLES
from diptych.worker.visible_gpus import find_gpus, find_links

if TYPE_CHECKING:
    from diptych.engine.exec.models.description import ModelDescription

STOP_GRACE_S = 4.0
REDIS_DEADLINE_S = 10.0
DOWN_DEADLINE_S = 20.0


class StartFailed(Exception):
    """The cluster did not start; the message says why."""


class _Signals:
    """Received signals. A second signal means an immediate stop. The first signal during the start interrupts it at
    once, whatever it waits for (a download, a first answer)."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.starting = False

    def handle(self, signum: int, _frame: FrameType | None) -> None:
        self.received.append(signum)
        if self.starting:
            self.starting = False
            raise StartFailed("interrupted")

    def hurry(self) -> bool:
        return len(self.received) > 1

    @property
    def exit_code(self) -> int:
        return 128 + self.received[0] if self.received else 0


@contextmanager
def _listening_to_signals() -> Iterator[_Signals]:
    signals = _Signals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signals.handle) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_up(config: UpConfig, run_root: Path, resolve_model: Callable[[Stages], tuple[Path, str]]) -> int:
    """Start the cluster and supervise it until a signal.

    Args:
        resolve_model: finds (folder, served name), downloading if needed.
    Returns: the exit code: 1 when the start failed, 130 or 143 after SIGINT or SIGTERM.
    Raises: ConfigError before anything is started.
    """
    if config.keys_file is not None and not os.environ.get("DIPTYCH_API_KEY"):
        rule = "the cluster's first request needs one of its keys: set DIPTYCH_API_KEY"
        raise ConfigError("keys_file", str(config.keys_file), rule)
    if config.tls_cert is not None and config.tls_key is not None:
        load_server_tls(config.tls_cert, config.tls_key)
    load_cluster_tls(config.cluster_ca or "", config.cluster_cert or "", config.cluster_key or "")
    assignments = _assign_gpus(config)
    folder = RunFolder(run_root)
    stages = Stages()
    with _listening_to_signals() as signals:
        folder.claim()
        supervisor: Supervisor | None = None
        try:
            require_free_port("http_port", config.host, config.http_port)
            require_free_port("grpc_port", config.host, config.grpc_port)
            signals.starting = True
            if assignments:
                stages.done(describe_assignments(assignments))
            stages.stage("model")
            model_folder, model_name = resolve_model(stages)
            check_model(config, model_folder)
            stages.done(f"model {model_name} in {model_folder}")
            threads = threads_for(config, usable_cores())
            env = child_environment(UpConfig) | _thread_environment(threads)
            supervisor = Supervisor(env, cwd=folder.root)
            plan = ClusterPlan(config, folder, model_folder, model_name, threads, assignments)
            _start(plan, supervisor, signals, stages)
            signals.starting = False
            if not signals.received:
                print(_greeting(plan, folder), flush=True)
                _supervise(plan, supervisor, signals, stages)
            stages.stage("stopping")
        except StartFailed as error:
            stages.end()
            if not signals.received:
                print(f"error: {error}", file=sys.stderr, flush=True)
                return 1
        finally:
            signals.starting = False
            stages.end()
            if supervisor is not None:
                killed = supervisor.stop(grace_s=STOP_GRACE_S, hurry=signals.hurry)
                if killed:
                    print(f"had to be killed: {', '.join(killed)}", file=sys.stderr, flush=True)
            folder.release()
        stages.done("stopped; logs are kept")
        return signals.exit_code


def check_model(config: UpConfig, folder: Path) -> None:
    """What the workers would refuse after the start. Raises: ConfigError for a model that is not supported, and for a context
    that is larger than the model's."""
    from diptych.engine.exec.models.registry import describe

    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("model", str(folder), f"has no config.json that can be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError("model", str(folder / "config.json"), "must hold a JSON object")
    model = describe(raw)
    _check_division(config, model)
    most = model.max_position
    if config.max_model_len > most:
        raise ConfigError("max_model_len", config.max_model_len, f"must be at most the model's {most}")


def _check_division(config: UpConfig, model: ModelDescription) -> None:
    """Raises: ConfigError when a role's workers cannot divide the model among their ranks, or would refuse the other role's."""
    from diptych.engine.exec.parallel.division import TENSOR_PARALLEL, method_of_ranks, sizes_of

    degrees = {role: config.degrees(role).tensor_parallel for role in ROLES}
    for role in ROLES:
        sizes_of(model).check(config.degrees(role), partial(config.degree_setting, role))
    if len(set(degrees.values())) == 1:
        return
    if config.batch_invariant:
        why = "with --batch-invariant both pools need one degree, in whose order sums are added up"
    elif len({method_of_ranks(model, degree) for degree in degrees.values()}) > 1:
        why = f"with {model.method} both pools need one degree: ranks quantize what they multiply by its own largest value"
    else:
        return
    role, setting = next(
        (role, setting)
        for role in ROLES
        if (setting := config.degree_setting(role, TENSOR_PARALLEL)) != TENSOR_PARALLEL
    )
    other = next(other for other in ROLES if other != role)
    raise ConfigError(setting, degrees[role], f"{other} has {degrees[other]}; {why}")


def _assign_gpus(config: UpConfig) -> dict[str, GpuAssignment]:
    """Raises: ConfigError when GPUs are requested and there are none."""
    if config.device != "cuda":
        return {}
    gpus = find_gpus(os.environ)
    prefill_ranks, decode_ranks = (config.degrees(role).num_ranks for role in ("prefill", "decode"))
    return assign_gpus(
        gpus,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        links=find_links(gpus) if max(prefill_ranks, decode_ranks) > 1 else {},
        prefill=config.prefill_workers,
        decode=config.decode_workers,
        prefill_gpus=config.gpu_numbers("prefill_gpus"),
        decode_gpus=config.gpu_numbers("decode_gpus"),
    )


def run_detached(command: list[str], run_root: Path, timeout_s: float) -> int:
    """Run `diptych up` in the background and return once it serves. Its output is in `.run/logs/up.log`."""
    folder = RunFolder(run_root)
    folder.make()
    if folder.owner() is not None:
        raise ConfigError("run_dir", str(run_root), "a cluster runs from this folder already; stop it with `make down`")
    # A shell that starts this process in the background, as in CI, makes it ignore SIGINT; it must end its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = folder.logs / "up.log"
    with log.open("wb", buffering=0) as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    until = time.monotonic() + timeout_s
    serves = False
    try:
        while time.monotonic() < until:
            code = process.poll()
            state = folder.read_state()
            if code is not None:
                print(tail(log, 40), file=sys.stderr)
                if list(folder.logs.iterdir()) == [log]:  # nothing was started, and its output is printed
                    log.unlink()
                    folder.unmake()
                return code or 1
            if state is not None and state.pid == process.pid and state.ready:
                print(log.read_text(errors="replace"))
                serves = True
                return 0
            time.sleep(0.1)
    finally:
        if not serves and process.poll() is None:  # timeout, or an interrupt
            process.terminate()
            try:
                process.wait(timeout=DOWN_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # the kernel kills its children with it
                process.wait()
    print(f"error: not ready after {timeout_s:.0f} s\n{tail(log, 40)}", file=sys.stderr)
    return 1


def run_down(run_root: Path) -> int:
    """Stop the cluster of this run folder, from any terminal. Returns 0 also when none runs."""
    folder = RunFolder(run_root)
    owner = folder.owner()
    if owner is None:
        found = folder.remove_dead_cluster()
        print("no cluster runs here" + ("; removed the files of a killed one" if found else ""))
        return 0
    state = folder.read_state()
    children = [ProcessIdentity(child.pid, child.start_time) for child in state.children] if state else []
    owner.send(signal.SIGTERM)
    until = time.monotonic() + DOWN_DEADLINE_S
    while owner.alive() and time.monotonic() < until:
        time.sleep(0.05)
    if owner.alive():
        print("the supervisor does not answer: killed", file=sys.stderr)
        owner.send(signal.SIGKILL)  # the kernel kills its children with it
    until = time.monotonic() + 5.0
    while any(process.alive() for process in (owner, *children)) and time.monotonic() < until:
        time.sleep(0.05)
    left = [process.pid for process in (owner, *children) if process.alive()]
    folder.remove_dead_cluster()
    if left:
        print(f"error: still running: {left}", file=sys.stderr)
        return 1
    print("stopped")
    return 0


def _start(plan: ClusterPlan, supervisor: Supervisor, signals: _Signals, stages: Stages) -> None:
    """Raises: StartFailed."""
    config = plan.config
    until = time.monotonic() + config.startup_timeout_s
    plan.make_secret()
    if not config.redis_url:
        stages.stage("redis")
        redis = supervisor.start(plan.redis_spec())
        if not embedded_redis.wait_ready(redis.process, plan.folder.redis_socket, deadline_s=REDIS_DEADLINE_S):
            raise StartFailed(
                _died(redis) if redis.process.poll() is not None else "the embedded redis does not answer"
            )
        stages.done(f"redis on {plan.folder.redis_socket}")
    for spec in (*plan.worker_specs(), plan.router_spec()):
        supervisor.start(spec)
    _write_state(plan, supervisor, ready=False)
    stages.stage(f"{config.prefill_workers} prefill, {config.decode_workers} decode and the router load the model")
    why = ""
    while True:
        _check_start(supervisor, signals)
        ready, why = is_ready(plan.probe_host, config.http_port, tls_cert=config.tls_cert)
        if ready:
            break
        if time.monotonic() > until:
            raise StartFailed(f"not ready after {config.startup_timeout_s:.0f} s: {why}\n{_tails(supervisor)}")
        time.sleep(0.1)
    stages.done("workers are registered and ready")
    for reason in unserved_adapters(why):
        stages.done(f"warning: --lora-modules: {reason}")
    stages.stage("first token")
    while True:
        try:
            answer = first_answer(
                plan.probe_host,
                config.http_port,
                timeout_s=max(until - time.monotonic(), 5.0),
                tls_cert=config.tls_cert,
            )
            break
        except (OSError, RuntimeError, ValueError, LookupError) as error:
            _check_start(supervisor, signals)
            if isinstance(error, NotServingYet) and time.monotonic() < until:
                time.sleep(0.1)
                continue
            raise StartFailed(f"ready, but the first request failed: {error}\n{_tails(supervisor)}") from None
    facts = answer.explanation
    moved = f"{facts.get('prefill')} -> {facts.get('decode')}, {facts.get('kv_bytes')} KV bytes over {facts.get('transport')}"
    stages.done(f"first tokens served: {answer.text!r} ({moved})")
    _write_state(plan, supervisor, ready=True)


def _check_start(supervisor: Supervisor, signals: _Signals) -> None:
    if signals.received:
        raise StartFailed("interrupted")
    for child in supervisor.dead():
        raise StartFailed(_died(child))


def _supervise(plan: ClusterPlan, supervisor: Supervisor, signals: _Signals, stages: Stages) -> None:
    """Restart what dies, until a signal. A full disk ends nothing: the state is written as soon as there is room."""
    changed, why = False, ""
    while not signals.received:
        notices = supervisor.poll(time.monotonic())
        for notice in notices:
            if notice.exit_code is not None:
                reason = exit_reason(notice.exit_code)
                stages.done(f"{notice.child} ended ({reason}); starts again in {notice.delay_s:.2f} s")
            else:
                stages.done(f"{notice.child} started again as pid {notice.pid}")
        changed = changed or bool(notices)
        if changed:
            try:
                _write_state(plan, supervisor, ready=True)
                changed, why = False, ""
            except OSError as error:
                if str(error) != why:
                    why = str(error)
                    stages.done(f"the cluster's state cannot be written, and is tried again: {why}")
        time.sleep(0.05)


def _write_state(plan: ClusterPlan, supervisor: Supervisor, *, ready: bool) -> None:
    me = ProcessIdentity.of(os.getpid())
    children = [
        ChildState(
            name=child.spec.name,
            role=child.spec.role,
            pid=child.identity.pid,
            start_time=child.identity.start_time,
            address=plan.addresses.get(child.spec.name, ""),
            log=str(child.spec.log),
            metrics=plan.metrics.get(child.spec.name, ""),
        )
        for child in supervisor.children.values()
        if child.restart_at is None
    ]
    state = ClusterState(
        pid=me.pid,
        start_time=me.start_time,
        ready=ready,
        http_url=plan.http_url,
        grpc_address=plan.grpc_address,
        redis_url=plan.redis_url,
        secret_file=str(plan.secret_file),
        model=plan.model_name,
        children=children,
        **plan.tls_files,
    )
    plan.folder.write_state(state)


def _died(child: Child) -> str:
    code = child.process.poll() or 0
    return f"{child.spec.name} died at start-up ({exit_reason(code)}); the end of {child.spec.log}:\n{tail(child.spec.log)}"


def _tails(supervisor: Supervisor) -> str:
    return "\n".join(f"--- {child.spec.log}\n{tail(child.spec.log, 8)}" for child in supervisor.children.values())


def _thread_environment(threads: int) -> dict[str, str]:
    count = str(threads)
    return {
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
    }


def _has_terminal() -> bool:
    """Whether this process can be interrupted from a terminal: one of `--detach` is in a session without one."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _greeting(plan: ClusterPlan, folder: RunFolder) -> str:
    return startup_message(
        terminal=_has_terminal(),
        http_url=plan.http_url,
        grpc_address=plan.grpc_address,
        model=plan.model_name,
        logs=str(folder.logs),
        chat=has_chat_template(plan.model_folder),
        keys=plan.config.keys_file is not None,
    )
