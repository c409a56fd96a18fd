"""A request that lacks blocks is passed by requests that fit, as long as they use nothing that it lacks."""

from __future__ import annotations

from collections.abc import Collection

from diptych.engine.messages import KvMode
from diptych.engine.sched.lifecycle import preemption
from diptych.engine.sched.lifecycle.lifecycle import Lifecycle
from diptych.engine.sched.requests.request import Request, State

MOST_PASSED = 16
"""In one step: each is looked up in the cache."""


class Passing:
    """The first request that lacked blocks, and those that were admitted past it while it did.

    They take nothing from it: it would not fit without them either. As soon as it would, no further request passes, and
    those that passed are preempted where that is possible."""

    def __init__(self, live: Lifecycle) -> None:
        self._live = live
        self._stuck: Request | None = None
        self._passed: list[str] = []
        self._passers: list[Request] = []

    @property
    def passed(self) -> Collection[str]:
        """Attempts that lacked blocks in this step."""
        return self._passed

    @property
    def is_busy(self) -> bool:
        """A request lacked blocks: whether that one is admitted next, or another one past it, `begin_step` decides."""
        return self._stuck is not None or bool(self._passed)

    def begin_step(self) -> None:
        """Preempt what was admitted past the stuck request, if the stuck one fits then."""
        live = self._live
        self._passed.clear()
        stuck, self._stuck = self._stuck, None
        if stuck is None or stuck.state not in (State.WAITING, State.PREEMPTED):
            self._passers.clear()
            return
        self._passers = [request for request in self._passers if request.holds_blocks]
        if live.free_slots() < 1 or not self._passers or not self._would_fit(stuck):
            return
        if live.waiting.head(may_compute=True) is not stuck:
            return  # another one would get what is given up
        victims = [r for r in self._passers if r.state is State.RUNNING and r.mode is not KvMode.PREFILL]
        victims.sort(key=live.policy.rank)
        while victims and not preemption.fits(live, stuck):
            victim = victims.pop()
            if victim.state is State.RUNNING:  # not preempted with the other beams of its attempt
                live.preempt(victim)
                self._passed.append(victim.attempt)

    def lacks_blocks(self, request: Request) -> bool:
        """Whether those behind the request may be tried; it is passed over for this step."""
        if not self._live.policy.passes or len(self._passed) >= MOST_PASSED:
            return False
        if self._stuck is None:
            self._stuck = request
            if self._would_fit(request):
                return False
        self._passed.append(request.attempt)
        return True

    def admitted(self, request: Request) -> None:
        if self._stuck is not None:
            self._passers.append(request)

    def any_fits(self) -> bool:
        """Whether a step would admit or preempt a request."""
        live = self._live
        passed: list[str] = []
        while (request := live.waiting.head(may_compute=True, passed=passed)) is not None:
            if preemption.fits(live, request):
                return True
            if not live.policy.passes or len(passed) >= MOST_PASSED or live.free_slots() < 1:
                return False
            if not passed and self._would_fit(request):
                return any(passer.state is State.RUNNING for passer in self._passers)
            passed.append(request.attempt)
        return False

    def _would_fit(self, request: Request) -> bool:
        """If those that passed had not been admitted."""
        live = self._live
        gain = live.kv.freed_by(self._passers, reserved=True)
        if live.beams.preempted_with(request):
            return live.kv.has_room(preemption.blocks_wanted(live, request), gain)
        return live.kv.fits(request, [-count for count in gain])
