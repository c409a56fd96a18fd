"""Threads that write and read the files of blocks: a BlockStore (engine/disk_messages.py).

    step thread --write, remove--> [queue] --> writer --BlocksWritten--> step thread
    step thread --read, cancel---> [queue] --> reader --BlocksRead-----> step thread

Each has a few buffers, which bound what is under way. A disk that is full or fails is left alone for PAUSE_S; serving goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread

import structlog

from diptych.common.clock import Clock
from diptych.engine.disk_messages import BlocksRead, BlocksWritten, DiskBlock, DiskReply
from diptych.kvtransfer.disk.block_folder import MISSING, PROBE, BadBlockError, BlockFolder, why

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


class DiskBlockStore:
    """Takes the folder at once. Raises: ConfigError, see BlockFolder.open. See BlockStore for the rest."""

    def __init__(self, folder: BlockFolder, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self.chunk_blocks = max(1, BUFFER_BYTES // folder.block_bytes)
        size = self.chunk_blocks * folder.block_bytes
        found = folder.open()
        self.found, self.damaged, self.other_bytes = found.blocks, found.damaged, found.other_bytes
        self.bytes_per_s = self._probe()  # of files that are there, for a full disk takes no others
        self._write_buffers: SimpleQueue[memoryview] = SimpleQueue()
        self._read_buffers: SimpleQueue[int] = SimpleQueue()
        self._into = [memoryview(bytearray(size)) for _ in range(NUM_BUFFERS)]
        for number in range(NUM_BUFFERS):
            self._write_buffers.put(memoryview(bytearray(size)))
            self._read_buffers.put(number)
        self._writes: SimpleQueue[_Write | _Remove | _Stop] = SimpleQueue()
        self._reads: SimpleQueue[tuple[int, Sequence[DiskBlock]] | _Stop] = SimpleQueue()
        self._cancelled = _Cancelled()
        self._paused_until = 0.0
        self._reply: Callable[[DiskReply], None] = lambda reply: None
        self._threads: list[Thread] = []

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
        self._folder.close()

    # ---- on the writer's thread ----

    def _write_all(self) -> None:
        while True:
            try:
                item = self._writes.get(timeout=_WAIT_S)
            except Empty:
                continue
            if isinstance(item, _Stop):
                return
            if isinstance(item, tuple):
                blocks, buffer = item
                failed, error = self._write_some(blocks, buffer)
                self._write_buffers.put(buffer)
                self._reply(BlocksWritten(tuple(blocks), tuple(failed), error))
            else:
                self._remove_some(item)

    def _write_some(self, blocks: Sequence[DiskBlock], buffer: memoryview) -> tuple[Sequence[DiskBlock], str]:
        """Returns: those that are not there, and why."""
        size, folders, written = self._folder.block_bytes, dict[str, None](), 0
        try:
            for at, block in enumerate(blocks):
                folders[self._folder.write(block, buffer[at * size : (at + 1) * size])] = None
                written += 1
            self._folder.sync(list(folders))
        except OSError as error:
            self._paused_until = self._clock.now() + PAUSE_S
            log.warning("a block cannot be written: nothing is for a while", error=str(error), pause_s=PAUSE_S)
            return blocks[written:], why(
                error
            )  # none of them, where the folder was not synced: they may be gone after a crash
        return (), ""

    def _remove_some(self, blocks: Sequence[DiskBlock]) -> None:
        for block in blocks:
            try:
                self._folder.remove(block)
            except OSError as error:
                log.warning("a block cannot be removed", error=str(error))

    # ---- on the reader's thread ----

    def _read_all(self) -> None:
        while True:
            try:
                item = self._reads.get(timeout=_WAIT_S)
            except Empty:
                continue
            if isinstance(item, _Stop):
                return
            job, blocks = item
            self._read_some(job, blocks)
            for number in list(self._cancelled.jobs):  # a copy: the step thread adds to it
                if number <= job:
                    self._cancelled.jobs.discard(number)

    def _read_some(self, job: int, blocks: Sequence[DiskBlock]) -> None:
        size, first = self._folder.block_bytes, 0
        while first < len(blocks):
            number = self._read_buffer()
            if job in self._cancelled:
                self._read_buffers.put(number)
                return
            chunk, into = blocks[first : first + self.chunk_blocks], self._into[number]
            began, bad, error, count, gone = time.monotonic(), None, "", 0, list[DiskBlock]()
            for at, block in enumerate(chunk):
                try:
                    self._folder.read(block, into[at * size : (at + 1) * size])
                except BadBlockError as failure:
                    bad, error = block, failure.reason
                    if error == MISSING:
                        gone = [one for one in blocks[first + at + 1 :] if not self._folder.has(one)]
                    break
                count += 1
            first += count
            last = bad is not None or first >= len(blocks)
            seconds = time.monotonic() - began
            self._reply(BlocksRead(job, count, into[: count * size], number, seconds, last, bad, error, gone))
            if last:
                return

    def _read_buffer(self) -> int:
        while True:
            try:
                return self._read_buffers.get(timeout=_WAIT_S)
            except Empty:
                continue

    def _probe(self) -> float:
        """Bytes a second of reading a few blocks that memory does not hold; 0.0: there are none, and none can be written."""
        size = self._folder.block_bytes
        buffer = memoryview(bytearray(size))
        if len(self.found) >= _PROBE_BLOCKS:
            try:
                return self._read_rate(self.found[:_PROBE_BLOCKS], buffer)
            except (OSError, BadBlockError) as error:
                log.info("a file of the disk tier cannot be read", error=str(error))
        blocks = [DiskBlock(bytes([number]) * 16, PROBE, number) for number in range(_PROBE_BLOCKS)]
        try:
            for block in blocks:
                self._folder.write(block, buffer)
            return self._read_rate(blocks, buffer)
        except (OSError, BadBlockError) as error:
            log.warning("the disk tier cannot be used yet", error=str(error))
            return 0.0
        finally:
            self._remove_some(blocks)

    def _read_rate(self, blocks: Sequence[DiskBlock], buffer: memoryview) -> float:
        """Raises: OSError, BadBlockError."""
        for block in blocks:
            self._folder.drop_cached(block)
        began = time.monotonic()
        for block in blocks:
            self._folder.read(block, buffer)
        return len(blocks) * self._folder.block_bytes / max(time.monotonic() - began, 1e-9)
