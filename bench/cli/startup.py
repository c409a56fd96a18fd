"""`diptych bench startup`: duration of every command's --help, each time in a new process."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diptych.bench.result import surroundings, write

TARGET_S = 0.5


@dataclass(frozen=True, slots=True)
class Startup:
    """Medians of one command. `cpu_s` excludes other processes of the machine, so the target applies to it."""

    command: str
    wall_s: float
    cpu_s: float


def command_paths() -> list[list[str]]:
    """Every command, including subcommands."""
    from typer.main import get_command

    from diptych.cli.bench import command as bench
    from diptych.cli.main import build_app

    found: list[list[str]] = [[]]
    trees = [([], get_command(build_app(""))), (["bench"], get_command(bench.build_app("")))]
    while trees:
        path, tree = trees.pop(0)
        for name, inner in getattr(tree, "commands", {}).items():
            if [*path, name] not in found:
                found.append([*path, name])
            trees.append(([*path, name], inner))
    return found


def measure(arguments: Sequence[str], repeats: int) -> Startup:
    """Raises: subprocess.CalledProcessError when the command fails."""
    walls, cpus = [], []
    for _ in range(repeats):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-P", "-m", "diptych.cli", *arguments, "--help"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        walls.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return Startup(" ".join(arguments) or "(none)", statistics.median(walls), statistics.median(cpus))


def run_startup(repeats: int, out: Path) -> int:
    """Returns: 1 when a command's help takes longer than the target."""
    environment = surroundings()
    rows = []
    print(f"{'--help of':<22}{'wall s':>8}{'CPU s':>8}")
    for path in command_paths():
        rows.append(measure(path, repeats))
        print(f"{rows[-1].command:<22}{rows[-1].wall_s:>8.3f}{rows[-1].cpu_s:>8.3f}")
    slow = [row.command for row in rows if row.cpu_s > TARGET_S]
    body = {"environment": environment, "target_s": TARGET_S, "repeats": repeats, "slow": slow}
    write(out / "startup.json", body | {"commands": [asdict(row) for row in rows]})
    if slow:
        print(f"over {TARGET_S} s of CPU: {', '.join(slow)}", file=sys.stderr)
    return int(bool(slow))
