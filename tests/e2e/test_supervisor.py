"""Child processes: started again when they die, ended in order, never left behind. Small children, no model."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from diptych.cli.up import embedded_redis
from diptych.cli.up.processes import ProcessIdentity
from diptych.cli.up.supervisor import ChildSpec, Supervisor
from diptych.common import child
from diptych_tests.waiting import wait_until

pytestmark = pytest.mark.multiproc

SLEEP = [sys.executable, "-P", "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-P",
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
]


def spec(name: str, command: list[str], folder: Path, group: int = 0) -> ChildSpec:
    return ChildSpec(name, "test", lambda: command, folder / f"{name}.log", group)


@pytest.fixture
def supervisor(tmp_path: Path):
    made = Supervisor(dict(os.environ), tmp_path)
    yield made
    made.stop(grace_s=0.1)


def test_dead_child_is_started_again_as_another_process(supervisor, tmp_path):
    child = supervisor.start(spec("a", SLEEP, tmp_path))
    first = child.process.pid
    os.kill(first, signal.SIGKILL)
    child.process.wait(timeout=300)
    now = time.monotonic()
    (died,) = supervisor.poll(now)
    assert died.exit_code == -signal.SIGKILL
    assert supervisor.poll(now + died.delay_s / 2) == []
    (started,) = supervisor.poll(now + died.delay_s)
    assert started.exit_code is None
    assert started.pid != first
    assert child.identity.alive()
    os.kill(started.pid, signal.SIGKILL)
    child.process.wait(timeout=300)
    (again,) = supervisor.poll(now + 1.0)
    assert again.delay_s > died.delay_s


def test_stop_ends_polite_and_deaf_children(supervisor, tmp_path):
    polite = supervisor.start(spec("polite", SLEEP, tmp_path, 0))
    deaf = supervisor.start(spec("deaf", STUBBORN, tmp_path, 1))
    wait_until(lambda: "deaf" in deaf.spec.log.read_text(), what="it is deaf by now")
    assert supervisor.stop(grace_s=2.0) == ["deaf"]
    assert not polite.identity.alive()
    assert not deaf.identity.alive()


def test_children_die_with_a_killed_parent(tmp_path):
    script = (
        "import os, pathlib, time; from diptych.cli.up.processes import spawn;"
        f"child = spawn({SLEEP!r}, log=pathlib.Path({str(tmp_path / 'c.log')!r}), env=dict(os.environ), cwd=pathlib.Path('/'));"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = child.start([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE)
    try:
        left = ProcessIdentity.of(int(parent.stdout.readline()))
        assert left.alive()
    finally:
        parent.kill()
        parent.wait(timeout=300)
        parent.stdout.close()
    wait_until(lambda: not left.alive(), what="the child is gone")


def test_embedded_redis_serves_its_user_on_a_socket_and_writes_nothing(tmp_path):
    path = tmp_path / "redis.sock"
    process = embedded_redis.start_server(path, log=tmp_path / "redis.log", folder=tmp_path)
    try:
        assert embedded_redis.wait_ready(process, path, deadline_s=300.0)
        assert not psutil.Process(process.pid).net_connections("inet")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(300)
            connection.connect(str(path))
            connection.sendall(b"SET a b\r\nCONFIG GET maxmemory\r\nCONFIG GET save\r\n")
            connection.sendall(b"QUIT\r\n")
            with connection.makefile("rb") as answers:
                answer = answers.read()  # to the end that QUIT brings
        assert b"+OK" in answer
        assert str(256 * 1024 * 1024).encode() in answer
    finally:
        process.terminate()
        process.wait(timeout=300)
    assert [path.name for path in tmp_path.iterdir()] == ["redis.log"]


def test_redis_that_cannot_start_is_noticed_before_the_deadline(tmp_path):
    path = tmp_path / "redis.sock"
    path.mkdir()
    process = embedded_redis.start_server(path, log=tmp_path / "redis.log", folder=tmp_path)
    # Noticed by its end: with the deadline alone this would take a day.
    assert not embedded_redis.wait_ready(process, path, deadline_s=86_400.0)
    process.wait(timeout=300)


def test_taken_port_is_named_before_anything_starts(cluster_module, tmp_path):
    command, http, _ = cluster_module.up_command()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", http))
        taken.listen()
        result = subprocess.run(
            command, env=cluster_module.environment(tmp_path), capture_output=True, text=True, timeout=300, cwd=tmp_path
        )
    assert result.returncode == 1
    assert f"http_port={http}" in result.stderr
    assert "--http-port" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill-workers", "0"], "prefill_workers=0"),
        (["--http-port", "many"], "http_port='many'"),
        (["--config", "none.yaml"], "cannot be read"),
        (["--modle", "x"], "--model"),
    ],
)
def test_wrong_usage_exits_with_2(cluster_module, tmp_path, flags, words):
    command = [sys.executable, "-P", "-m", "diptych.cli", "up", *flags]
    env = cluster_module.environment(tmp_path)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr


def test_start_that_fails_shows_the_log_and_leaves_nothing(cluster_module, tmp_path):
    command, _, _ = cluster_module.up_command("--worker-args", "--no-such-flag")
    result = subprocess.run(
        command, env=cluster_module.environment(tmp_path), capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert result.returncode == 1
    assert "died at start-up" in result.stderr
    assert "--no-such-flag" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_down_where_nothing_runs(cluster_module, tmp_path):
    command = [sys.executable, "-P", "-m", "diptych.cli", "down"]
    env = cluster_module.environment(tmp_path)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0
    assert "no cluster runs here" in result.stdout
