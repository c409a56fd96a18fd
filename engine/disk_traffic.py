"""Blocks on their way between the pool and files, on the step thread: it copies, and threads of the BlockStore read and write.

A block that entered the prefix cache is copied into a free buffer between two steps, and written from there. The copies of a
busy engine take at most SHARE of its time; what left the cache before is not written.

A request whose blocks are in files waits outside of the queue until they have been read, or until computing them would have
taken as long (engine.sched.lifecycle.restores). Steps of other requests go on meanwhile. Blocks that another worker asks for
are read in the same way before they are packed (engine.sched.lifecycle.publishing).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from diptych.common.clock import Clock
from diptych.common.errors import ConfigError, InternalError, RequestCancelledError
from diptych.common.kv_parts import GroupPart
from diptych.engine.disk_messages import BlocksRead, BlockStore, BlocksWritten, pieces_of
from diptych.engine.executor import Executor, ExecutorLost
from diptych.engine.messages import EngineRequest, PublishCached, UnpackRange
from diptych.engine.sched.lifecycle.restores import Restore
from diptych.engine.sched.scheduler import Scheduler

_log = logging.getLogger(__name__)
SHARE = 0.02
"""Of the time of a busy engine, for copies of blocks that are to be written."""
MOST_LATE = 3
PAUSE_S = 30.0
"""After MOST_LATE reads in a row that took too long, nothing is read for so long: each costs its request the time it waits."""
_MOST_CREDIT_S = 0.05
"""Of unused time that is kept for later."""


@dataclass(slots=True)
class _Waiting:
    """`arrived`: tokens of the restore that are in its blocks. `until`: on the engine's clock."""

    request: EngineRequest | PublishCached
    restore: Restore
    job: int
    began: float
    until: float
    arrived: int = 0


