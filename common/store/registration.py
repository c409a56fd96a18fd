"""A worker's lease and event stream in the store, kept up while the worker runs.

    start() -> [ heartbeat: put_worker, every heartbeat_s ]  until close() or fenced
               [ events: offer() -> bounded queue -> append_events in batches ]

The store may be unavailable at any time. Both loops retry without limit: after a FLUSHALL the next heartbeat writes the
row again, and a heartbeat that was written wakes events that could not be. Events that do not fit into the queue are
dropped, which leaves a gap in the sequence; readers then fetch a snapshot from the worker. So the engine never blocks
here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from diptych.common.clock import Clock
from diptych.common.store.interface import KvEvent, Store, StoreError
from diptych.common.store.worker_record import WorkerRecord
from diptych.common.tiers import TIER_NAMES, with_sequences

_MAX_QUEUED_KEYS = 65_536
_MAX_QUEUED_EVENTS = 4_096
_BATCH = 64
_CLOSE_TIMEOUT_S = 1.0
_MAX_RETRY_S = 0.25
"""Between two attempts to write a heartbeat: an empty store is filled within that time of its return."""

log = structlog.get_logger(__name__)


class WorkerRegistration:
    """Keeps one worker registered.

    Args:
        record: returns the worker's current facts; called at every heartbeat on the event loop, must not block.
        ttl_s: lease; several heartbeats long.
        on_fenced: called once, when a younger incarnation took the name; nothing is written afterwards.
    """

    def __init__(
        self,
        store: Store,
        record: Callable[[], WorkerRecord],
        *,
        ttl_s: float,
        heartbeat_s: float,
        clock: Clock,
        on_fenced: Callable[[], None] | None = None,
    ) -> None:
        if not 0 < heartbeat_s < ttl_s:
            raise ValueError(f"heartbeat_s={heartbeat_s}, ttl_s={ttl_s}: the lease must outlast a heartbeat")
        self._store = store
        self._record = record
        self._ttl_s = ttl_s
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._on_fenced = on_fenced
        self._queue: deque[KvEvent] = deque()
        self._queued_keys = 0
        self._epoch: int | None = None
        self._sequences = dict.fromkeys(TIER_NAMES, 0)
        self._wake = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._beaten = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._last_ok: float | None = None
        self._connected: bool | None = None
        self._identity: tuple[str, str] | None = None
        self.fenced = False
        self.dropped_events = 0

    @property
    def connected(self) -> bool:
        """Whether the last heartbeat was written."""
        return bool(self._connected)

    @property
    def seconds_since_heartbeat(self) -> float | None:
        """Age of the last heartbeat that was written; None: none was."""
        return None if self._last_ok is None else self._clock.now() - self._last_ok

    async def start(self) -> None:
        """Start both loops and return at once; an unavailable store is retried in the background."""
        if self._tasks:
            raise RuntimeError("already started")
        self._tasks = [
            asyncio.create_task(self._heartbeats(), name="registration-heartbeat"),
            asyncio.create_task(self._event_writer(), name="registration-events"),
        ]

    async def close(self) -> None:
        """Stop writing and end the lease, if the store answers within a second."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self.fenced or self._identity is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._store.remove_worker(*self._identity)
        except (StoreError, TimeoutError) as err:
            log.warning("could not remove the lease; it will expire", error=str(err))

    def beat_now(self) -> None:
        """Write the record at once (its state changed) instead of at the next heartbeat."""
        self._beat_now.set()

    def offer(self, event: KvEvent) -> None:
        """Queue a cache event. Never blocks; when the queue is full everything queued is dropped and readers resync."""
        if self.fenced:
            return
        self._epoch = event.epoch
        if event.kind == "cleared":
            self._sequences = dict.fromkeys(TIER_NAMES, 0)
        self._sequences[event.tier] = event.sequence
        if event.kind == "cleared":
            self._queue.clear()  # earlier events are void
            self._queued_keys = 0
        elif len(self._queue) >= _MAX_QUEUED_EVENTS or self._queued_keys + len(event.keys) > _MAX_QUEUED_KEYS:
            self.dropped_events += len(self._queue) + 1
            self._queue.clear()
            self._queued_keys = 0
            return
        self._queue.append(event)
        self._queued_keys += len(event.keys)
        self._wake.set()

    def _current_record(self) -> WorkerRecord:
        record = self._record()
        if self._epoch is not None:
            tiers = with_sequences(record.tiers, self._sequences)
            record = msgspec.structs.replace(record, event_epoch=self._epoch, tiers=tiers)
        return record

    async def beat(self) -> bool:
        """Send one heartbeat. Returns False when fenced. Raises: StoreError."""
        record = self._current_record()
        self._identity = (record.worker_id, record.incarnation)
        if await self._store.put_worker(record, ttl_s=self._ttl_s):
            self._last_ok = self._clock.now()
            self._beaten.set()
            return True
        self.fenced = True
        self._queue.clear()
        log.error("fenced: a younger incarnation holds the name", worker=record.worker_id)
        if self._on_fenced is not None:
            self._on_fenced()
        return False

    async def flush_events(self) -> int:
        """Write up to a batch of queued events; they stay queued on StoreError (readers ignore a repeat)."""
        batch = [self._queue[i] for i in range(min(_BATCH, len(self._queue)))]
        if not batch or self.fenced:
            return 0
        await self._store.append_events(self._worker_id(), batch)
        # The queue may have been cleared meanwhile: remove only what was written.
        for event in batch:
            if self._queue and self._queue[0] is event:
                self._queue.popleft()
                self._queued_keys -= len(event.keys)
        return len(batch)

    def _worker_id(self) -> str:
        if self._identity is None:
            record = self._record()
            self._identity = (record.worker_id, record.incarnation)
        return self._identity[0]

    def _note(self, connected: bool, error: str = "") -> None:
        if connected is not self._connected:
            self._connected = connected
            if connected:
                log.info("registered in the store")
            else:
                log.warning("cannot write the lease; retrying", error=error)

    async def _heartbeats(self) -> None:
        backoff_s = 0.05
        while True:
            try:
                if not await self.beat():
                    return
                self._note(True)
                backoff_s = 0.05
                pause_s = self._heartbeat_s
            except StoreError as err:
                self._note(False, str(err))
                pause_s = min(backoff_s, self._heartbeat_s, _MAX_RETRY_S)
                backoff_s *= 2
            await _set_within(self._beat_now, pause_s)
            self._beat_now.clear()

    async def _event_writer(self) -> None:
        while not self.fenced:
            await self._wake.wait()
            self._wake.clear()
            while self._queue and not self.fenced:
                self._beaten.clear()
                try:
                    await self.flush_events()
                except StoreError:
                    await _set_within(self._beaten, self._heartbeat_s)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Return once the event is set, or after so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
