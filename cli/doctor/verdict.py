"""A verdict of `diptych doctor`: the check, its result, and the next step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """BAD costs throughput or breaks something; WARN may; INFO is neutral; UNKNOWN could not be checked."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`next_step` is empty only for OK and INFO."""

    check: str
    level: Level
    finding: str
    next_step: str = ""

    def __post_init__(self) -> None:
        if self.level not in (Level.OK, Level.INFO) and not self.next_step:
            raise AssertionError(f"{self.check}: a finding needs a next step")


def ok(check: str, finding: str) -> Verdict:
    return Verdict(check, Level.OK, finding)


def info(check: str, finding: str) -> Verdict:
    return Verdict(check, Level.INFO, finding)


def warn(check: str, finding: str, next_step: str) -> Verdict:
    return Verdict(check, Level.WARN, finding, next_step)


def bad(check: str, finding: str, next_step: str) -> Verdict:
    return Verdict(check, Level.BAD, finding, next_step)


def amount(value: float) -> str:
    """A number with a unit prefix: 1.2 G."""
    for limit, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f} {prefix}"
    return f"{value:.3g} "


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
