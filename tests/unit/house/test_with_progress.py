"""Long, quiet steps of the Makefile show progress."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / ".ci" / "with_progress.sh"
ENV = {"PATH": os.environ["PATH"], "PROGRESS_EVERY_S": "0.05"}


def held_gate(folder: Path) -> tuple[str, int]:
    """A pipe's path, and the descriptor with which it is written to: as long as that is open, who reads it waits."""
    gate = str(folder / "gate")
    os.mkfifo(gate)
    return gate, os.open(gate, os.O_RDWR)


def test_a_step_that_takes_long_says_so_until_it_ends(tmp_path: Path) -> None:
    gate, source = held_gate(tmp_path)
    command = [str(SCRIPT), "a long step", "cat", gate]  # it waits for input
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        command, **pipes, text=True, env=ENV
    ) as step:  # ends: with this process, which holds the gate
        assert step.stderr is not None
        assert step.stderr.readline() == "a long step\n"
        for _ in range(2):
            assert step.stderr.readline().startswith("a long step ... ")
        os.write(source, b"its output")
        os.close(source)
        rest = step.stderr.read().splitlines()
        assert rest[-1].startswith("a long step: done in ")
        assert step.stdout is not None
        assert step.stdout.read() == "its output"
    assert step.returncode == 0


def test_the_command_s_exit_code_is_kept() -> None:
    done = subprocess.run(
        [str(SCRIPT), "fails", "sh", "-c", "exit 7"], capture_output=True, text=True, env=ENV, timeout=300
    )
    assert done.returncode == 7
    assert "fails: failed with exit code 7" in done.stderr


def test_it_ends_with_its_command_when_it_is_stopped(tmp_path: Path) -> None:
    gate, source = held_gate(tmp_path)
    command = [str(SCRIPT), "stopped", "cat", gate]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=ENV
    ) as step:  # ends: with this process, as above
        assert step.stderr is not None
        assert step.stderr.readline() == "stopped\n"
        assert step.stderr.readline().startswith("stopped ... ")
        step.send_signal(signal.SIGTERM)
        assert "stopped: failed" in step.stderr.read()  # the end of the stream: nothing holds it any more
    os.close(source)
    assert step.returncode not in (0, None)
