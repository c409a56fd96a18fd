"""Who may be placed now, and who waits for a turn: the same object in production (wait_queue.py) and in the simulation. Pure.

    room, nobody waits -> in at once
    else wait -> let_in, when prompts get computed or requests end: deficit_round_robin.py says whose turn
    -> passing -> placed

RoomCheck is counted for each worker and each tenant alone, and for a request's size: of the tenant's prompts that are placed there and
not computed yet, what the worker computes before the request, against what it computes in `window_s` (backlog.py). Workers
compute tenants in equal shares and short prompts before long ones: so a short request finds little before it, and what other
tenants sent takes no more than their shares. Beyond the window a worker's own queue would only take the order out of our hands.
When there is no room for whose turn it is, others for which there is go first, at the price that
deficit_round_robin.py names: so it is the
turns, with their weights, that say how much each tenant gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from diptych.router.fairness.deficit_round_robin import DeficitRoundRobin, Entry, Share

T = TypeVar("T")


class RoomCheck(Protocol):
    def __call__(
        self, window_s: float, tenant: str, tokens: int, beside: float = 0.0, *, doubtful: bool = False
    ) -> bool:
        """Whether some worker has less than `window_s` of the tenant's own to compute before a request of so many tokens, with
        `beside` tokens more; also while their speed is unknown. `doubtful`: count tickets that nobody has handed in yet."""
        ...


class CapacityGate(Generic[T]):
    """Args:
    room: see RoomCheck.
    admit: called with an entry whose turn it is; whether it still wanted it. Whoever did calls `arrived` once it is placed.
    window_s: seconds of work that the pool is given ahead; 0: nobody ever waits.
    share: of a tenant.
    """

    def __init__(
        self,
        room: RoomCheck,
        admit: Callable[[Entry[T]], bool],
        *,
        window_s: float,
        share: Callable[[str], Share] = lambda _: Share(),
    ) -> None:
        self._room = room
        self._admit = admit
        self.window_s = window_s
        self.share = share
        self._turns: DeficitRoundRobin[T] = DeficitRoundRobin()
        self._passing: set[Entry[T]] = set()
        """Those that were let in and have not come to be placed yet."""

    def __len__(self) -> int:
        """Those that wait."""
        return len(self._turns)

    @property
    def passing(self) -> int:
        """Tokens that were let in and are not placed yet."""
        return sum(entry.tokens for entry in self._passing)

    def _has_room(self, tenant: str, tokens: int, *, doubtful: bool = False) -> bool:
        passing = (entry.tokens for entry in self._passing if entry.tenant == tenant)
        before = sum(passed for passed in passing if passed <= tokens)
        return not self.window_s or self._room(self.window_s, tenant, tokens, before, doubtful=doubtful)

    def may_pass(self, tenant: str, tokens: int, *, doubtful: bool = False) -> bool:
        """Whether a request need not wait now. `doubtful`: count tickets that nobody has handed in yet."""
        return not len(self._turns) and self._has_room(tenant, tokens, doubtful=doubtful)

    def too_many(self, tenant: str, most: int) -> bool:
        """See Turns."""
        return self._turns.too_many(tenant, most)

    def wait(self, tenant: str, tokens: int, item: T, *, priority: int) -> Entry[T]:
        return self._turns.add(tenant, tokens, item, share=self.share(tenant), priority=priority)

    def leave(self, entry: Entry[T]) -> None:
        """It waits no longer. Idempotent."""
        self._turns.remove(entry)

    def arrived(self, entry: Entry[T]) -> None:
        """It was let in, and what it takes is reserved or not wanted any more."""
        self._passing.discard(entry)

    def written(self, tenant: str, tokens: int) -> None:
        """Tokens of an answer of this tenant came."""
        if len(self._turns):
            self._turns.charge(tenant, tokens, share=self.share(tenant))

    def let_in(self) -> None:
        """There may be more room than before, or somebody new."""
        while (turn := self._turns.next()) is not None:
            entry = turn if self._has_room(turn.tenant, turn.tokens) else self._passer(turn)
            if entry is None:
                break
            self._turns.take(entry, before=turn)
            if self._admit(entry):
                self._passing.add(entry)

    def _passer(self, turn: Entry[T]) -> Entry[T] | None:
        """Who may go before the one whose turn it is, and for whom there is no room."""
        return next((e for e in self._turns.may_pass(turn) if self._has_room(e.tenant, e.tokens)), None)
