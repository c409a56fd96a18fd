"""Ranges of REMOTE requests that the GPU copies into their blocks beside the steps: begun by UnpackRange, answered when
done.

begun --done, intact--> covered, RangeUnpacked(True)
  |   --done, damaged--> RangeUnpacked(False, error): the read fails, the request may try another source
  +-- request ended or RunLocally: waited for at once (RemoteRequests.remove) -> RangeUnpacked(False)
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.messages import RangeUnpacked, UnpackRange
from diptych.engine.runner import CopyHandle
from diptych.engine.sched.handoff.remote import UnpackJob
from diptych.engine.sched.scheduler import Scheduler


@dataclass(slots=True)
class _Begun:
    command: UnpackRange
    job: UnpackJob
    copy: CopyHandle
    last: bool


class AsyncUnpacks:
    """Those of one engine, in the order in which they were begun."""

    def __init__(self) -> None:
        self._begun: list[_Begun] = []

    def __len__(self) -> int:
        return len(self._begun)

    def first_is_done(self) -> bool:
        return bool(self._begun) and self._begun[0].copy.done()

    def begin(self, scheduler: Scheduler, command: UnpackRange, job: UnpackJob, copy: CopyHandle) -> None:
        scheduler.remote.copy_begins(job, copy)
        self._begun.append(_Begun(command, job, copy, command.last))

    def all_given(self, attempt: str) -> None:
        """See the command."""
        self._mark(attempt, last=True)

    def _mark(self, attempt: str, *, last: bool) -> None:
        for begun in self._begun:
            if begun.command.attempt == attempt:
                begun.last = last

    def take_done(self, scheduler: Scheduler) -> list[RangeUnpacked]:
        """The answers of those that have ended since."""
        answers: list[RangeUnpacked] = []
        while self._begun and self._begun[0].copy.done():
            answers.append(self._answer(scheduler, self._begun.pop(0)))
        return answers

    def _answer(self, scheduler: Scheduler, begun: _Begun) -> RangeUnpacked:
        command, job, copy = begun.command, begun.job, begun.copy
        if not scheduler.remote.copy_ends(job, copy):
            return RangeUnpacked(command.attempt, command.job, False)
        error = copy.error()
        if error:
            self._mark(command.attempt, last=False)  # who vouched for them does not vouch for what replaces this one
        else:
            scheduler.unpacked(job, last=begun.last)
        return RangeUnpacked(command.attempt, command.job, not error, error)
