"""The router's wait queue, on the event loop, in the order of capacity_gate.py and fair_queue.py.

enter -> room, none waits, and in time -> admitted at once
      -> else wait; admitted when prompts are computed or requests end -> admitted | refused | deadline | left
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from diptych.common.errors import OverloadedError, RequestDeadlineError
from diptych.router.fairness.admission import Admission, AdmissionDecision, FirstTokenLimit
from diptych.router.fairness.capacity_gate import CapacityGate, RoomCheck, WaitEstimate
from diptych.router.fairness.fair_queue import Entry, PlacedTokens, Share
from diptych.router.fairness.prompt_speeds import PromptSpeeds

MAX_WAITING = 4096
"""Of a single tenant; with several waiting tenants an equal part of each, so that none is rejected for others'
requests."""
_LOOK_S = 0.05
"""Seconds between two checks for news of other routers and leases; this router's own events act at once."""

REFUSE_S = 0.25
"""Seconds between two looks for requests that cannot be in time any more."""
_TIMER_S = 1e-3
"""A timer may be this early."""

_Turn = asyncio.Future[AdmissionDecision | None]
"""None: admitted."""


class WaitQueue:
    """The queue of one pool.

    Args: see CapacityGate.
        most: see MAX_WAITING.
    """

    def __init__(
        self,
        room: RoomCheck,
        *,
        window_s: float,
        share: Callable[[str], Share] = lambda _: Share(),
        placed: PlacedTokens = lambda tenant, above=0: 0.0,
        tenants: Callable[[], Collection[str]] = lambda: (),
        wait_s: WaitEstimate = lambda tenant, tokens, beside=0.0: 0.0,
        admission: Admission | None = None,
        speeds: PromptSpeeds | None = None,
        now: Callable[[], float] = time.monotonic,
        most: int = MAX_WAITING,
    ) -> None:
        self._now = now
        self._gate: CapacityGate[_Turn] = CapacityGate(
            room,
            _admit,
            window_s=window_s,
            share=share,
            placed=placed,
            tenants=tenants,
            wait_s=wait_s,
            admission=admission,
            speeds=speeds,
            now=now,
        )
        self._most = most
        self._looking: asyncio.TimerHandle | None = None
        self._refusing_at = 0.0

    def __len__(self) -> int:
        return len(self._gate)

    def use_shares(self, share: Callable[[str], Share]) -> None:
        self._gate.share = share

    @property
    def passing(self) -> int:
        return self._gate.passing

    def may_pass(
        self, tenant: str, tokens: int, limit: FirstTokenLimit | None = None, *, doubtful: bool = False
    ) -> bool:
        """See CapacityGate."""
        return self._gate.may_pass(tenant, tokens, limit, doubtful=doubtful)

    def judge(self, tenant: str, tokens: int, limit: FirstTokenLimit, arrived: float) -> AdmissionDecision:
        """See CapacityGate."""
        return self._gate.judge(tenant, tokens, limit, arrived)

    def written(self, tenant: str, tokens: int) -> None:
        """Tokens of an answer were generated; while other requests wait they are charged to the tenant."""
        self._gate.written(tenant, tokens)

    def let_in(self) -> None:
        """Call it when there may be more room than before."""
        self._gate.let_in()

    async def enter(
        self,
        tenant: str,
        tokens: int,
        *,
        priority: int,
        left_s: float,
        limit: FirstTokenLimit | None = None,
        arrived: float = 0.0,
    ) -> AdmissionDecision | None:
        """Return when the request is admitted or refused; the caller of an admitted one must reserve before awaiting
        anything. Raises: OverloadedError when too many wait; RequestDeadlineError after `left_s`."""
        if self.may_pass(tenant, tokens, limit):
            return self.judge(tenant, tokens, limit, arrived) if limit is not None else None
        if self._gate.too_many(tenant, self._most):
            raise OverloadedError("too many of your requests wait for their turn", retry_after_s=self._gate.window_s)
        turn = asyncio.get_running_loop().create_future()
        entry, decision = self._gate.wait(tenant, tokens, turn, priority=priority, limit=limit, arrived=arrived)
        if entry is None:
            return decision
        self._gate.let_in()
        self._look_later()
        try:
            return await self._turn(entry, self._now() + left_s) or decision
        finally:
            self._gate.leave(entry)
            if turn.done() and turn.result() is None:
                self._gate.arrived(entry)
                if len(self._gate):
                    self._look_later()

    async def _turn(self, entry: Entry[_Turn], deadline: float) -> AdmissionDecision | None:
        """None: admitted. Raises: RequestDeadlineError."""
        while True:
            until = deadline if entry.limit is None else min(deadline, self._gate.too_late_at(entry.limit))
            await asyncio.wait({entry.item}, timeout=max(0.0, until - self._now()) + _TIMER_S)
            if entry.item.done():
                return entry.item.result()
            if self._now() >= deadline:
                raise RequestDeadlineError("the request's deadline passed before its turn came")
            if entry.limit is not None:
                decision = self._gate.judge_again(entry)
                if decision.error is not None:
                    return decision

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        self.let_in()
        if (now := self._now()) >= self._refusing_at:
            self._refusing_at = now + REFUSE_S
            for entry, decision in self._gate.refusals():
                if not entry.item.done():
                    entry.item.set_result(decision)
        if len(self._gate):
            self._look_later()

    def close(self) -> None:
        """Stop the timer. Waiting requests end by their deadline or with the frontend."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None


def _admit(entry: Entry[_Turn]) -> bool:
    if entry.item.done():
        return False
    entry.item.set_result(None)
    return True
