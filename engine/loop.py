"""The step thread: commands in, one list of events a step out.

The thread blocks on its inbox when the last step found nothing to do, and never waits for the event loop. Commands are handled
between two steps; slabs that came back and the commands of pulls (`needs_no_step`) between two layers of a step, too, where the
runner reports them. A runner that raises ends the requests of that step. A lost executor or a bug ends the thread: every request
fails, `alive` turns false, and later commands are refused on the sender's thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from diptych.common.clock import Clock
from diptych.common.errors import DiptychError, WorkerLostError
from diptych.engine.core import EngineCore
from diptych.engine.executor import ExecutorLost
from diptych.engine.messages import (
    Cancel,
    Command,
    EndPull,
    EngineEvent,
    EngineRequest,
    EngineStats,
    Failed,
    FirstToken,
    GrantSlabs,
    PrefillComplete,
    PublishCached,
    PullBlocks,
    PullCommand,
    RangeUnpacked,
    UnpackRange,
    needs_no_step,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_COPY_POLL_S = 0.00005
"""Interval at which copies of KV are polled."""
_HAND_OVER_S = 0.0002
"""Before the next prompt is launched on a device, which takes the interpreter for milliseconds: the event loop and the transfer
thread offer the KV of the last one, and send its token."""
_IDLE_WAIT_S = 60.0
"""Every wait has a deadline; this one only bounds the effect of a lost wake-up."""


@dataclass(frozen=True, slots=True)
class Query:
    """A function of the core, called between two steps; its value goes to `reply`."""

    function: Callable[[EngineCore], object]
    reply: Callable[[object, DiptychError | None], None]


class _Stop:
    pass


class _Aside:
    """There is something in `_grants` or in `_pulls`."""


_ASIDE = _Aside()


@dataclass(frozen=True, slots=True)
class _Lost:
    """The executor was lost, maybe while nothing is computed."""

    reason: str


class _Cancelled:
    """Attempts whose Cancel is still in the inbox; every attempt, once the engine closes. Read between the layers of a
    step."""

    def __init__(self) -> None:
        self._attempts: set[str] = set()
        self.everything = False

    def add(self, attempt: str) -> None:
        self._attempts.add(attempt)

    def discard(self, attempt: str) -> None:
        self._attempts.discard(attempt)

    def __contains__(self, attempt: object) -> bool:
        return self.everything or attempt in self._attempts


class StepThread:
    """Owns the core from `start` on.

    Args:
        deliver: takes one step's events; called on the step thread (or, for refusals, on the sender's) and must not
        block.
        on_exit: called once, as the thread's last act.
    """

    def __init__(
        self,
        core: EngineCore,
        clock: Clock,
        deliver: Callable[[list[EngineEvent]], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._core = core
        self._clock = clock
        self._deliver = deliver
        self._on_exit = on_exit
        self._inbox: SimpleQueue[Command | Query | _Stop | _Aside | _Lost] = SimpleQueue()
        self._grants: SimpleQueue[GrantSlabs] = SimpleQueue()
        """Slabs that came back: packing uses them at once, also while a step runs."""
        self._pulls: SimpleQueue[PullCommand] = SimpleQueue()
        """Commands of pulls: handled in their order, and before what was put into the inbox after them."""
        self._polled_at = clock.now()
        """When the thread last looked for commands of pulls."""
        self._cancelled = _Cancelled()
        self._alive = True
        self._stopping = False
        self._hands_over = False
        """A prompt's hand-off is among the events that were delivered."""
        self._stats = core.stats()
        self._thread = threading.Thread(target=self._run, name="diptych-step", daemon=True)

    @property
    def stats(self) -> EngineStats:
        """The last snapshot; costs an attribute read."""
        return self._stats

    def start(self) -> None:
        self._thread.start()

    def put(self, item: Command | Query) -> None:
        """Thread-safe, never blocks. On a dead thread the command is refused at once."""
        if isinstance(item, Cancel):
            self._cancelled.add(item.attempt)
        if isinstance(item, GrantSlabs):
            self._grants.put(item)
            self._inbox.put(_ASIDE)
        elif needs_no_step(item):
            self._pulls.put(item)
            self._inbox.put(_ASIDE)
        else:
            self._inbox.put(item)
        if not self._alive:
            self._refuse_inbox()

    def stop(self) -> None:
        """End after the running step, which is aborted between two layers."""
        self._cancelled.everything = True
        self._inbox.put(_Stop())

    def join(self, timeout_s: float) -> bool:
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- on the step thread ----

    def _run(self) -> None:
        end: DiptychError = WorkerLostError("the engine was closed")
        try:
            self._loop()
        except Exception as error:
            _log.critical("the step thread died", exc_info=True)
            # Its requests can go on at another worker: nothing says that one of them was the cause.
            end = WorkerLostError(f"the engine died: {type(error).__name__}: {error}")
        finally:
            self._alive = False
            self._stats = replace(self._stats, alive=False, busy_since=None, num_running=0, num_waiting=0)
            try:
                self._core.fail_all(end)
                self._flush()
            except Exception:  # the collections may be what is broken: report each end directly
                _log.critical("the dead engine's requests could not be freed", exc_info=True)
                self._deliver([Failed(attempt, end) for attempt in self._core.scheduler.requests])
            self._refuse_inbox()
            self._close_executor()
            self._on_exit()

    def _close_executor(self) -> None:
        try:
            self._core.close()
        except Exception:
            _log.critical("the executor could not be closed", exc_info=True)

    def _loop(self) -> None:
        core = self._core
        core.on_launched(self._flush)
        core.on_lost(lambda reason: self._inbox.put(_Lost(reason)))
        core.on_packing(self._take_grants, self._flush)
        core.on_layer(self._poll_pulls)
        worked = False
        while True:
            if not worked and core.is_copying:
                self._await_copy()
            elif core.plan_at is not None:
                self._wait_to_plan(core.plan_at)
            else:
                until_s = min(_IDLE_WAIT_S, core.wakes_at - self._clock.now())
                self._drain(0.0 if worked else max(0.0, until_s))
            if self._stopping:
                core.wait_for_step()
                return
            if core.is_synchronous and not (worked and core.events_may_wait):
                self._flush()  # what is known does not wait for the step; on a device it is sent at its launch
            self._stats = core.stats(busy_since=self._clock.now())
            worked = core.step(self._cancelled)
            # The threads share the interpreter: handling many tokens on the event loop delays the next step's launch.
            self._hands_over = False
            self._stats = core.stats()  # before the events: who has an answer finds it counted
            if not (worked and core.events_may_wait):
                self._flush()
            if self._hands_over and not core.is_synchronous and core.plan_at is None:
                time.sleep(_HAND_OVER_S)

    def _await_copy(self) -> None:
        """Until a copy of KV is done, or there is a command. The copy may be the last one that a request waits for."""
        while not self._core.copy_is_done():
            if self._drain(_COPY_POLL_S):
                return
        self._flush()

    def _wait_to_plan(self, until: float) -> None:
        """A step is on the device: handle commands until it is time to plan the next one."""
        while not self._stopping and (left := until - self._clock.now()) > 0.0:
            came = self._core.is_copying and self._core.copy_is_done()
            if self._drain(min(left, _COPY_POLL_S) if self._core.is_copying else left) or came:
                self._flush()
        self._drain(0.0)

    def _drain(self, wait_s: float) -> bool:
        """Handle what is in the inbox. Returns: whether there was anything."""
        some = False
        self._note_poll()
        try:
            item = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                some = True
                self._take(item)
                item = self._inbox.get_nowait()
        except Empty:
            return some
        finally:
            if wait_s:
                self._polled_at = self._clock.now()  # a command is taken at once while the thread waits for one

    def _note_poll(self) -> None:
        now = self._clock.now()
        self._core.scheduler.throughput.observe_poll(now - self._polled_at)
        self._polled_at = now

    def _take_grants(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._core.handle(self._grants.get_nowait())

    def _poll_pulls(self) -> bool:
        """In the midst of a step. Returns: whether there was anything."""
        self._note_poll()
        return self._take_pulls()

    def _take_pulls(self) -> bool:
        some = False
        with contextlib.suppress(Empty):
            while True:
                self._core.handle(self._pulls.get_nowait())
                some = True
        return some

    def _take(self, item: Command | Query | _Stop | _Aside | _Lost) -> None:
        if isinstance(item, _Stop):
            self._stopping = True
        elif isinstance(item, _Aside):
            self._take_grants()
            self._take_pulls()
        elif isinstance(item, _Lost):
            raise ExecutorLost(item.reason)
        elif isinstance(item, Query):
            self._flush()  # the events that a value depends on are delivered before it
            item.reply(item.function(self._core), None)
        else:
            self._core.handle(item)
            if isinstance(item, FirstToken):
                self._stats = self._core.stats()  # it may be the whole answer
                self._flush()  # at once: its KV may be here, and launching its first step takes a millisecond
            elif isinstance(item, Cancel):
                self._cancelled.discard(item.attempt)

    def _flush(self) -> None:
        events = self._core.take_events()
        if events:
            self._deliver(events)
            self._hands_over |= any(isinstance(event, PrefillComplete) for event in events)

    def _refuse_inbox(self) -> None:
        refused: list[EngineEvent] = []
        error = WorkerLostError("the engine has ended")
        for item in (*_everything(self._pulls), *_everything(self._inbox)):
            if isinstance(item, EngineRequest | PublishCached | PullBlocks | EndPull):
                refused.append(Failed(item.attempt, error))
            elif isinstance(item, UnpackRange):
                refused.append(RangeUnpacked(item.attempt, item.job, False))
            elif isinstance(item, Query):
                item.reply(None, error)
        if refused:
            self._deliver(refused)


def _everything(queue: SimpleQueue[_T]) -> Iterator[_T]:
    with contextlib.suppress(Empty):
        while True:
            yield queue.get_nowait()
