"""A fork of the server of `diptych_tests.fork_server` is as good as a process that was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diptych_tests import fork_server, waiting
from diptych_tests.fork_server import ForkedProcess, ForkServer
from diptych_tests.publisher import Publisher

PYTHON = [sys.executable, "-P", "-m"]
ROUTER = [*PYTHON, "diptych.cli", "router"]


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """A router that does not start. Returns: its exit code and its words."""
    log = folder / "log"
    with log.open("wb") as output:
        env = {"PATH": os.environ["PATH"], "PYTHONSAFEPATH": "1", **variables}
        child = fork_server.start([*ROUTER, *arguments], env=env, cwd=folder, stdout=output, stderr=output)
    return child.wait(waiting.DEADLINE_S), log.read_text()


@pytest.mark.multiproc
def test_a_child_has_its_arguments_variables_and_folder_and_ends_with_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_HTTP_PORT", "of the test process")
    code, words = run(tmp_path, DIPTYCH_HTTP_PORT="of the child")
    assert (code, "of the child" in words) == (2, True), words
    code, words = run(tmp_path, "--no-such-flag")
    assert (code, "--no-such-flag" in words) == (2, True), words
    assert len(list(Path(f"/proc/{fork_server.server().process.pid}/task").iterdir())) == 1, (
        "a thread would be lost in each fork"
    )


@pytest.mark.multiproc
async def test_children_share_nothing_and_are_killed_as_others_are() -> None:
    one = await Publisher.start(worker_id="p1")
    other = await Publisher.start(worker_id="p2")
    assert isinstance(one.process, ForkedProcess)
    assert one.process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.process.wait(0.0)
    folder = f"/proc/{other.process.pid}/fd"
    descriptors = {os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}
    assert not [link for link in descriptors if "pidfd" in link], "these are the server's"
    await one.freeze()
    one.process.kill()
    await one.ended()
    assert one.process.returncode == -signal.SIGKILL
    one.process.kill()  # nothing happens, also if its pid is another's now
    assert await other.counts()
    await other.stop()
    assert other.process.returncode == 0


@pytest.mark.multiproc
async def test_children_end_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ForkServer(imports=())
    monkeypatch.setattr(fork_server, "_server", own)
    child = await Publisher.start()
    own.close()
    await child.ended()
    assert child.process.returncode == -signal.SIGKILL


def test_only_modules_of_the_tests_and_the_router_are_forked() -> None:
    assert fork_server.takes([*ROUTER, "--insecure"])
    assert fork_server.takes([*PYTHON, "diptych_tests.worker_process", "{}"])
    assert not fork_server.takes([*PYTHON, "diptych.cli", "up"])
    assert not fork_server.takes(["prlimit", *ROUTER])
    assert not fork_server.takes(["redis-server", "--port", "0"])
