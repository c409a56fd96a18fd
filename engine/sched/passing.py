"""Who lacks blocks is passed by requests that fit: as long as those are not what it lacks, and until they are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from diptych.engine.messages import KvMode
from diptych.engine.sched import preemption
from diptych.engine.sched.request import Request, State

if TYPE_CHECKING:
    from diptych.engine.sched.scheduler import Scheduler

MOST_PASSED = 16
"""In one step: each is looked up in the cache."""


class Passing:
    """The first request that lacked blocks, and those that were admitted past it while it did.

    They take nothing from it: it would not fit without them either. As soon as it would, nobody passes any more, and those of
    them that can be preempted give way again.
    """

    def __init__(self) -> None:
        self.stuck: Request | None = None
        self.passed: list[str] = []
        """Attempts that lacked blocks in this step."""
        self._passers: list[Request] = []

    def begin_step(self, scheduler: Scheduler) -> None:
        """Let the stuck request have what was let past it, where that is all that it lacks."""
        self.passed.clear()
        stuck, self.stuck = self.stuck, None
        if stuck is None or stuck.state not in (State.WAITING, State.PREEMPTED):
            self._passers.clear()
            return
        self._passers = [request for request in self._passers if request.block_ids or request.num_reserved]
        if scheduler.free_slots() < 1 or not self._passers or not self._would_fit(scheduler, stuck):
            return
        if scheduler.waiting.head(may_compute=True) is not stuck:
            return  # another one would get what is given up
        victims = [r for r in self._passers if r.state is State.RUNNING and r.mode is not KvMode.PREFILL]
        victims.sort(key=scheduler.policy.rank)
        while victims and not scheduler.fits(stuck):
            victim = victims.pop()
            if victim.state is State.RUNNING:  # not with the other beams of its attempt
                preemption.preempt(scheduler, victim)
                self.passed.append(victim.attempt)

    def lacks_blocks(self, scheduler: Scheduler, request: Request) -> bool:
        """Whether those behind the request may be tried; it is passed over for this step."""
        if not scheduler.policy.passes or len(self.passed) >= MOST_PASSED:
            return False
        if self.stuck is None:
            self.stuck = request
            if self._would_fit(scheduler, request):
                return False
        self.passed.append(request.attempt)
        return True

    def admitted(self, request: Request) -> None:
        if self.stuck is not None:
            self._passers.append(request)

    def any_fits(self, scheduler: Scheduler) -> bool:
        """Whether a step would admit somebody, or make way."""
        passed: list[str] = []
        while (request := scheduler.waiting.head(may_compute=True, passed=passed)) is not None:
            if scheduler.fits(request):
                return True
            if not scheduler.policy.passes or len(passed) >= MOST_PASSED or scheduler.free_slots() < 1:
                return False
            if not passed and self._would_fit(scheduler, request):
                return any(passer.state is State.RUNNING for passer in self._passers)
            passed.append(request.attempt)
        return False

    def _would_fit(self, scheduler: Scheduler, request: Request) -> bool:
        """With what was let past it."""
        held = Counter(block for passer in self._passers for block in passer.block_ids)
        pool = scheduler.kv.pool
        gain = sum(pool.refs(block) == count for block, count in held.items())
        gain += sum(passer.num_reserved for passer in self._passers)
        if preemption.waiting_beams(request):
            return scheduler.blocks_wanted(request) <= pool.available + gain
        return scheduler.kv.fits(request, -gain)
