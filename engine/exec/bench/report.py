"""What a benchmark writes: median and spread of alternating runs, the machine, versions, a table. Pure but for `machine`."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Timing:
    """Tokens per second of one side: median, least and greatest over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario. ratio: median of the rounds' own ratios (ours / theirs), each from two runs side by side.
    same_ids: requests whose token ids were equal on both sides, of `requests`."""

    scenario: str
    threads: int
    ours: Timing
    theirs: Timing
    ratio: float
    same_ids: int
    requests: int


def timing(rates: Sequence[float]) -> Timing:
    return Timing(statistics.median(rates), min(rates), max(rates))


def make_row(
    scenario: str, threads: int, ours: Sequence[float], theirs: Sequence[float], *, same_ids: int, requests: int
) -> Row:
    """ours, theirs: tokens per second of each round, aligned."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return Row(scenario, threads, timing(ours), timing(theirs), ratio, same_ids, requests)


def table(rows: Sequence[Row]) -> str:
    """tokens/s as median (low - high)."""

    def cell(t: Timing) -> str:
        return f"{t.median:.1f} ({t.low:.1f} - {t.high:.1f})"

    lines = [
        f"{'scenario':<22}{'threads':>8}{'diptych tok/s':>26}{'transformers tok/s':>26}{'ratio':>8}{'same ids':>10}"
    ]
    lines += [
        f"{r.scenario:<22}{r.threads:>8}{cell(r.ours):>26}{cell(r.theirs):>26}{r.ratio:>7.2f}x"
        f"{f'{r.same_ids}/{r.requests}':>10}"
        for r in rows
    ]
    return "\n".join(lines)


def machine() -> Mapping[str, object]:
    """CPU, load and versions: what a figure depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_1_5_15_min": os.getloadavg(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }
