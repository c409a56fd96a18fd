"""Guards of the files of KV, each with a way to remove it; as in mutations.py.

A file's size is not listed: what a file that was cut lacks is found by its checksum, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from handoff_sim import disks
from handoff_sim.mutations import WITH_FILES, Patch, mutation

from diptych.engine.disk_messages import BlocksRead, DiskBlock, pieces_of
from diptych.engine.disk_traffic import DiskTraffic
from diptych.engine.sched import scheduler
from diptych.engine.sched.cache.disk_tier import DiskTier
from diptych.engine.sched.lifecycle import restores
from diptych.kvtransfer.disk.block_file import BadBlockError
from diptych.kvtransfer.disk.block_store import DiskBlockStore

_IDENTITY, _KEY = slice(8, 24), slice(24, 40)
"""In a file's head."""


def file_mutation(patch: Patch) -> Patch:
    WITH_FILES.add(patch.__name__)
    return mutation(patch)


# ---- what is taken for a block ----


def _checking(check: Callable[[Callable[..., None], memoryview, Any, bytes, bytes], None]) -> Any:
    original = disks.check_content
    return mock.patch.object(disks, "check_content", lambda *args: check(original, *args))


@file_mutation
def a_damaged_file_is_read() -> Any:
    def check(original: Any, head: memoryview, pieces: Any, identity: bytes, key: bytes) -> None:
        try:
            original(head, pieces, identity, key)
        except BadBlockError as error:
            if error.reason != "corrupt":
                raise

    return _checking(check)


@file_mutation
def a_file_of_another_block_is_read() -> Any:
    return _checking(lambda original, head, pieces, identity, key: original(head, pieces, identity, bytes(head[_KEY])))


@file_mutation
def a_file_of_another_model_is_read() -> Any:
    return _checking(lambda original, head, pieces, identity, key: original(head, pieces, bytes(head[_IDENTITY]), key))


@file_mutation
def a_part_of_a_block_counts_as_the_block() -> Any:
    """A read that ends at a bad block counts it."""
    original = DiskBlockStore._read_some

    def read_some(self: DiskBlockStore, job: int, blocks: Sequence[DiskBlock], buffer: int) -> BlocksRead:
        reply = original(self, job, blocks, buffer)
        if reply.bad is None:
            return reply
        count, chunk = reply.num_blocks + 1, blocks[: self.chunk_blocks]
        whole = pieces_of(self._into[buffer], len(chunk), self.piece_bytes)
        pieces = tuple(piece[: count * size] for piece, size in zip(whole, self.piece_bytes, strict=True))
        return replace(reply, num_blocks=count, pieces=pieces)

    return mock.patch.object(DiskBlockStore, "_read_some", read_some)


# ---- what is written, and when ----


@file_mutation
def a_buffer_is_used_again_before_it_is_written() -> Any:
    original = DiskBlockStore.write

    def write(self: DiskBlockStore, blocks: Sequence[DiskBlock], buffer: memoryview) -> None:
        original(self, blocks, buffer)
        self._write_buffers = _Endless(buffer)  # type: ignore[assignment]

    return mock.patch.object(DiskBlockStore, "write", write)


