"""The environment of a run: machine, versions and commit, part of every report."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("diptych", "aiohttp", "grpcio", "numpy", "uvloop", "torch", "transformers", "ucxx-cu13")


@dataclass(frozen=True, slots=True)
class Environment:
    """`load_1m`: the machine's load average at the start; above the number of cores, timings are contended."""

    git_hash: str
    git_dirty: bool
    python: str
    system: str
    cpu: str
    cores: int
    memory_gib: float
    load_1m: float
    versions: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def line(self) -> str:
        dirty = "+changes" if self.git_dirty else ""
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB; load {self.load_1m:.1f} at the start; {self.system}; "
            f"Python {self.python}; git {self.git_hash or 'unknown'}{dirty}"
        )


def describe_environment() -> Environment:
    where = Path(__file__).resolve().parent
    status = _git(where, "status", "--porcelain", "--untracked-files=no")
    return Environment(
        git_hash=_git(where, "rev-parse", "--short=12", "HEAD"),
        git_dirty=bool(status),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        load_1m=os.getloadavg()[0],
        versions={name: found for name in _PACKAGES if (found := _version(name))},
    )


def contended(environment: Environment) -> str:
    """A warning when other processes used the machine; empty otherwise."""
    if environment.load_1m <= environment.cores:
        return ""
    return (
        f"the machine was busy before the run began (load {environment.load_1m:.1f} on {environment.cores} cores): "
        "absolute figures are worse than the system's own; ratios of alternated runs hold better"
    )


def _git(where: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):  # an installed wheel, or no git
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown CPU"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
