"""Who may be placed now, and who waits for a turn: the same object in production (turnstile.py) and in the simulation. Pure.

    room, nobody waits -> in at once
    else wait -> let_in, when prompts get computed or requests end: turns.py says whose turn it is -> passing -> placed

Room is measured in prompt tokens that are placed (by all routers) and not computed yet, against what the pool computes in
`window_s`. Beyond that a worker's own queue would only take the order out of our hands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from diptych.router.turns import Entry, Share, Turns

T = TypeVar("T")


class Room(Protocol):
    def __call__(self, window_s: float) -> float:
        """Prompt tokens that the workers may be given now, infinite while their speed is unknown; whoever comes while it is
        above 0 is let in, however large. Never infinite only because they have nothing: all that waits would get in at once."""
        ...


class Gate(Generic[T]):
    """Args:
    room: see Room.
    admit: called with an entry whose turn it is; whether it still wanted it. Whoever did calls `arrived` once it is placed.
    window_s: seconds of work that the pool is given ahead; 0: nobody ever waits.
    share: of a tenant.
    """

    def __init__(
        self,
        room: Room,
        admit: Callable[[Entry[T]], bool],
        *,
        window_s: float,
        share: Callable[[str], Share] = lambda _: Share(),
    ) -> None:
        self._room = room
        self._admit = admit
        self.window_s = window_s
        self.share = share
        self._turns: Turns[T] = Turns()
        self.passing = 0
        """Tokens of those that were let in and have not come to be placed yet."""

    def __len__(self) -> int:
        """Those that wait."""
        return len(self._turns)

    def _has_room(self, beside: float = 0.0) -> bool:
        return not self.window_s or self._room(self.window_s) > self.passing + beside

    def may_pass(self, beside: float = 0.0) -> bool:
        """Whether a request need not wait now. `beside`: tokens that take room before it, for it alone."""
        return not len(self._turns) and self._has_room(beside)

    def wait(self, tenant: str, tokens: int, item: T, *, priority: int) -> Entry[T]:
        return self._turns.add(tenant, tokens, item, share=self.share(tenant), priority=priority)

    def leave(self, entry: Entry[T]) -> None:
        """It waits no longer. Idempotent."""
        self._turns.remove(entry)

    def arrived(self, entry: Entry[T]) -> None:
        """It was let in, and what it takes is reserved or not wanted any more."""
        self.passing -= entry.tokens

    def written(self, tenant: str, tokens: int) -> None:
        """Tokens of an answer of this tenant came."""
        if len(self._turns):
            self._turns.charge(tenant, tokens, share=self.share(tenant))

    def let_in(self) -> None:
        """There may be more room than before."""
        while len(self._turns) and self._has_room():
            entry = self._turns.take()
            if entry is None:
                break
            if self._admit(entry):
                self.passing += entry.tokens
