"""A start that hangs or is killed leaves no process behind: `diptych up` with its own Redis, and children that are held
at the start of Python, before any module of the project is imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from diptych.cli.up.processes import free_port
from diptych.common import child
from diptych_tests.waiting import wait_until

pytestmark = pytest.mark.multiproc
DEADLINE_S = 300.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
"""`up` looks at it before it starts the children, which are held before they do."""

GATE = """
import os, pathlib, signal, sys, threading, time
role = next((word for word in sys.orig_argv if word in ("prefill", "decode", "router", "up")), "")
if role == "up":
    # Its clock begins once its children are held, so that its time-out finds them so on a machine of any speed. It goes ten
    # times as fast: what `up` grants children that are deaf is over sooner.
    real, files = time.monotonic, [pathlib.Path(os.environ["GATE"], f"{name}.pid") for name in ("prefill", "decode")]
    first, lost = real(), None

    def monotonic():
        global lost
        if lost is None:
            if not all(file.exists() and file.read_text() for file in files):
                return first
            lost = real() - first
        return first + 10.0 * (real() - lost - first)

    time.monotonic = monotonic
elif role:
    flags = dict(zip(sys.orig_argv, sys.orig_argv[1:]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder, state = pathlib.Path(os.environ["GATE"]), os.environ["GATE_STATE"]
    if state == "ready" and role == "router":
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        class Ready(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def do_POST(self):
                (folder / "asked").touch()
                threading.Event().wait()

        ThreadingHTTPServer(("127.0.0.1", int(flags["--http-port"])), Ready).serve_forever()
    (folder / f"{role}.pid").write_text(str(os.getpid()))
    if state == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(600)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    folder = tmp_path / "gate"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(GATE)
    return folder


def below(folder: Path) -> list[psutil.Process]:
    """Every running process whose environment names the folder, whatever its parent."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get("GATE") == str(folder)
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


@contextmanager
def starting(cluster_module, model: Path, gate: Path, state: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """`up` whose children are all held; after it nothing may be left, and everything is killed."""
    command, _, _ = cluster_module.up_command("--model", str(model), *flags)
    env = cluster_module.environment(gate.parent / "run")
    env |= {
        "GATE": str(gate),
        "GATE_STATE": state,
        "PYTHONPATH": os.pathsep.join([str(gate), env.get("PYTHONPATH", "")]),
    }
    with (gate.parent / "up.log").open("wb") as log:
        process = child.start(command, env=env, stdout=log, stderr=log, new_session=True)
    try:
        held = [gate / f"{role}.pid" for role in ("prefill", "decode")]
        wait_until(lambda: all(path.exists() and path.read_text() for path in held), what="children are held")
        yield process
        process.wait(timeout=DEADLINE_S)
        wait_until(lambda: not below(gate), what=f"left behind: {below(gate)}")
    finally:
        for left in (process, *below(gate)):
            left.kill()
        process.wait(timeout=DEADLINE_S)


def only_logs(gate: Path) -> bool:
    return [path.name for path in (gate.parent / "run").iterdir()] == ["logs"]


@pytest.mark.parametrize("state", ["deaf", "stopped"])
def test_2_8_a_start_that_is_stopped_leaves_nothing(cluster_module, model: Path, gate: Path, state: str) -> None:
    with starting(cluster_module, model, gate, state) as up:
        up.send_signal(signal.SIGTERM)
        assert up.wait(timeout=DEADLINE_S) == 143
    assert only_logs(gate)


@pytest.mark.parametrize("state", ["deaf", "stopped"])
def test_2_8_a_start_that_is_killed_leaves_nothing(cluster_module, model: Path, gate: Path, state: str) -> None:
    with starting(cluster_module, model, gate, state) as up:
        up.kill()


@pytest.mark.parametrize("state", ["deaf", "stopped"])
def test_2_8_a_start_that_is_too_late_leaves_nothing(cluster_module, model: Path, gate: Path, state: str) -> None:
    with starting(cluster_module, model, gate, state, "--startup-timeout-s", "1") as up:
        assert up.wait(timeout=DEADLINE_S) == 1
    said = (gate.parent / "up.log").read_text()
    assert "not ready after 1 s" in said
    assert all(f"{worker}.log" in said for worker in ("prefill-0", "decode-0"))  # how far each had come
    assert only_logs(gate)


def test_2_8_a_first_answer_that_never_comes_does_not_make_up_deaf(cluster_module, model: Path, gate: Path) -> None:
    with starting(cluster_module, model, gate, "ready", "--startup-timeout-s", "6000") as up:
        wait_until((gate / "asked").exists, what="the first answer is asked for")
        up.send_signal(signal.SIGTERM)
        assert up.wait(timeout=DEADLINE_S) == 143
    assert only_logs(gate)


def test_2_8_a_detached_start_that_hangs_is_ended(cluster_module, model: Path, gate: Path) -> None:
    """`up --detach` gives up; the `up` below it is stopped, and so never ends by itself."""
    with starting(cluster_module, model, gate, "deaf", "--detach", "--startup-timeout-s", "6000") as front:
        below_it = int(json.loads((gate.parent / "run" / "up.pid").read_text())["pid"])
        os.kill(below_it, signal.SIGSTOP)
        front.send_signal(signal.SIGINT)
        front.wait(timeout=DEADLINE_S)


def test_23_a_server_that_still_loads_its_model_ends_at_once(cluster_module, model, tmp_path):
    """It waited for the end of the load; here that never comes."""
    os.mkfifo(model / "generation_config.json")  # nobody writes into it
    temporary, log = tmp_path / "temporary", tmp_path / "serve.log"
    temporary.mkdir()
    ports = ("--http-port", str(free_port("127.0.0.1")), "--grpc-port", str(free_port("127.0.0.1")))
    env = cluster_module.environment(tmp_path / "run") | {"TMPDIR": str(temporary)}
    command = [sys.executable, "-P", "-m", "diptych.cli", "serve", "--model", str(model), *ports]
    with log.open("wb") as output, child.start(command, env=env, stdout=output, stderr=output) as process:
        try:
            wait_until(lambda: process.poll() is not None or "loading the model" in log.read_text(), what="it loads")
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 143, log.read_text()
        finally:
            process.kill()
    assert not list(temporary.glob("diptych-serve-*"))
