"""The router's wait queue, on the event loop, in the order of capacity_gate.py and fair_queue.py.

enter -> room, and none waits -> admitted at once
      -> else wait; admitted when prompts are computed or requests end -> admitted | deadline | left
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from diptych.common.errors import OverloadedError, RequestDeadlineError
from diptych.router.fairness.capacity_gate import CapacityGate, RoomCheck
from diptych.router.fairness.fair_queue import Entry, PlacedTokens, Share

MAX_WAITING = 4096
"""Of a single tenant; with several waiting tenants an equal part of each, so that none is rejected for others'
requests."""
_LOOK_S = 0.05
"""Seconds between two checks for news of other routers and leases; this router's own events act at once."""

_Turn = asyncio.Future[None]


class WaitQueue:
    """The queue of one pool.

    Args:
        room, window_s, share, placed: see CapacityGate.
    """

    def __init__(
        self,
        room: RoomCheck,
        *,
        window_s: float,
        share: Callable[[str], Share] = lambda _: Share(),
        placed: PlacedTokens = lambda tenant, above=0: 0.0,
        most: int = MAX_WAITING,
    ) -> None:
        self._gate: CapacityGate[_Turn] = CapacityGate(room, _admit, window_s=window_s, share=share, placed=placed)
        self._most = most
        self._looking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._gate)

    def use_shares(self, share: Callable[[str], Share]) -> None:
        self._gate.share = share

    @property
    def passing(self) -> int:
        return self._gate.passing

    def may_pass(self, tenant: str, tokens: int, *, doubtful: bool = False) -> bool:
        """See CapacityGate."""
        return self._gate.may_pass(tenant, tokens, doubtful=doubtful)

    def written(self, tenant: str, tokens: int) -> None:
        """Tokens of an answer were generated; while other requests wait they are charged to the tenant."""
        self._gate.written(tenant, tokens)

    def let_in(self) -> None:
        """Call it when there may be more room than before."""
        self._gate.let_in()

    async def enter(self, tenant: str, tokens: int, *, priority: int, left_s: float) -> None:
        """Return when the request is admitted; the caller must reserve before awaiting anything. Raises:
        OverloadedError when too many wait; RequestDeadlineError after `left_s`."""
        if self.may_pass(tenant, tokens):
            return
        if self._gate.too_many(tenant, self._most):
            raise OverloadedError("too many of your requests wait for their turn", retry_after_s=self._gate.window_s)
        turn = asyncio.get_running_loop().create_future()
        entry = self._gate.wait(tenant, tokens, turn, priority=priority)
        self._gate.let_in()
        self._look_later()
        try:
            async with asyncio.timeout(left_s):
                await turn
        except TimeoutError:
            raise RequestDeadlineError("the request's deadline passed before its turn came") from None
        finally:
            self._gate.leave(entry)
            if turn.done() and not turn.cancelled():
                self._gate.arrived(entry)
                if len(self._gate):
                    self._look_later()

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        self.let_in()
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