class _Endless:
    """A queue of one buffer that is always free."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer

    def get_nowait(self) -> memoryview:
        return self._buffer

    def put(self, buffer: memoryview) -> None: ...

    def qsize(self) -> int:
        return disks.NUM_BUFFERS


@file_mutation
def a_buffer_is_used_again_before_it_is_unpacked() -> Any:
    original = DiskBlockStore._read_some

    def read_some(self: DiskBlockStore, *args: Any) -> BlocksRead:
        reply = original(self, *args)
        self._read_buffers.put(reply.buffer)
        return reply

    return mock.patch.multiple(DiskBlockStore, _read_some=read_some, give_back=lambda self, buffer: None)


@file_mutation
def a_block_is_evicted_while_it_is_copied_to_a_file() -> Any:
    """What the cache has lost by then is written all the same: with the bytes of the block behind it."""
    original = DiskTier.take
    return mock.patch.object(DiskTier, "take", lambda self, most, is_there: original(self, most, lambda key: True))


@file_mutation
def a_block_that_could_not_be_written_is_held() -> Any:
    original = DiskTier.written
    return mock.patch.object(DiskTier, "written", lambda self, blocks, failed: original(self, blocks, ()))


@file_mutation
def a_block_that_may_be_wrong_stays_once_it_is_written() -> Any:
    original = DiskTier.written

    def written(self: DiskTier, blocks: Sequence[DiskBlock], failed: Sequence[DiskBlock]) -> None:
        for block in blocks:
            self._writing[block.key] = self._writing.get(block.key) or 0
        original(self, blocks, failed)

    return mock.patch.object(DiskTier, "written", written)


# ---- what leaves ----


@file_mutation
def an_evicted_block_keeps_its_file() -> Any:
    return mock.patch.object(DiskBlockStore, "remove", return_value=None)


@file_mutation
def a_removal_waits_for_the_writes_behind_it() -> Any:
    original = DiskBlockStore.write_next

    def write_next(self: DiskBlockStore, wait_s: float) -> bool:
        items = [self._writes.get_nowait() for _ in range(self._writes.qsize())]
        for item in sorted(items, key=lambda item: not isinstance(item, tuple)):
            self._writes.put(item)
        return original(self, wait_s)

    return mock.patch.object(DiskBlockStore, "write_next", write_next)


@file_mutation
def more_is_held_than_there_is_room_for_after_a_restart() -> Any:
    return mock.patch.object(DiskTier, "_remove", return_value=None)


@file_mutation
def an_eviction_from_the_disk_is_not_announced() -> Any:
    def forget(self: DiskTier, block: DiskBlock) -> None:
        self._order.remove(block.key)
        del self._held[block.key]

    return mock.patch.object(DiskTier, "_forget", forget)


@file_mutation
def a_new_epoch_does_not_announce_what_is_in_files() -> Any:
    def restart(self: DiskTier) -> None:
        self._offered.clear()
        self._writing = dict.fromkeys(self._writing)
        self._events.restart()

    return mock.patch.object(DiskTier, "restart", restart)


@file_mutation
def a_block_that_left_while_it_was_read_is_held() -> Any:
    """As where others have written it."""
    original = DiskTier.learn

    def learn(self: DiskTier, blocks: Sequence[DiskBlock], use: int) -> None:
        self.is_shared = True
        original(self, blocks, use)
        self.is_shared = False

    return mock.patch.object(DiskTier, "learn", learn)


# ---- requests that wait for files ----


@file_mutation
def blocks_are_evicted_while_files_are_read_for_them() -> Any:
    """The blocks that a restore found in the cache are not pinned."""
    original = restores.plan_restore

    def plan_restore(live: Any, *args: Any) -> Any:
        restore = original(live, *args)
        if restore is not None:
            request = live.remote.pull(restore.name)
            for pool, table in zip(live.kv.pools, request.tables, strict=True):
                pool.release(reversed(table))
        return restore

    return mock.patch("diptych.engine.sched.scheduler.plan_restore", plan_restore)


@file_mutation
def a_disk_that_hangs_is_waited_for() -> Any:
    return mock.patch.object(DiskTraffic, "expire", return_value=None)


@file_mutation
def a_late_answer_keeps_its_buffer() -> Any:
    original = DiskTraffic.on_read

    def on_read(self: DiskTraffic, reply: BlocksRead) -> None:
        if reply.job in self._jobs:
            original(self, reply)

    return mock.patch.object(DiskTraffic, "on_read", on_read)


@file_mutation
def an_answer_is_taken_for_another_read() -> Any:
    """The oldest read that is waited for gets it, as where answers had no number."""
    original = DiskTraffic.on_read

    def on_read(self: DiskTraffic, reply: BlocksRead) -> None:
        original(self, replace(reply, job=next(iter(self._jobs), reply.job)))

    return mock.patch.object(DiskTraffic, "on_read", on_read)


@file_mutation
def a_restore_that_was_cancelled_goes_on() -> Any:
    def drop(self: DiskTraffic, waiting: Any) -> None:
        self._forget(waiting)

    return mock.patch.object(DiskTraffic, "_drop", drop)


@file_mutation
def a_restore_that_was_cancelled_is_not_recorded() -> Any:
    def drop(self: DiskTraffic, waiting: Any) -> None:
        self._store.cancel(waiting.job)
        self._forget(waiting)
        self._scheduler.end_restore(waiting.restore.name)

    return mock.patch.object(DiskTraffic, "_drop", drop)


# ---- what is served to others ----


@file_mutation
def what_a_holder_could_not_read_is_sent() -> Any:
    """Blocks of files that were to be packed count as read, whichever were."""
    original = scheduler.publish_source

    def publish_source(live: Any, command: Any) -> bool:
        with mock.patch.object(live.remote, "arrived_until", lambda request: request.kv_target):
            return original(live, command)

    return mock.patch.object(scheduler, "publish_source", publish_source)


@file_mutation
def blocks_that_a_holder_read_stay_in_its_cache() -> Any:
    """It does not know their tokens, and could not vouch for them."""
    original = scheduler.publish_source

    def publish_source(live: Any, command: Any) -> bool:
        request = live.remote.pull(command.attempt)
        published = original(live, command)
        if published and request is not None and request.holds_blocks:
            for pool, table, first in zip(live.kv.pools, request.tables, request.seq.first_blocks, strict=True):
                for block, key in zip(table, command.keys[first:], strict=False):
                    if pool.cached_block(key) is None:
                        pool.publish(block, key, "")
        return published

    return mock.patch.object(scheduler, "publish_source", publish_source)