class DiskTraffic:
    """Args: copy_blocks: carries out copies that the scheduler has decided; None: it failed, and all requests have ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        store: BlockStore,
        clock: Clock,
        copy_blocks: Callable[[], bool | None],
    ) -> None:
        self._scheduler, self._executor, self._store, self._clock = scheduler, executor, store, clock
        self._copy_blocks = copy_blocks
        self._disk = scheduler.kv.disk
        size = scheduler.config.block_size
        self._group_parts = scheduler.limits.group_parts
        self._piece_bytes = [one.bytes_per_token * size for one in self._group_parts]
        self._block_bytes = sum(self._piece_bytes)
        if list(store.piece_bytes) != self._piece_bytes:
            raise ConfigError("piece_bytes", list(store.piece_bytes), f"the runner's blocks have {self._piece_bytes}")
        self._waiting: dict[str, _Waiting] = {}
        self._jobs: dict[int, str] = {}
        self._last_job = 0
        self._num_late, self._paused_until = 0, 0.0
        self._credit_s, self._credit_at = 0.0, clock.now()
        scheduler.throughput.disk_bytes_per_s = store.bytes_per_s
        self._disk.is_shared = store.is_shared

    def open(self) -> None:
        """What was found at the start can be read, and is announced; blocks are written from now on."""
        self._disk.open(self._store.found)
        self._disk.errors.update(self._store.damaged)
        self._store.remove(self._disk.take_removed())

    def close(self, deadline_s: float) -> None:
        self._store.close(deadline_s)

    # ---- reading ----

    def begin(self, request: EngineRequest) -> bool:
        """True: blocks of it are being read, and it is queued afterwards."""
        now, attempt = self._clock.now(), request.attempt
        if attempt in self._waiting:
            self._drop(self._waiting[attempt])
            self._scheduler.outbox.fail(attempt, InternalError(f"attempt {attempt} was submitted twice"))
            return True
        if now < self._paused_until:
            return False
        restore = self._scheduler.plan_restore(request, now)
        if restore is None:
            return False
        if not restore.blocks:  # the copy that made room took them
            self._end(restore)
            return False
        self._read(request, restore, now)
        return True

    def begin_source(self, command: PublishCached) -> bool:
        """As `begin`, for blocks that another worker asks for: they are packed afterwards."""
        now = self._clock.now()
        if (waiting := self._waiting.get(command.attempt)) is not None:
            self._store.cancel(waiting.job)
            self._forget(waiting)
            return False  # both end
        restore = None if now < self._paused_until else self._scheduler.plan_source(command, now)
        if restore is not None:
            self._read(command, restore, now)
        return restore is not None

    def _read(self, request: EngineRequest | PublishCached, restore: Restore, now: float) -> None:
        self._last_job += 1
        self._waiting[request.attempt] = _Waiting(request, restore, self._last_job, now, now + restore.limit_s)
        self._jobs[self._last_job] = request.attempt
        self._store.read(self._last_job, restore.blocks)

    def cancel(self, attempt: str) -> bool:
        """False: it does not wait here."""
        waiting = self._waiting.get(attempt)
        if waiting is None:
            return False
        self._drop(waiting)
        if isinstance(waiting.request, PublishCached):
            return False  # the scheduler has it
        self._scheduler.outbox.fail(attempt, RequestCancelledError(f"attempt {attempt} was cancelled"))
        return True

    def take_all(self) -> list[EngineRequest]:
        """Requests that wait, for the end of the engine. They are not queued any more, and nothing is recorded: the executor may
        be lost."""
        requests = []
        for one in list(self._waiting.values()):
            self._store.cancel(one.job)
            self._forget(one)
            if isinstance(one.request, EngineRequest):
                self._scheduler.end_restore(one.restore.name)
                requests.append(one.request)
        return requests

    @property
    def expires_at(self) -> float:
        """When the next one has waited long enough; infinite: none waits."""
        return min((waiting.until for waiting in self._waiting.values()), default=math.inf)

    def expire(self) -> None:
        """Queue those whose blocks take longer to read than to compute."""
        now = self._clock.now()
        for waiting in [one for one in self._waiting.values() if one.until <= now]:
            _log.info("attempt %s: reading its blocks takes longer than computing them", waiting.request.attempt)
            self._disk.errors["late"] += len(waiting.restore.blocks)
            self._store.cancel(waiting.job)
            self._finish(waiting)
            self._num_late += 1
            if self._num_late >= MOST_LATE:
                _log.warning("the disk is too slow: nothing is read from it for %.0f s", PAUSE_S)
                self._num_late, self._paused_until = 0, now + PAUSE_S

    def on_read(self, reply: BlocksRead) -> None:
        try:
            attempt = self._jobs.get(reply.job)
            waiting = None if attempt is None else self._waiting[attempt]
            whole = waiting is not None and self._take(waiting, reply)
        finally:
            self._store.give_back(reply.buffer)
        if reply.bad is not None:
            self._on_bad(reply)
        if waiting is not None and waiting.job in self._jobs and (reply.last or not whole):
            if not reply.last:
                self._store.cancel(reply.job)
            self._finish(waiting)

    def _take(self, waiting: _Waiting, reply: BlocksRead) -> bool:
        """Copy blocks to where they belong. False: that failed."""
        if not reply.num_blocks:
            return True
        began, size = self._clock.now(), self._scheduler.config.block_size
        first, num_tokens = waiting.restore.first_token + waiting.arrived, reply.num_blocks * size
        for one, num_bytes, piece in zip(self._group_parts, self._piece_bytes, reply.pieces, strict=True):
            unseen = min(reply.num_blocks, max(0, waiting.restore.needed_from[one.group] - first // size))
            if unseen < reply.num_blocks and not self._unpack(
                waiting.restore.name,
                first + unseen * size,
                num_tokens - unseen * size,
                piece[unseen * num_bytes :],
                one,
            ):
                return False
        at = waiting.arrived // size
        self._disk.learn(waiting.restore.blocks[at : at + reply.num_blocks], waiting.restore.use)
        waiting.arrived += num_tokens
        self._num_late = 0
        seconds = reply.seconds + self._clock.now() - began
        self._scheduler.throughput.observe_disk(seconds, reply.num_blocks * self._block_bytes)
        return True

    def _unpack(self, name: str, first: int, num_tokens: int, piece: memoryview, into: GroupPart) -> bool:
        job = self._scheduler.plan_unpack(
            UnpackRange(name, 0, first, num_tokens, piece, group=into.own, part=into.part)
        )
        if job is None or self._copy_blocks() is None:
            return False
        try:
            copy = self._executor.unpack(job.block_ids, num_tokens, piece, None, into.own, into.part)
            if copy is not None:
                copy.wait()  # the buffer goes back
        except ExecutorLost:
            raise
        except Exception:
            _log.exception("unpacking tokens %d+%d of %s failed", first, num_tokens, name)
            return False
        self._scheduler.unpacked(job, last=False)
        return True

    def _on_bad(self, reply: BlocksRead) -> None:
        assert reply.bad is not None
        held = [block for block in (reply.bad, *reply.gone) if self._disk.run((block.key,))]
        if not held:
            return  # evicted meanwhile
        _log.warning(
            "%d blocks on the disk from %s on are %s: computed again", len(held), held[0].key.hex(), reply.error
        )
        self._disk.errors[reply.error] += len(held)
        for block in held:
            self._disk.discard(block.key)
        self._store.remove(self._disk.take_removed())

    def _finish(self, waiting: _Waiting) -> None:
        """Its request is queued; what has come is a hit. What is for another worker is packed."""
        self._forget(waiting)
        if isinstance(waiting.request, PublishCached):
            self._scheduler.publish_source(waiting.request, self._clock.now())
            return
        num_tokens = self._end(waiting.restore)
        self._scheduler.add(waiting.request, self._clock.now(), num_tokens)

    def _drop(self, waiting: _Waiting) -> None:
        """Its request is not wanted any more; what has come stays in the cache all the same."""
        self._store.cancel(waiting.job)
        self._forget(waiting)
        if isinstance(waiting.request, EngineRequest):
            self._end(waiting.restore)

    def _end(self, restore: Restore) -> int:
        """What has come enters the cache, and what it was computed from is recorded. Returns: tokens that are new."""
        num_tokens, new = self._scheduler.end_restore(restore.name)
        if new is not None:
            self._executor.note_pulled(new.table, new.token_ids, new.first_new, new.first_block)
        return num_tokens

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.request.attempt], self._jobs[waiting.job]

    # ---- writing ----

    def save(self, *, idle: bool) -> bool:
        """Copy blocks that are to be written, as many as the time allows. Returns: whether there were any."""
        now, disk = self._clock.now(), self._disk
        self._credit_s = min(_MOST_CREDIT_S, self._credit_s + SHARE * (now - self._credit_at))
        self._credit_at = now
        saved = False
        while disk.has_offers and (self._credit_s > 0.0 or (idle and not saved)):
            buffer = self._store.write_buffer()
            if buffer is None:
                break
            if not self._save_into(buffer):
                break
            saved, before = True, now
            now = self._clock.now()
            self._credit_s -= now - before
        removed = disk.take_removed()
        if removed:
            self._store.remove(removed)
        return saved

    def _save_into(self, buffer: memoryview) -> bool:
        kv = self._scheduler.kv
        blocks = self._disk.take(self._store.chunk_blocks, lambda key: kv.copies_of(key) is not None)
        if removed := self._disk.take_removed():
            self._store.remove(removed)  # first: they make the room
        if not blocks:
            self._store.write((), buffer)
            return False
        ids = [found for one in blocks if (found := kv.copies_of(one.key)) is not None]
        num_tokens = len(ids) * self._scheduler.config.block_size
        try:
            for of, piece in zip(self._group_parts, pieces_of(buffer, len(ids), self._piece_bytes), strict=True):
                self._executor.pack([blocks[of.group] for blocks in ids], num_tokens, piece, None, of.own, of.part)
        except ExecutorLost:
            raise
        except Exception:
            _log.exception("packing %d blocks for the disk failed", len(ids))
            self._disk.errors["pack"] += len(blocks)
            self._disk.written(blocks, blocks)
            self._store.write((), buffer)
            return False
        self._store.write(blocks, buffer)
        return True

    def on_written(self, reply: BlocksWritten) -> None:
        self._disk.written(reply.blocks, reply.failed)
        if reply.error:
            self._disk.errors[reply.error] += max(1, len(reply.failed))
        if removed := self._disk.take_removed():
            self._store.remove(removed)
