"""A step of a roll-out is over when the router uses another incarnation of the worker, not while the old one is still
ready."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.cli.restart import run_restart
from diptych.common.errors import ConfigError, NoWorkerError


def worker(incarnation: str, why_not: str = "", name: str = "p0") -> dict[str, Any]:
    return {"id": name, "incarnation": incarnation, "why_not": why_not}


class Router:
    """Answers one status after the other; then the last one for ever."""

    def __init__(self, *answers: list[dict[str, Any]] | Exception) -> None:
        self._answers: Iterator[list[dict[str, Any]] | Exception] = iter(answers)
        self._last: list[dict[str, Any]] | Exception = []
        self.asked = 0

    def get(self) -> dict[str, Any]:
        self.asked += 1
        self._last = next(self._answers, self._last)
        if isinstance(self._last, Exception):
            raise self._last
        return {"cluster": {"workers": self._last}}


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def restart(router: Router, program: str = "", timeout_s: float = 60.0) -> int:
    time = Time()
    command = [sys.executable, "-I", "-S", "-c", program]
    return run_restart(router, "p0", command, timeout_s=timeout_s, now=time.now, sleep=time.sleep)


def test_5_2_ready_is_not_back_until_it_is_another_life(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    router = Router(
        [worker("old")],
        [worker("old")],  # just restarted: all as before
        [worker("old", "is draining")],
        [worker("other", name="p1")],
        NoWorkerError("the router cannot be reached"),
        [worker("new", "never answered")],
        [worker("new")],
    )
    assert restart(router, f"open({str(ran)!r}, 'w')") == 0
    assert ran.exists()
    assert router.asked == 7


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        ([worker("old")], "still sees the old incarnation"),
        ([], "does not see it"),
        ([worker("new", "is draining")], "is draining"),
    ],
)
def test_5_2_a_worker_that_does_not_come_back_ends_the_roll_out(
    seen: list[dict[str, Any]], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert restart(Router([worker("old")], seen), timeout_s=5.0) == 1
    assert why in capsys.readouterr().err


def test_5_2_a_command_that_fails_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    router = Router([worker("old")])
    assert restart(router, "raise SystemExit(3)") == 3
    assert "exit code 3" in capsys.readouterr().err
    assert router.asked == 1


def test_5_2_an_unknown_worker_is_named_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="p0.*it has: d0"):
        restart(Router([worker("a", name="d0")]), f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert not (tmp_path / "ran").exists()
