"""Steps that wait for a test: what must happen in the midst of a request is held there, on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from diptych.engine.messages import ScheduledSeq, StepResult
from diptych.engine.runner import ModelRunner, StepAborted

_LOOK_EVERY_S = 0.002


def hold_steps(runner: ModelRunner, gate: Path) -> None:
    """Let a step of `runner` wait while the file `gate` is there and the steps begun before it, since the start of the process,
    are at least the number in it (EngineStats.steps counts the same). While one waits there is a file `gate`.held beside it.
    A step that waits is given up as a running one is: when nobody wants it any more. For tests; steps that a device takes
    ahead are not held.
    """
    execute, sign = runner.execute, gate.with_name(gate.name + ".held")
    begun = 0

    def held() -> bool:
        try:
            return begun >= int(gate.read_text(encoding="ascii"))
        except FileNotFoundError:
            return False

    def gated(seqs: Sequence[ScheduledSeq], should_abort: Callable[[], bool] | None = None) -> StepResult:
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
        return execute(seqs, should_abort)

    runner.execute = gated  # type: ignore[method-assign]
