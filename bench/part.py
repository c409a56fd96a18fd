"""A child process of a benchmark: it prints `serves ADDRESS...` once and then serves until it is terminated."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from diptych.common import child
from diptych.common.errors import ConfigError

START_S = 120.0
TERMINATE_S = 5.0


def running_part(module: str, *arguments: str) -> contextlib.AbstractContextManager[tuple[psutil.Process, list[str]]]:
    """Start `python -P -m MODULE ARGUMENTS...`; see running_command."""
    return running_command([sys.executable, "-P", "-m", module, *arguments], module)


@contextlib.contextmanager
def running_command(
    command: list[str], module: str, env: Mapping[str, str] | None = None
) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Start the command of a part; yield its process and the printed addresses.

    Its output goes to a file: an unread pipe would block it after 64 KiB of log. Raises: ConfigError with the end of
    its output when it prints no addresses within START_S.
    """
    with tempfile.NamedTemporaryFile() as output:
        process = child.start(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            yield psutil.Process(process.pid), _addresses(process, Path(output.name), module)
        finally:
            end_process(process)


def _addresses(process: subprocess.Popen[bytes], output: Path, module: str) -> list[str]:
    until = time.monotonic() + START_S
    while True:
        ended = process.poll() is not None or time.monotonic() > until
        text = output.read_text(errors="replace")
        for line in text.splitlines(keepends=True):
            if line.startswith("serves ") and line.endswith("\n"):
                return line.split()[1:]
        if ended:
            raise ConfigError("bench", module, f"this part did not start:\n{text[-2000:]}")
        time.sleep(0.05)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Terminate it; kill it when it has not ended TERMINATE_S later."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=TERMINATE_S)
    process.kill()
    process.wait(timeout=TERMINATE_S)
