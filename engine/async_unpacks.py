"""Ranges of REMOTE requests that the GPU copies into their blocks beside the steps: begun by UnpackRange, answered when done.

begun --done, intact--> covered, RangeUnpacked(True)
  |   --done, damaged--> RangeUnpacked(False, error): the leg fails, the request may try another
  +-- request ended or RunLocally: waited for at once (Request.end_pulls) -> RangeUnpacked(False)
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.messages import RangeUnpacked, UnpackRange
from diptych.engine.runner import CopyHandle
from diptych.engine.sched.remote import UnpackJob, unpacked
from diptych.engine.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Begun:
    command: UnpackRange
    job: UnpackJob
    pull: CopyHandle


class AsyncUnpacks:
    """Those of one engine, in the order in which they were begun."""

    def __init__(self) -> None:
        self._begun: list[_Begun] = []

    def __len__(self) -> int:
        return len(self._begun)

    def first_is_done(self) -> bool:
        return bool(self._begun) and self._begun[0].pull.done()

    def begin(self, command: UnpackRange, job: UnpackJob, pull: CopyHandle) -> None:
        job.request.pulls.append(pull)
        self._begun.append(_Begun(command, job, pull))

    def take_done(self, scheduler: Scheduler) -> list[RangeUnpacked]:
        """The answers of those that have ended since."""
        answers: list[RangeUnpacked] = []
        while self._begun and self._begun[0].pull.done():
            begun = self._begun.pop(0)
            answers.append(_answer(scheduler, begun))
        return answers


def _answer(scheduler: Scheduler, begun: _Begun) -> RangeUnpacked:
    command, pulls = begun.command, begun.job.request.pulls
    if begun.pull not in pulls:
        return RangeUnpacked(command.attempt, command.job, False)
    pulls.remove(begun.pull)
    error = begun.pull.error()
    if not error:
        unpacked(scheduler, begun.job, last=command.last)
    return RangeUnpacked(command.attempt, command.job, not error, error)
