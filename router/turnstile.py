"""Where requests wait in the router: while the workers have enough before them, in the order of turns.py.

    enter -> room, nobody waits -> in at once
          -> else a turn; let in as prompts get computed or requests end -> in | deadline | left

Room is measured in prompt tokens that are placed (by all routers) and not computed yet, against what the pool computes in
`window_s`. Beyond that a worker's own queue would only take the order out of our hands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from diptych.common.errors import OverloadedError, RequestDeadlineError
from diptych.router.turns import Share, Turns

MAX_WAITING = 4096
_LOOK_S = 0.05
"""Between two looks at what other routers and leases told; this router's own news is acted on at once."""


class Room(Protocol):
    def __call__(self, window_s: float) -> float:
        """Prompt tokens that the workers may be given now; infinite while their speed is unknown or they have nothing."""
        ...


class Turnstile:
    """Args:
    room: see Room.
    share: of a tenant.
    window_s: seconds of work that the pool is given ahead; 0: nobody ever waits.
    """

    def __init__(
        self, room: Room, *, window_s: float, share: Callable[[str], Share] = lambda _: Share(), most: int = MAX_WAITING
    ) -> None:
        self._room = room
        self._window_s = window_s
        self._most = most
        self.share = share
        self._turns: Turns[asyncio.Future[None]] = Turns()
        self._passing = 0
        """Tokens of those that were let in and have not come to be placed yet."""
        self._looking: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._turns)

    def _has_room(self) -> bool:
        return not self._window_s or self._room(self._window_s) > self._passing

    def may_pass(self) -> bool:
        """Whether a request need not wait now."""
        return not len(self._turns) and self._has_room()

    async def enter(self, tenant: str, tokens: int, *, priority: int, left_s: float) -> None:
        """Returns when it is the request's turn: what it takes has to be reserved before anything else is awaited.

        Raises: OverloadedError when too many wait; RequestDeadlineError after `left_s`.
        """
        if self.may_pass():
            return
        if len(self._turns) >= self._most:
            raise OverloadedError(f"{len(self._turns)} requests wait for their turn", retry_after_s=self._window_s)
        turn = asyncio.get_running_loop().create_future()
        entry = self._turns.add(tenant, tokens, turn, share=self.share(tenant), priority=priority)
        self._look_later()
        try:
            async with asyncio.timeout(left_s):
                await turn
        except TimeoutError:
            raise RequestDeadlineError("the request's deadline passed before its turn came") from None
        finally:
            self._turns.remove(entry)
            if turn.done() and not turn.cancelled():
                self._passing -= entry.tokens
                if self._turns:
                    self._look_later()

    def let_in(self) -> None:
        """There may be more room than before."""
        while self._turns and self._has_room():
            entry = self._turns.take()
            if entry is None:
                break
            if not entry.item.done():
                self._passing += entry.tokens
                entry.item.set_result(None)

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        self.let_in()
        if self._turns:
            self._look_later()

    def close(self) -> None:
        """Waiting requests end by their own deadline or with the frontend."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
