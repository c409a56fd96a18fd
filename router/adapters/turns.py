"""Turns for the workers' adapter slots, so that many adapters do not evict one another with every request.

enter -> its adapter runs somewhere, or a slot is free for it --> placed at once
      -> else wait, by adapter, in the order in which adapters began to wait
slot free -> the first adapter: all of its requests at once

A running adapter takes further requests without waiting until another adapter has waited TURN_S; then they wait behind it,
so that the slot gets free. Requests of other routers do not wait behind those of this one: an adapter that has waited LATE_S
while theirs hold slots is placed all the same, and its requests wait at the worker, whose slots are given in turn. Only
workers that both could use count: a slot that no adapter before it could use, because of its rank, is free for an adapter
at once. Requests of the base model never wait here. A worker has as many adapters of this router in use as it has slots at
most, which bounds what it installs and evicts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diptych.common.errors import OverloadedError, RequestDeadlineError
from diptych.common.store.worker_record import WorkerRecord
from diptych.router.placement.adapters import AdapterNeed, Running, why_not

TURN_S = 1.0
LATE_S = 5.0
MAX_WAIT_S = 30.0
MAX_WAITING = 512
"""Of one tenant."""
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    need: AdapterNeed
    tenant: str
    turn: asyncio.Future[None]
    since: float


class AdapterTurns:
    """The turns of one model's workers.

    Args:
        workers: the usable decode workers.
        running: see placement/adapters.py.
        own: of these, those of this router's requests.
        now: seconds on a monotonic clock.
        on_refused: called for each request that is refused.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[WorkerRecord]],
        running: Running,
        own: Running,
        now: Callable[[], float],
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._workers = workers
        self._running = running
        self._own = own
        self._now = now
        self.on_refused = on_refused
        self._waiting: dict[str, list[_Waiter]] = {}
        """By adapter, in the order in which adapters began to wait."""
        self._entering: Counter[str] = Counter()
        """Requests that have their turn and are not placed yet."""
        self._needs: dict[str, AdapterNeed] = {}
        """Of these adapters."""
        self._of_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def may_pass(self, need: AdapterNeed) -> bool:
        """Whether a request would be placed at once."""
        return need.adapter_id not in self._waiting and self._may_enter(need, [w[0] for w in self._waiting.values()])

    def _may_enter(self, need: AdapterNeed, before: Sequence[_Waiter]) -> bool:
        """Whether a request may be placed though these wait, the first of their adapters each."""
        able = self._able(need)
        names = {record.worker_id for record in able}
        wanted: set[str] = set()
        """Workers that both could use."""
        is_due = False
        for waiter in before:
            if common := names & {record.worker_id for record in self._able(waiter.need)}:
                wanted |= common
                is_due = is_due or self._now() - waiter.since >= TURN_S
        if not wanted:
            return self._has_room(need, able)
        runs_there = any(need.adapter_id in self._running(record) for record in able if record.worker_id in wanted)
        if not is_due and (runs_there or self._entering[need.adapter_id]):
            return True
        others = [record for record in able if record.worker_id not in wanted]
        return not runs_there and bool(others) and self._has_room(need, others)

    def _is_late(self, waiter: _Waiter) -> bool:
        """Whether it goes to a worker whose slots other routers hold. A router has no more adapters at a worker than that has
        slots."""
        if self._now() - waiter.since < LATE_S:
            return False
        for record in self._able(waiter.need):
            own = set(self._own(record))
            coming = sum(name not in own and not why_not(record, need) for name, need in self._needs.items())
            if not own.issuperset(self._running(record)) and len(own) + coming < record.max_loras:
                return True
        return False

    def _able(self, need: AdapterNeed) -> list[WorkerRecord]:
        return [record for record in self._workers() if not why_not(record, need)]

    def _has_room(self, need: AdapterNeed, able: Sequence[WorkerRecord]) -> bool:
        if not able:
            return True  # the placement says what is wrong
        running = [self._running(record) for record in able]
        if self._entering[need.adapter_id] or any(need.adapter_id in ids for ids in running):
            return True
        free = sum(max(0, record.max_loras - len(ids)) for record, ids in zip(able, running, strict=True))
        coming = sum(
            not any(name in ids for ids in running) and any(not why_not(record, self._needs[name]) for record in able)
            for name in self._entering
        )
        return free > coming

    async def enter(self, need: AdapterNeed, tenant: str, left_s: float) -> float:
        """Wait for the turn; the caller must call `leave` once the request is placed, or will not be. Returns: seconds waited.
        Raises: OverloadedError, RequestDeadlineError."""
        if self.may_pass(need):
            self._has_turn(need)
            return 0.0
        if self._of_tenant[tenant] >= MAX_WAITING:
            raise self._refused(f"{MAX_WAITING} of your requests wait for a slot of their adapters")
        since = self._now()
        waiter = _Waiter(need, tenant, asyncio.get_running_loop().create_future(), since)
        self._waiting.setdefault(need.adapter_id, []).append(waiter)
        self._of_tenant[tenant] += 1
        self.let_in()
        try:
            async with asyncio.timeout(min(left_s, MAX_WAIT_S)):
                await waiter.turn
        except BaseException as error:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self.leave(need)  # it had its turn a moment before
            if not isinstance(error, TimeoutError):
                raise
            if left_s <= MAX_WAIT_S:
                raise RequestDeadlineError("the request's deadline passed before its adapter had a slot") from None
            raise self._refused(f"no slot was free for the request's adapter in {MAX_WAIT_S:g} s") from None
        finally:
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
            self._forget(waiter)
        return self._now() - since

    def _refused(self, text: str) -> OverloadedError:
        self.on_refused()
        return OverloadedError(text, retry_after_s=RETRY_AFTER_S)

    def _forget(self, waiter: _Waiter) -> None:
        waiters = self._waiting.get(waiter.need.adapter_id, [])
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[waiter.need.adapter_id]
                self.let_in()

    def _has_turn(self, need: AdapterNeed) -> None:
        self._entering[need.adapter_id] += 1
        self._needs[need.adapter_id] = need

    def leave(self, need: AdapterNeed) -> None:
        """A request that had its turn is placed, or will not be."""
        name = need.adapter_id
        self._entering[name] -= 1
        if not self._entering[name]:
            del self._entering[name], self._needs[name]
        self.let_in()

    def let_in(self) -> None:
        """Call it when there may be more room than before."""
        before: list[_Waiter] = []
        for name, waiters in list(self._waiting.items()):
            if not self._may_enter(waiters[0].need, before) and not self._is_late(waiters[0]):
                before.append(waiters[0])
                continue
            del self._waiting[name]
            for waiter in waiters:
                if not waiter.turn.done():
                    self._has_turn(waiter.need)
                    waiter.turn.set_result(None)
