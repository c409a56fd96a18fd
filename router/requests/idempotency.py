"""Idempotency keys of this router: one request of a key at a time, and none for a while after one has succeeded.

begin --unknown--> RUNNING --succeeded--> DONE --window--> forgotten
                      |------failed or left--------------> forgotten: the caller may retry
begin while RUNNING or DONE: DuplicateRequestError
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from diptych.common.clock import Clock
from diptych.common.errors import DuplicateRequestError, OverloadedError

WINDOW_S = 600.0
MAX_KEYS = 16_384


@dataclass(slots=True)
class Outcome:
    """Set `well` when the request has succeeded."""

    well: bool = False


class IdempotencyKeys:
    """The keys of this router. `window_s`: how long a key is kept after its request has succeeded. `max_keys`: most
    keys at once; beyond it the oldest done ones are dropped."""

    def __init__(self, clock: Clock, *, window_s: float = WINDOW_S, max_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._window_s = window_s
        self._max_keys = max_keys
        self._running: set[tuple[str, str]] = set()
        self._done: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Key -> when it is dropped, in that order."""

    def __len__(self) -> int:
        return len(self._running) + len(self._done)

    @contextmanager
    def running(self, tenant: str, key: str) -> Iterator[Outcome]:
        """Hold the key while the request runs. An empty key is not held. Raises: DuplicateRequestError; OverloadedError
        when too many requests with keys run."""
        outcome = Outcome()
        if not key:
            yield outcome
            return
        now, name = self._clock.now(), (tenant, key)
        while self._done and next(iter(self._done.values())) <= now:
            self._done.popitem(last=False)
        if name in self._running or name in self._done:
            what = "runs" if name in self._running else "has succeeded"
            raise DuplicateRequestError(f"a request with this idempotency key {what} already", param="idempotency_key")
        if len(self._running) >= self._max_keys:
            raise OverloadedError("too many requests with idempotency keys are running", retry_after_s=1.0)
        while len(self) >= self._max_keys:
            self._done.popitem(last=False)
        self._running.add(name)
        try:
            yield outcome
        finally:
            self._running.discard(name)
            if outcome.well:
                self._done[name] = self._clock.now() + self._window_s

    @asynccontextmanager
    async def hold(self, tenant: str, key: str) -> AsyncIterator[Outcome]:
        """As `running`, in the form that a router of several processes has, too (processes/siblings.py)."""
        with self.running(tenant, key) as outcome:
            yield outcome
