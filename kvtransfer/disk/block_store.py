"""Threads that write and read blocks in a folder, or a store of others: a BlockStore (engine/disk_messages.py).

    step thread --write, remove--> [queue] --> writer --BlocksWritten--> step thread
    step thread --read, cancel---> [queue] --> reader --BlocksRead-----> step thread

Each has a few buffers, which bound what is under way. A disk that is full or fails is left alone for PAUSE_S; serving goes on.
A thread calls `write_next` or `read_next` again and again: a simulation may call them instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread

import structlog

from diptych.common.clock import Clock
from diptych.engine.disk_messages import BlocksRead, BlocksWritten, DiskBlock, DiskReply, pieces_of
from diptych.kvtransfer.disk.block_file import MISSING, PROBE, BadBlockError, name_of, why
from diptych.kvtransfer.disk.keeper import BlockKeeper

log = structlog.get_logger(__name__)

BUFFER_BYTES = 8 << 20
NUM_BUFFERS = 4
"""Of each thread."""
PAUSE_S = 30.0
"""After a write failed, nothing is written for so long."""
_WAIT_S = 60.0
"""Every wait has a deadline; this one only bounds the effect of a lost wake-up."""
_PROBE_BLOCKS = 4


class _Stop:
    pass


class _Cancelled:
    """Numbers of reads that nobody waits for; `everything` once the store closes."""

    def __init__(self) -> None:
        self.jobs: set[int] = set()
        self.everything = False

    def __contains__(self, job: int) -> bool:
        return self.everything or job in self.jobs


_Write = tuple[Sequence[DiskBlock], memoryview]
_Remove = Sequence[DiskBlock]
_Read = tuple[int, Sequence[DiskBlock]]
"""A job, and the blocks that are still to be read."""


class DiskBlockStore:
    """Opens the keeper at once. Raises: ConfigError, see BlockKeeper.open. See BlockStore for the rest.

    Args: piece_bytes: of a block, by KV group or by rank; empty: it has one piece.
    """

    def __init__(
        self,
        keeper: BlockKeeper,
        clock: Clock,
        piece_bytes: Sequence[int] = (),
        *,
        buffer_bytes: int = BUFFER_BYTES,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._keeper, self._clock, self._pause_s = keeper, clock, pause_s
        self.piece_bytes = tuple(piece_bytes) or (keeper.block_bytes,)
        assert sum(self.piece_bytes) == keeper.block_bytes
        self.chunk_blocks = max(1, buffer_bytes // keeper.block_bytes)
        size = self.chunk_blocks * keeper.block_bytes
        found = keeper.open()
        self.found, self.damaged, self.other_bytes = found.blocks, found.damaged, found.other_bytes
        self.bytes_per_s = self._probe()  # of files that are there, for a full disk takes no others
        self._write_buffers: SimpleQueue[memoryview] = SimpleQueue()
        self._read_buffers: SimpleQueue[int] = SimpleQueue()
        self._into = [memoryview(bytearray(size)) for _ in range(NUM_BUFFERS)]
        for number in range(NUM_BUFFERS):
            self._write_buffers.put(memoryview(bytearray(size)))
            self._read_buffers.put(number)
        self._writes: SimpleQueue[_Write | _Remove | _Stop] = SimpleQueue()
        self._reads: SimpleQueue[_Read | _Stop] = SimpleQueue()
        self._reading: _Read | None = None
        self._ended_writing = self._ended_reading = False
        self._cancelled = _Cancelled()
        self._paused_until = 0.0
        self._reply: Callable[[DiskReply], None] = lambda reply: None
        self._threads: list[Thread] = []

    @property
    def is_shared(self) -> bool:
        return self._keeper.is_shared

    # ---- on the step thread ----

    def begin(self, reply: Callable[[DiskReply], None]) -> None:
        self._reply = reply
        for name, run in (("diptych-disk-write", self._write_all), ("diptych-disk-read", self._read_all)):
            thread = Thread(target=run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def write_buffer(self) -> memoryview | None:
        if self._clock.now() < self._paused_until:
            return None
        try:
            return self._write_buffers.get_nowait()
        except Empty:
            return None

    def write(self, blocks: Sequence[DiskBlock], buffer: memoryview) -> None:
        if blocks:
            self._writes.put((blocks, buffer))
        else:
            self._write_buffers.put(buffer)

    def remove(self, blocks: Sequence[DiskBlock]) -> None:
        if blocks:
            self._writes.put(list(blocks))

    def read(self, job: int, blocks: Sequence[DiskBlock]) -> None:
        self._reads.put((job, blocks))

    def cancel(self, job: int) -> None:
        self._cancelled.jobs.add(job)

    def give_back(self, buffer: int) -> None:
        self._read_buffers.put(buffer)

    def close(self, deadline_s: float) -> None:
        threads, self._threads = self._threads, []
        self._cancelled.everything = True
        self._writes.put(_Stop())
        self._reads.put(_Stop())
        self._read_buffers.put(0)  # the reader may wait for one
        until = time.monotonic() + deadline_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning("does not end", thread=thread.name)
        self._keeper.close()

    # ---- on the writer's thread ----

    def _write_all(self) -> None:
        while not self._ended_writing:
            self.write_next(_WAIT_S)

    def write_next(self, wait_s: float) -> bool:
        """Write or remove what is next in the queue. Returns: whether there was anything within `wait_s`."""
        try:
            item = self._writes.get(timeout=wait_s)
        except Empty:
            return False
        if isinstance(item, _Stop):
            self._ended_writing = True
        elif isinstance(item, tuple):
            blocks, buffer = item
            failed, error = self._write_some(blocks, buffer)
            self._write_buffers.put(buffer)
            self._reply(BlocksWritten(tuple(blocks), tuple(failed), error))
        else:
            self._remove_some(item)
        return True

    def _write_some(self, blocks: Sequence[DiskBlock], buffer: memoryview) -> tuple[Sequence[DiskBlock], str]:
        """Returns: those that are not there, and why."""
        to_sync, lost, reason = dict[str, None](), list[DiskBlock](), ""
        pieces = pieces_of(buffer, len(blocks), self.piece_bytes)
        at = 0
        try:
            for at, block in enumerate(blocks):
                try:
                    to_sync[self._keeper.write(block, self._block(pieces, at))] = None
                except BadBlockError as failure:
                    lost.append(block)
                    reason = failure.reason
                    log.warning("a block cannot be written", error=reason, name=name_of(block))
            at = len(blocks)
            self._keeper.sync(list(to_sync))
        except OSError as error:
            self._paused_until = self._clock.now() + self._pause_s
            log.warning("a block cannot be written: nothing is for a while", error=str(error), pause_s=self._pause_s)
            # Without the sync of a folder its blocks are there, but may be gone after a crash.
            return [*lost, *blocks[at:]], why(error)
        return lost, reason

    def _remove_some(self, blocks: Sequence[DiskBlock]) -> None:
        for block in blocks:
            try:
                self._keeper.remove(block)
            except OSError as error:
                log.warning("a block cannot be removed", error=str(error))

    # ---- on the reader's thread ----

    def _read_all(self) -> None:
        while not self._ended_reading:
            self.read_next(_WAIT_S)

    def read_next(self, wait_s: float) -> bool:
        """Begin the next read, or read a buffer full of the one that was begun. Returns: whether there was anything to do, and a
        buffer for it, within `wait_s`."""
        try:
            if self._reading is None:
                item = self._reads.get(timeout=wait_s)
                if isinstance(item, _Stop):
                    self._ended_reading = True
                else:
                    self._reading = item
                return True
            buffer = self._read_buffers.get(timeout=wait_s)
        except Empty:
            return False
        (job, blocks), self._reading = self._reading, None
        if job in self._cancelled:
            self._read_buffers.put(buffer)
        else:
            reply = self._read_some(job, blocks, buffer)
            self._reply(reply)
            if not reply.last:
                self._reading = job, blocks[reply.num_blocks :]
                return True
        for number in list(self._cancelled.jobs):  # a copy: the step thread adds to it
            if number <= job:
                self._cancelled.jobs.discard(number)
        return True

    def _read_some(self, job: int, blocks: Sequence[DiskBlock], buffer: int) -> BlocksRead:
        """As many as the buffer holds, up to the first bad one."""
        chunk = blocks[: self.chunk_blocks]
        pieces = pieces_of(self._into[buffer], len(chunk), self.piece_bytes)
        began, bad, error, count, gone = self._clock.now(), None, "", 0, list[DiskBlock]()
        for at, block in enumerate(chunk):
            try:
                self._keeper.read(block, self._block(pieces, at))
            except BadBlockError as failure:
                bad, error = block, failure.reason
                if error == MISSING:
                    gone = [one for one in blocks[at + 1 :] if not self._keeper.has(one)]
                break
            count += 1
        last = bad is not None or count == len(blocks)
        seconds = self._clock.now() - began
        read = tuple(piece[: count * size] for piece, size in zip(pieces, self.piece_bytes, strict=True))
        return BlocksRead(job, count, read, buffer, seconds, last, bad, error, gone)

    def _block(self, pieces: Sequence[memoryview], at: int) -> list[memoryview]:
        """The pieces of one block."""
        return [piece[at * size : (at + 1) * size] for piece, size in zip(pieces, self.piece_bytes, strict=True)]

    def _probe(self) -> float:
        """Bytes a second of reading a few blocks that memory does not hold; 0.0: there are none, and none can be written."""
        buffer = (memoryview(bytearray(self._keeper.block_bytes)),)
        if len(self.found) >= _PROBE_BLOCKS:
            try:
                return self._read_rate(self.found[:_PROBE_BLOCKS], buffer)
            except (OSError, BadBlockError) as error:
                log.info("a file of the disk tier cannot be read", error=str(error))
        blocks = [DiskBlock(os.urandom(16), PROBE, number) for number in range(_PROBE_BLOCKS)]  # others may probe, too
        try:
            for block in blocks:
                self._keeper.write(block, buffer)
            return self._read_rate(blocks, buffer)
        except (OSError, BadBlockError) as error:
            log.warning("the disk tier cannot be used yet", error=str(error))
            return 0.0
        finally:
            self._remove_some(blocks)

    def _read_rate(self, blocks: Sequence[DiskBlock], buffer: Sequence[memoryview]) -> float:
        """Raises: OSError, BadBlockError."""
        for block in blocks:
            self._keeper.drop_cached(block)
        began = self._clock.now()
        for block in blocks:
            self._keeper.read(block, buffer)
        return len(blocks) * self._keeper.block_bytes / max(self._clock.now() - began, 1e-9)
