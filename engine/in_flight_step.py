"""A step on the device, and how long the host may wait before it plans the one behind it."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.runner import StepInFlight
from diptych.engine.sched.batching.step import SchedulerOutput

FIRST_MARGIN_S = 0.003
LEAST_MARGIN_S = 0.0005
_AFTER_LATE, _AFTER_GOOD = 1.3, 0.985


@dataclass(frozen=True, slots=True)
class InFlightStep:
    out: SchedulerOutput
    step: StepInFlight
    begun: float


class PlanTimer:
    """When to plan the next step: late, so that requests that arrive while a step runs take part in the next one, but
    before the device is idle. The margin before a step's expected end grows when the device was idle, and shrinks
    slowly otherwise."""

    def __init__(self) -> None:
        self._margin_s = FIRST_MARGIN_S
        self._last_s = self._before_s = 0.0

    @property
    def wait_s(self) -> float:
        """From a step's begin on the device until the next one is to be planned. The shorter of the last two steps
        counts, because a step that was delayed says nothing about the next."""
        return max(0.0, min(self._last_s, self._before_s) - self._margin_s)

    def launched(self, *, late: bool) -> None:
        """A step was launched behind another. Args: late: the other had ended already."""
        factor = _AFTER_LATE if late else _AFTER_GOOD
        longest = max(FIRST_MARGIN_S, self._last_s)
        self._margin_s = min(max(self._margin_s * factor, LEAST_MARGIN_S), longest)

    def landed(self, duration_s: float) -> None:
        self._last_s, self._before_s = duration_s, self._last_s
