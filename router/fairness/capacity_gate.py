"""Decides which requests may be placed now and which wait; used in production (wait_queue.py) and in the simulation.
Pure.

    room, and none waits -> admitted at once
    else wait -> let_in, when prompts are computed or requests end, in the order of fair_queue.py
    -> passing -> placed

Room is computed per worker and tenant, and for a request's size: the tokens of the tenant's placed prompts that the
worker computes before the request, against what it computes in `window_s` (backlog.py). Workers compute tenants in
equal shares and short prompts before long ones; so a short request finds little before it, and other tenants take no
more than their shares. A longer window would only move the order into the workers' queues. When there is no room for
the next request, others with room pass it, within the bounds of fair_queue.py; so turns and weights
determine each tenant's part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from diptych.router.fairness.fair_queue import Entry, FairQueue, PlacedTokens, Share

T = TypeVar("T")


class RoomCheck(Protocol):
    def __call__(
        self, window_s: float, tenant: str, tokens: int, beside: float = 0.0, *, doubtful: bool = False
    ) -> bool:
        """Whether some worker has less than `window_s` of the tenant's prompts to compute before a request of `tokens`,
        plus `beside` tokens. Also true while the rates are unknown. `doubtful`: count tickets not yet redeemed."""
        ...


class CapacityGate(Generic[T]):
    """The gate of one pool.

    Args:
        room: see RoomCheck.
        admit: called with the next entry; returns whether it was still waiting. Its owner calls `arrived` once it is
            placed.
        window_s: seconds of work that the pool gets ahead; 0: none waits.
        share: weight and rank of a tenant.
        placed: tokens placed and not computed; without those that were admitted and are not placed yet.
    """

    def __init__(
        self,
        room: RoomCheck,
        admit: Callable[[Entry[T]], bool],
        *,
        window_s: float,
        share: Callable[[str], Share] = lambda _: Share(),
        placed: PlacedTokens = lambda tenant, above=0: 0.0,
    ) -> None:
        self._room = room
        self._admit = admit
        self.window_s = window_s
        self.share = share
        self._placed = placed
        self._turns: FairQueue[T] = FairQueue(self._not_computed)
        self._passing: set[Entry[T]] = set()
        """Admitted entries that are not placed yet."""

    def __len__(self) -> int:
        """Number of waiting entries."""
        return len(self._turns)

    @property
    def passing(self) -> int:
        """Tokens that were admitted and are not placed yet."""
        return sum(entry.tokens for entry in self._passing)

    def _not_computed(self, tenant: str, above: int = 0) -> float:
        """See PlacedTokens."""
        passing = sum(max(0, entry.tokens - above) for entry in self._passing if entry.tenant == tenant)
        return passing + self._placed(tenant, above)

    def _has_room(self, tenant: str, tokens: int, *, doubtful: bool = False) -> bool:
        passing = (entry.tokens for entry in self._passing if entry.tenant == tenant)
        before = sum(passed for passed in passing if passed <= tokens)
        return not self.window_s or self._room(self.window_s, tenant, tokens, before, doubtful=doubtful)

    def may_pass(self, tenant: str, tokens: int, *, doubtful: bool = False) -> bool:
        """Whether a request need not wait now. `doubtful`: count tickets not yet redeemed."""
        return not self._turns and self._has_room(tenant, tokens, doubtful=doubtful)

    def too_many(self, tenant: str, most: int) -> bool:
        """See FairQueue."""
        return self._turns.too_many(tenant, most)

    def wait(self, tenant: str, tokens: int, item: T, *, priority: int) -> Entry[T]:
        return self._turns.add(tenant, tokens, item, share=self.share(tenant), priority=priority)

    def leave(self, entry: Entry[T]) -> None:
        """Stop waiting. Idempotent."""
        self._turns.remove(entry)

    def arrived(self, entry: Entry[T]) -> None:
        """An admitted entry was reserved, or cancelled."""
        self._passing.discard(entry)

    def written(self, tenant: str, tokens: int) -> None:
        """Tokens of an answer of this tenant were generated."""
        if self._turns:
            self._turns.charge(tenant, tokens, share=self.share(tenant))

    def let_in(self) -> None:
        """Admit waiting requests; call it when there may be more room, or a new entry."""
        while (turn := self._turns.next()) is not None:
            entry = turn if self._has_room(turn.tenant, turn.tokens) else self._passer(turn)
            if entry is None:
                break
            self._turns.take(entry, before=turn)
            if self._admit(entry):
                self._passing.add(entry)

    def _passer(self, turn: Entry[T]) -> Entry[T] | None:
        """An entry that may pass `turn`, for which there is no room, and for which there is room."""
        return next((e for e in self._turns.may_pass(turn) if self._has_room(e.tenant, e.tokens)), None)
