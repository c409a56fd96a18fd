"""Disks of a world: what a worker's folder of blocks is over, and the production's block store on virtual time.

A disk outlives its worker's process. It is slow, full, hung or damaged as the schedule wants (files.py)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from handoff_sim.links import Node
from handoff_sim.loop import VirtualLoop

from diptych.engine.disk_messages import DiskBlock, DiskReply
from diptych.kvtransfer.disk.block_file import (
    HEAD_BYTES,
    MISSING,
    BadBlockError,
    block_named,
    check_content,
    check_size,
    head_of,
    is_ours,
    last_leaves_first,
    name_of,
    unfinished_name,
)
from diptych.kvtransfer.disk.block_store import NUM_BUFFERS, DiskBlockStore
from diptych.kvtransfer.disk.keeper import Found

Path = tuple[bytes, str, str]
"""Identity, tenant, name."""


class Disk:
    """The files of one worker, and what is wrong with them."""

    def __init__(self, rng: Random, delay_s: float) -> None:
        self.rng, self.delay_s = rng, delay_s
        self.files: dict[Path, bytes] = {}
        self.last_use: dict[Path, float] = {}
        self.not_synced: set[Path] = set()
        self.touched: set[Path] = set()
        """Removed or changed by a fault, and not written since."""
        self.is_full = self.fails = self.hangs = False
        self.on_resume: Callable[[], None] = lambda: None

    def remove(self, path: Path) -> None:
        self.files.pop(path, None)
        self.last_use.pop(path, None)
        self.not_synced.discard(path)

    def crash(self, *, with_host: bool) -> None:
        """The process ended in the midst of something. `with_host`: what was not synced may be gone."""
        for path in sorted(self.not_synced) if with_host else ():
            if self.rng.random() < 0.5:
                self.remove(path)
                self.touched.add(path)
        self.not_synced.clear()
        if self.files and self.rng.random() < 0.5:
            identity, tenant, _ = self.rng.choice(sorted(self.files))
            left = DiskBlock(self.rng.randbytes(16), tenant, 0)
            self.files[identity, tenant, unfinished_name(left)] = b"half"


class SimFolder:
    """A BlockKeeper over a Disk."""

    is_shared = False

    def __init__(self, disk: Disk, loop: VirtualLoop, identity: bytes, block_bytes: int) -> None:
        self._disk, self._loop, self.identity, self.block_bytes = disk, loop, identity, block_bytes
        self.meanwhile: Callable[[], None] = lambda: None
        """Called before a block is read: what the writer's thread does at that moment."""

    def open(self) -> Found:
        disk, damaged, found = self._disk, dict[str, int](), list[tuple[float, DiskBlock]]()
        for path, content in list(disk.files.items()):
            identity, tenant, name = path
            block = block_named(name, tenant)
            if identity != self.identity:
                disk.remove(path)
            elif block is not None and len(content) == HEAD_BYTES + self.block_bytes:
                found.append((disk.last_use[path], block))
            else:
                reason = "truncated" if block is not None else "unfinished" if is_ours(name) else "foreign"
                damaged[reason] = damaged.get(reason, 0) + 1
                if reason != "foreign":
                    disk.remove(path)
        return Found(last_leaves_first(found), damaged, 0)

    def close(self) -> None: ...

    def write(self, block: DiskBlock, pieces: Sequence[memoryview]) -> str:
        disk, path = self._disk, self.path(block)
        if disk.is_full:
            raise OSError(errno.ENOSPC, "full")
        disk.files[path] = head_of(self.identity, block.key, pieces) + b"".join(pieces)
        disk.last_use[path] = self._loop.time()
        disk.not_synced.add(path)
        disk.touched.discard(path)
        return block.tenant

    def sync(self, folders: Sequence[str]) -> None:
        disk = self._disk
        if disk.is_full and disk.rng.random() < 0.5:
            raise OSError(errno.ENOSPC, "full")
        disk.not_synced = {path for path in disk.not_synced if path[1] not in folders}

    def read(self, block: DiskBlock, into: Sequence[memoryview]) -> None:
        self.meanwhile()
        disk, path = self._disk, self.path(block)
        if path not in disk.files:
            raise BadBlockError(MISSING)
        if disk.fails:
            raise BadBlockError("EIO")
        content = disk.files[path]
        check_size(len(content), self.block_bytes)
        first = HEAD_BYTES
        for piece in into:
            piece[:] = content[first : first + len(piece)]
            first += len(piece)
        disk.last_use[path] = self._loop.time()
        check_content(memoryview(content[:HEAD_BYTES]), into, self.identity, block.key)

    def has(self, block: DiskBlock) -> bool:
        return self.path(block) in self._disk.files

    def drop_cached(self, block: DiskBlock) -> None: ...

    def remove(self, block: DiskBlock) -> None:
        self._disk.remove(self.path(block))

    def path(self, block: DiskBlock) -> Path:
        return self.identity, block.tenant, name_of(block)


