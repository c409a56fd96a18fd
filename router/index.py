"""Which worker holds which KV blocks, folded from the workers' event streams. Pure: no clock, no sockets.

    GUESS --snapshot--> EXACT --gap, newer epoch, missed tail--> STALE --snapshot--> EXACT
      ^                   |  ^______________ cleared _____________|
      |__ new incarnation_|

A worker's events carry (incarnation, epoch, sequence). The next event of the same epoch has sequence + 1; "cleared" opens a
new epoch and voids everything before it. Repeats are ignored, a hole makes the worker STALE until a snapshot arrives;
events that come meanwhile wait in a bounded buffer and are replayed on top of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from diptych.common.store import KvEvent

_MAX_WAITING_EVENTS = 4096


class IndexMode(Enum):
    """How far the index of a worker can be trusted."""

    EXACT = "EXACT"
    STALE = "STALE"
    GUESS = "GUESS"


@dataclass(slots=True)
class _WorkerBlocks:
    incarnation: str
    epoch: int = 0
    sequence: int = 0
    blocks: dict[bytes, None] = field(default_factory=dict)  # in the order in which they were stored
    mode: IndexMode = IndexMode.GUESS
    waiting: list[KvEvent] = field(default_factory=list)
    truncated: bool = False

    def add(self, keys: Iterable[bytes], limit: int) -> None:
        for key in keys:
            self.blocks.pop(key, None)
            self.blocks[key] = None
        while len(self.blocks) > limit:
            del self.blocks[next(iter(self.blocks))]
            self.truncated = True

    def lose_track(self) -> None:
        if self.mode is IndexMode.EXACT:
            self.mode = IndexMode.STALE

    def wait(self, event: KvEvent) -> None:
        if len(self.waiting) >= _MAX_WAITING_EVENTS:
            self.waiting.clear()  # leaves a hole, which the snapshot after next will close
        self.waiting.append(event)


class BlockIndex:
    """Args:
    max_blocks: keys held for all workers together; each worker gets an equal share, beyond it its oldest are dropped.
    """

    def __init__(self, max_blocks: int = 2_000_000) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks={max_blocks}: must be at least 1")
        self._max_blocks = max_blocks
        self._workers: dict[str, _WorkerBlocks] = {}

    def _limit(self) -> int:
        return max(1, self._max_blocks // max(1, len(self._workers)))

    def register(self, worker_id: str, incarnation: str, epoch: int, sequence: int) -> None:
        """A worker's lease says where its event stream stands. Another incarnation starts from nothing."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            worker = self._workers[worker_id] = _WorkerBlocks(incarnation, epoch)
            if sequence == 0:  # nothing was stored in this epoch yet: we know all of it
                worker.mode = IndexMode.EXACT
            limit = self._limit()
            for other in self._workers.values():
                other.add((), limit)
            return

    def is_behind(self, worker_id: str, epoch: int, sequence: int) -> bool:
        """Whether the lease speaks of events that the index has not seen."""
        worker = self._workers.get(worker_id)
        return worker is not None and (epoch, sequence) > (worker.epoch, worker.sequence)

    def lose_track(self, worker_id: str) -> None:
        """Events of this worker went missing: STALE until the next snapshot."""
        if worker_id in self._workers:
            self._workers[worker_id].lose_track()

    def forget(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def apply(self, worker_id: str, event: KvEvent) -> None:
        """Fold one event. Events of an unknown worker or of another incarnation are ignored."""
        worker = self._workers.get(worker_id)
        if worker is None or event.incarnation != worker.incarnation:
            return
        if event.kind == "cleared":
            if worker.mode is IndexMode.GUESS or (event.epoch, event.sequence) > (worker.epoch, worker.sequence):
                self._clear(worker, event)
            return
        if worker.mode is not IndexMode.EXACT:
            worker.wait(event)
        elif not self._fold(worker, event):
            worker.lose_track()
            worker.wait(event)

    def _clear(self, worker: _WorkerBlocks, event: KvEvent) -> None:
        worker.blocks.clear()
        worker.truncated = False
        worker.epoch, worker.sequence = event.epoch, event.sequence
        worker.mode = IndexMode.EXACT
        self._replay(worker)

    def _fold(self, worker: _WorkerBlocks, event: KvEvent) -> bool:
        """Apply an event of an EXACT worker. False: something is missing before it."""
        if event.epoch < worker.epoch or (event.epoch == worker.epoch and event.sequence <= worker.sequence):
            return True  # a repeat
        if event.epoch > worker.epoch or event.sequence != worker.sequence + 1:
            return False
        worker.sequence = event.sequence
        if event.kind == "stored":
            worker.add(event.keys, self._limit())
        else:
            for key in event.keys:
                worker.blocks.pop(key, None)
        return True

    def _replay(self, worker: _WorkerBlocks) -> None:
        waiting = sorted(worker.waiting, key=lambda event: (event.epoch, event.sequence))
        worker.waiting = []
        for i, event in enumerate(waiting):
            if not self._fold(worker, event):
                worker.mode = IndexMode.STALE
                worker.waiting = waiting[i:]
                return

    def load_snapshot(
        self, worker_id: str, incarnation: str, *, epoch: int, sequence: int, keys: Sequence[bytes]
    ) -> None:
        """What the worker holds after event `sequence` of `epoch`. One of another incarnation, or older than what was
        folded already, is ignored."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return
        if worker.mode is IndexMode.EXACT and (epoch, sequence) < (worker.epoch, worker.sequence):
            return
        worker.blocks = {}
        worker.truncated = False
        worker.add(keys, self._limit())
        worker.epoch, worker.sequence = epoch, sequence
        worker.mode = IndexMode.EXACT
        self._replay(worker)

    def needs_snapshot(self) -> list[str]:
        return [name for name, worker in self._workers.items() if worker.mode is not IndexMode.EXACT]

    def mode(self, worker_id: str) -> IndexMode:
        worker = self._workers.get(worker_id)
        if worker is None:
            return IndexMode.GUESS
        if worker.truncated and worker.mode is IndexMode.EXACT:
            return IndexMode.STALE
        return worker.mode

    def num_blocks(self, worker_id: str) -> int:
        worker = self._workers.get(worker_id)
        return len(worker.blocks) if worker is not None else 0

    def hit_blocks(self, worker_id: str, keys: Sequence[bytes]) -> int:
        """Length of the longest run of `keys`, from the first one on, that the worker holds."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return 0
        blocks = worker.blocks
        for i, key in enumerate(keys):
            if key not in blocks:
                return i
        return len(keys)
