"""`diptych role` is over when a router places on the worker in its new role."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from diptych.cli.role import run_role, set_role
from diptych.cli.worker_access import WorkerAccess
from diptych.common.errors import ConfigError, NoWorkerError


def worker(role: str, why_not: str = "") -> dict[str, Any]:
    return {"id": "w0", "incarnation": "i", "address": "h:1", "role": role, "why_not": why_not}


class Router:
    """Answers one status after the other; then the last one for ever."""

    def __init__(self, *answers: list[dict[str, Any]] | Exception) -> None:
        self._answers = list(answers)

    def get(self) -> dict[str, Any]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return {"cluster": {"workers": answer}}


def run(router: Router, role: str = "decode", before: str = "prefill", asked: list[Any] | None = None) -> int:
    seconds = [0.0]

    def ask(address: str, known: dict[str, Any], wanted: str, *, force: bool, **_: object) -> str:
        if asked is not None:
            asked.append((address, known["incarnation"], wanted, force))
        return before

    def sleep(s: float) -> None:
        seconds[0] += s

    return run_role(router, "w0", role, timeout_s=10.0, ask=ask, now=lambda: seconds[0], sleep=sleep)


def test_17_6_the_role_is_changed_once_the_router_uses_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    router = Router(
        [worker("prefill")],
        [worker("prefill", "is draining")],
        [],
        NoWorkerError("the router cannot be reached"),
        [worker("decode", "is being connected")],
        [worker("decode")],
    )
    assert run(router, asked=asked) == 0
    assert asked == [("h:1", "i", "decode", False)]
    assert "w0 was a prefill worker, and is a decode worker now" in capsys.readouterr().out


def test_a_worker_that_has_the_role_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Router([worker("decode")]), before="decode") == 0
    assert "already" in capsys.readouterr().out


def test_a_router_that_does_not_see_it_in_time_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Router([worker("prefill")])) == 1
    assert "the router still sees the old role" in capsys.readouterr().err


def test_an_unknown_worker_or_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be prefill or decode"):
        run(Router([worker("prefill")]), role="router")
    with pytest.raises(ConfigError, match="no such worker; it has: none"):
        run(Router([]))


def test_a_worker_that_is_not_running_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"  # bound, not listening: refused
        with pytest.raises(NoWorkerError) as refused:
            set_role(address, worker("decode"), "prefill", force=False, access=WorkerAccess(), timeout_s=10.0)
    assert refused.value.message == f"worker w0 at {address} is not running"