class SimBlockStore(DiskBlockStore):
    """Its threads are callbacks of the virtual loop: each does one thing, and takes its time. So do its replies, for at most
    `reply_delay_s`."""

    def __init__(
        self,
        disk: Disk,
        loop: VirtualLoop,
        node: Node,
        folder: SimFolder,
        piece_bytes: Sequence[int],
        chunk_blocks: int,
        reply_delay_s: float = 0.0,
    ) -> None:
        super().__init__(
            folder,  # type: ignore[arg-type]
            loop,
            piece_bytes,
            buffer_bytes=chunk_blocks * folder.block_bytes,
            pause_s=0.3,
        )
        self.disk, self.folder = disk, folder
        self._loop, self._node = loop, node
        self._reply_delay_s, self._not_before = reply_delay_s, 0.0
        self._scheduled: set[str] = set()
        disk.on_resume = self._kick
        node.on_resume.append(self._kick)
        folder.meanwhile = self._meanwhile

    @property
    def is_busy(self) -> bool:
        """Something is to be written or read, or a buffer has not come back."""
        free = self._write_buffers.qsize() + self._read_buffers.qsize()
        return bool(self._scheduled) or free != 2 * NUM_BUFFERS or bool(self._writes.qsize() or self._reads.qsize())

    @property
    def num_queued(self) -> int:
        """Writes, removals and reads that the disk will do; 0 while it hangs."""
        return 0 if self._stands_still() else self._writes.qsize() + self._reads.qsize()

    def begin(self, reply: Callable[[DiskReply], None]) -> None:
        self._reply = partial(self._reply_later, reply) if self._reply_delay_s else reply

    def _reply_later(self, reply: Callable[[DiskReply], None], what: DiskReply) -> None:
        """The step thread was busy for a while; what it is sent stays in order."""
        delay_s = self.disk.rng.random() ** 2 * self._reply_delay_s
        self._not_before = max(self._not_before + 1e-9, self._loop.time() + delay_s)
        self._loop.call_at(self._not_before, reply, what)

    def write(self, blocks: Sequence[DiskBlock], buffer: memoryview) -> None:
        super().write(blocks, buffer)
        self._kick()

    def remove(self, blocks: Sequence[DiskBlock]) -> None:
        super().remove(blocks)
        self._kick()

    def read(self, job: int, blocks: Sequence[DiskBlock]) -> None:
        super().read(job, blocks)
        self._kick()

    def give_back(self, buffer: int) -> None:
        super().give_back(buffer)
        self._kick()

    def _kick(self) -> None:
        for name, turn in (("write", self.write_next), ("read", self.read_next)):
            if name not in self._scheduled and not self._stands_still():
                self._scheduled.add(name)
                delay_s = self.disk.rng.random() ** 3 * self.disk.delay_s + 1e-6
                self._loop.call_later(delay_s, self._turn, name, turn)

    def _turn(self, name: str, turn: Any) -> None:
        self._scheduled.discard(name)
        if not self._stands_still() and turn(0.0):
            self._kick()

    def _meanwhile(self) -> None:
        if self.disk.rng.random() < 0.3:
            self.write_next(0.0)

    def _stands_still(self) -> bool:
        return self._node.dead or self._node.stopped or self.disk.hangs
