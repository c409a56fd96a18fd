"""EngineClient: the interface of the event loop to the step thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar, cast

from diptych.common.adapters.peft import AdapterFacts
from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import Clock, MonotonicClock
from diptych.common.errors import DiptychError, InternalError
from diptych.engine.config import EngineConfig
from diptych.engine.core import EngineCore
from diptych.engine.disk_messages import BlockStore
from diptych.engine.executor import Executor
from diptych.engine.loop import Query, StepThread
from diptych.engine.messages import (
    AttemptEvent,
    CacheDump,
    Cancel,
    Command,
    EngineAudit,
    EngineEvent,
    EngineRequest,
    EngineStats,
    Failed,
    Finished,
    LoadedAdapter,
    PrefillComplete,
    TokensOut,
)
from diptych.engine.sched.requests.output import DetokenizerFactory

_T = TypeVar("_T")
_QUERY_DEADLINE_S = 10.0


class EngineClient:
    """Starts the step thread, sends commands to it and receives its events.

    Args:
        executor: used by the step thread only, from `start` on, but for `read_adapter`; closed by `close`.
        identity: header of the block identities, without a salt (each request brings its own).
        detokenizer_factory: None: every text is "" and stop strings are refused.
        disk: files of blocks; begun by `start`, closed with the executor. None: there are none.
        on_events: called on the event loop with the events of one step, in order; must not block. The first cache event
            of an epoch has sequence 1.
    Raises: ConfigError when config, executor and identity do not fit together.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        identity: IdentityHeader,
        detokenizer_factory: DetokenizerFactory | None = None,
        on_events: Callable[[list[EngineEvent]], None] | None = None,
        *,
        clock: Clock | None = None,
        disk: BlockStore | None = None,
    ) -> None:
        clock = clock or MonotonicClock()
        core = EngineCore(executor, config, identity, clock, detokenizer_factory, disk=disk)
        self._executor = executor
        self._disk = disk
        self._thread = StepThread(core, clock, self._deliver, self._step_thread_ended)
        self._on_events = on_events
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._own: dict[str, asyncio.Queue[EngineEvent] | None] = {}
        """Attempts of `generate`, each with its events; None: the caller has left, and the attempt's end has not
        arrived yet."""

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the step thread; events go to `loop` (the running one if None)."""
        self._loop = loop or asyncio.get_running_loop()
        if self._disk is not None:
            self._disk.begin(self._thread.put)
        self._thread.start()

    def send(self, command: Command) -> None:
        """Thread-safe; never blocks. After the engine's end an EngineRequest is answered by Failed, an UnpackRange by
        RangeUnpacked(unpacked=False)."""
        self._thread.put(command)

    def read_adapter(self, folder: Path, facts: AdapterFacts) -> LoadedAdapter:
        """Read a LoRA adapter into host memory, for KeepAdapter. Call it on a thread of its own: it reads files, and delays no
        step. Raises: see ModelRunner.read_adapter."""
        return self._executor.read_adapter(folder, facts)

    def stats(self) -> EngineStats:
        """As of the last step's border; lock-free, from any thread."""
        return self._thread.stats

    async def audit(self, full: bool = False, *, deadline_s: float = _QUERY_DEADLINE_S) -> EngineAudit:
        """Raises: InternalError when the step thread does not answer in time, WorkerLostError when it has ended."""
        return await self._query(lambda core: core.scheduler.audit(full), deadline_s)

    async def dump_blocks(self, *, deadline_s: float = _QUERY_DEADLINE_S) -> CacheDump:
        """The prefix cache as of its `sequence`; all events up to there were delivered before. Raises: as audit."""
        return await self._query(lambda core: core.scheduler.kv.pool.dump(), deadline_s)

    async def close_session(self, session: bytes, *, deadline_s: float = _QUERY_DEADLINE_S) -> int:
        """See Lifecycle.close_session. Raises: as audit."""
        return await self._query(lambda core: core.scheduler.live.close_session(session), deadline_s)

    async def set_detokenizer(
        self, factory: DetokenizerFactory | None, *, deadline_s: float = _QUERY_DEADLINE_S
    ) -> None:
        """Used for requests that are sent from now on. Raises: as audit."""
        await self._query(lambda core: core.scheduler.live.set_detokenizer(factory), deadline_s)

    async def reset_cache(self, *, files: bool = False, deadline_s: float = _QUERY_DEADLINE_S) -> None:
        """Empty the prefix cache; CacheCleared follows as an event. Args: files: give the disk tier up. Raises: as audit."""
        await self._query(lambda core: core.scheduler.kv.clear(files=files), deadline_s)

    async def open_disk(self, *, deadline_s: float = _QUERY_DEADLINE_S) -> None:
        """See EngineCore.open_disk; events follow. Raises: as audit."""
        await self._query(lambda core: core.open_disk(), deadline_s)

    async def measure_copies(self, *, deadline_s: float = _QUERY_DEADLINE_S) -> float:
        """See EngineCore.measure_copies. Raises: as audit."""
        return await self._query(lambda core: core.measure_copies(), deadline_s)

    async def close(self, deadline_s: float = 5.0) -> None:
        """End the step thread; what still runs fails with WorkerLostError. Idempotent.

        Raises: InternalError when a step does not end within the deadline (the thread is a daemon and is left behind).
        """
        if self._loop is None:
            return
        self._thread.stop()
        if not await self.ends(deadline_s):
            raise InternalError(f"the step thread did not end within {deadline_s:g} s")
        self._thread.join(1.0)

    async def ends(self, within_s: float) -> bool:
        """Wait until the step thread has ended, for so long at most. Returns: whether it has."""
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokensOut | Finished]:
        """Run one LOCAL request; its events come here and not to `on_events`. Leaving the iterator cancels it.

        Raises: the error of Failed.
        """
        attempt = request.attempt
        queue: asyncio.Queue[EngineEvent] = asyncio.Queue()
        self._own[attempt] = queue
        ended = False
        try:
            self.send(request)
            while True:
                event = await queue.get()
                if isinstance(event, Failed):
                    ended = True
                    raise event.error
                if isinstance(event, (TokensOut, Finished)):
                    ended = isinstance(event, Finished)
                    yield event
                    if ended:
                        return
        finally:
            if not ended and attempt in self._own:
                self._own[attempt] = None
                self.send(Cancel(attempt))

    # ---- from the step thread ----

    def _deliver(self, events: list[EngineEvent]) -> None:
        self._call(self._on_loop, events)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The loop is closed: the process ends without close().

    def _step_thread_ended(self) -> None:
        self._call(self._ended.set)

    # ---- on the event loop ----

    def _on_loop(self, events: list[EngineEvent]) -> None:
        if self._own:
            events = [event for event in events if not self._keep(event)]
        if events and self._on_events is not None:
            self._on_events(events)

    def _keep(self, event: EngineEvent) -> bool:
        if not isinstance(event, AttemptEvent) or event.attempt not in self._own:
            return False
        attempt = event.attempt
        queue = self._own[attempt]
        if queue is not None:
            queue.put_nowait(event)
        if isinstance(event, (Finished, Failed, PrefillComplete)):
            del self._own[attempt]
        return True

    async def _query(self, function: Callable[[EngineCore], _T], deadline_s: float) -> _T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()

        def resolve(value: object, error: DiptychError | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)

        self._thread.put(Query(function, lambda value, error: self._call(resolve, value, error)))
        try:
            async with asyncio.timeout(deadline_s):
                return cast(_T, await answer)
        except TimeoutError:
            raise InternalError(f"the engine did not answer within {deadline_s:g} s") from None
