"""Steps that wait for a test, to hold a request at a defined point on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diptych.engine.executor import Executor
from diptych.engine.messages import ScheduledSeq, StepResult
from diptych.engine.runner import ModelRunner, StepAborted

_LOOK_EVERY_S = 0.002


def hold_steps(runner: ModelRunner | Executor, gate: Path) -> None:
    """Make a step of `runner` wait while the file `gate` exists and the number of steps begun before it, since the
    start of the process, is at least the number in the file (as EngineStats.steps counts).

    While a step waits there is a file `gate`.held beside it. A waiting step is abandoned like a running one: when it is
    no longer needed. For tests; steps that a device runs ahead are not held.
    """
    execute, sign = runner.execute, gate.with_name(gate.name + ".held")
    begun = 0

    def held() -> bool:
        try:
            return begun >= int(gate.read_text(encoding="ascii") or 0)  # empty while another process writes it
        except FileNotFoundError:
            return False

    def gated(seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None = None, *more: Any) -> StepResult:
        nonlocal begun
        try:
            while held():
                sign.touch()
                if should_abort is not None and should_abort():
                    raise StepAborted
                time.sleep(_LOOK_EVERY_S)
        finally:
            begun += 1
            sign.unlink(missing_ok=True)
        return execute(seqs, should_abort, *more)  # type: ignore[arg-type]

    runner.execute = gated  # type: ignore[method-assign]
