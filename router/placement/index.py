"""An index of the KV blocks that each worker holds, folded from the workers' event streams. Pure: no clock, no sockets.

    GUESS --snapshot--> EXACT --gap, newer epoch, missed tail--> STALE --snapshot--> EXACT
      ^                   |  ^______________ cleared _____________|
      |__ new incarnation_|

A worker's events carry (incarnation, epoch, tier, sequence); each tier of an epoch counts separately. The next event of
a tier has sequence + 1; "cleared" opens a new epoch and voids everything before it, in all tiers. Repeats are ignored.
A gap makes the tier STALE until a snapshot arrives; events that arrive meanwhile wait in a bounded buffer and are then
replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from diptych.common.store.interface import KvEvent
from diptych.common.tiers import TIERS, TierDump, tier_index
from diptych.router.placement.block_table import BlockTable, Keys, Runs, as_keys, to_bytes
from diptych.router.placement.native.lookup import Found, NativeLookup

_MAX_WAITING_EVENTS = 4096
_TRIM_FRACTION = 8
"""A worker over its share loses 1/8 of it at once: one scan for the oldest serves many blocks."""


class IndexMode(Enum):
    """How exact the index of a worker is."""

    EXACT = "EXACT"
    STALE = "STALE"
    GUESS = "GUESS"


@dataclass(slots=True)
class _Stream:
    """One tier's events."""

    sequence: int = 0
    mode: IndexMode = IndexMode.GUESS
    waiting: list[KvEvent] = field(default_factory=list)

    def mark_stale(self) -> None:
        if self.mode is IndexMode.EXACT:
            self.mode = IndexMode.STALE

    def wait(self, event: KvEvent) -> None:
        if len(self.waiting) >= _MAX_WAITING_EVENTS:
            self.waiting.clear()  # leaves a gap, which a later snapshot closes
        self.waiting.append(event)


@dataclass(slots=True)
class _Worker:
    incarnation: str
    column: int
    epoch: int
    streams: tuple[_Stream, ...] = field(default_factory=lambda: tuple(_Stream() for _ in TIERS))
    truncated: bool = False
    num_events: int = 0


class BlockIndex:
    """The index of all workers. `max_blocks`: blocks held for all workers together. Each worker gets an equal share;
    beyond it its least recently used blocks are dropped, so that a busy worker evicts only its own."""

    def __init__(self, max_blocks: int = 2_000_000) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks={max_blocks}: must be at least 1")
        self._max_blocks = max_blocks
        self._workers: dict[str, _Worker] = {}
        self._free_columns: list[int] = []
        self._table = BlockTable(max_blocks)

    @property
    def num_keys(self) -> int:
        """Different blocks in the index."""
        return self._table.num_keys

    @property
    def num_columns(self) -> int:
        """One more than the highest column."""
        return len(self._workers) + len(self._free_columns)

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def _limit(self) -> int:
        return max(1, self._max_blocks // max(1, len(self._workers)))

    # ---- workers -------------------------------------------------------------------------------------------------

    def register(self, worker_id: str, incarnation: str, epoch: int, *sequences: int) -> None:
        """A worker's lease says where its event streams stand, one for each tier (missing ones: at 0). Another incarnation
        starts from nothing."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.incarnation == incarnation:
            return
        self.forget(worker_id)
        column = self._free_columns.pop() if self._free_columns else len(self._workers)
        self._table.reserve_columns(column + 1)
        worker = self._workers[worker_id] = _Worker(incarnation, column, epoch)
        positions = (*sequences, *(0 for _ in TIERS[len(sequences) :]))
        for stream, position in zip(worker.streams, positions, strict=True):
            if position == 0:  # nothing was stored in this epoch yet: the index is exact
                stream.mode = IndexMode.EXACT
        for other in self._workers.values():
            self._bound(other)

    def is_behind(self, worker_id: str, epoch: int, *sequences: int) -> bool:
        """Whether the lease mentions events that the index has not seen."""
        worker = self._workers.get(worker_id)
        if worker is None or epoch < worker.epoch:
            return False
        seen = zip(sequences, worker.streams, strict=False)
        return epoch > worker.epoch or any(sequence > stream.sequence for sequence, stream in seen)

    def mark_stale(self, worker_id: str) -> None:
        """Events of this worker were lost: STALE until the next snapshot."""
        if worker_id in self._workers:
            for stream in self._workers[worker_id].streams:
                stream.mark_stale()

    def forget(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._table.clear(worker.column)
            self._free_columns.append(worker.column)

    # ---- folding -------------------------------------------------------------------------------------------------

    def apply(self, worker_id: str, event: KvEvent) -> None:
        self.apply_all(worker_id, (event,))

    def apply_all(self, worker_id: str, events: Iterable[KvEvent]) -> None:
        """Fold events in order; adjacent events of one kind cost as much as one. Events of an unknown worker or another
        incarnation are ignored."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        changes = _Changes(self._table, worker.column)
        for event in events:
            if event.incarnation == worker.incarnation:
                worker.num_events += 1
                self._apply(worker, event, changes)
        changes.write()
        self._bound(worker)

    def _apply(self, worker: _Worker, event: KvEvent, changes: _Changes) -> None:
        stream = worker.streams[tier_index(event.tier)]
        if event.kind == "cleared":
            if stream.mode is IndexMode.GUESS or (event.epoch, event.sequence) > (worker.epoch, stream.sequence):
                self._clear(worker, event, changes)
        elif stream.mode is not IndexMode.EXACT:
            stream.wait(event)
        elif not _fold(worker, event, changes):
            stream.mark_stale()
            stream.wait(event)

    def _clear(self, worker: _Worker, event: KvEvent, changes: _Changes) -> None:
        changes.drop()
        self._table.clear(worker.column)
        worker.truncated = False
        worker.epoch = event.epoch
        for stream in worker.streams:
            stream.sequence, stream.mode = 0, IndexMode.EXACT
        worker.streams[tier_index(event.tier)].sequence = event.sequence
        for stream in worker.streams:
            _replay(worker, stream, changes)

    def load_snapshot(
        self,
        worker_id: str,
        incarnation: str,
        *,
        epoch: int,
        tiers: Sequence[TierDump],
    ) -> None:
        """What the worker holds by tier after event `sequence` of each in `epoch` (a missing one: nothing). One of another
        incarnation, or older than what was folded already, is ignored."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return
        exact = [stream for stream in worker.streams if stream.mode is IndexMode.EXACT]
        if exact and epoch < worker.epoch:
            return
        worker.truncated = worker.truncated and epoch == worker.epoch
        changes = _Changes(self._table, worker.column)
        dumps = (*tiers, *(TierDump() for _ in TIERS[len(tiers) :]))
        for tier, (stream, dump) in enumerate(zip(worker.streams, dumps, strict=True)):
            if stream.mode is IndexMode.EXACT and (epoch, dump.sequence) < (worker.epoch, stream.sequence):
                continue
            self._table.clear(worker.column, (tier,))
            self._table.add(as_keys(dump.keys), worker.column, tier)
            if tier == 0:
                worker.truncated = False
            stream.sequence, stream.mode = dump.sequence, IndexMode.EXACT
        worker.epoch = epoch
        for stream in worker.streams:
            _replay(worker, stream, changes)
        changes.write()
        self._bound(worker)

    def _bound(self, worker: _Worker) -> None:
        limit = self._limit()
        if int(self._table.counts[:, worker.column].sum()) > limit:
            self._table.trim(worker.column, limit - limit // _TRIM_FRACTION)
            worker.truncated = True

    # ---- questions -----------------------------------------------------------------------------------------------

    def needs_snapshot(self) -> list[str]:
        return [
            name
            for name, worker in self._workers.items()
            if any(stream.mode is not IndexMode.EXACT for stream in worker.streams)
        ]

    def mode(self, worker_id: str) -> IndexMode:
        """The worst of the worker's tiers; STALE also when its blocks did not all fit."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return IndexMode.GUESS
        worst = IndexMode.STALE if worker.truncated else IndexMode.EXACT
        for stream in worker.streams:
            if stream.mode is IndexMode.GUESS:
                return IndexMode.GUESS
            if stream.mode is IndexMode.STALE:
                worst = IndexMode.STALE
        return worst

    def num_events(self, worker_id: str) -> int:
        """Events that arrived from this incarnation of the worker, including dropped ones."""
        worker = self._workers.get(worker_id)
        return worker.num_events if worker is not None else 0

    def num_blocks(self, worker_id: str) -> int:
        """Blocks of the worker, counted in each tier."""
        worker = self._workers.get(worker_id)
        return int(self._table.counts[:, worker.column].sum()) if worker is not None else 0

    def keys_of(self, worker_id: str, tier: int = 0) -> set[bytes]:
        worker = self._workers.get(worker_id)
        return set(to_bytes(self._table.keys_of(worker.column, tier))) if worker is not None else set()

    def column(self, worker_id: str) -> int | None:
        """The worker's column in the result of `runs`; valid until it is forgotten."""
        worker = self._workers.get(worker_id)
        return worker.column if worker is not None else None

    def runs(self, keys: Keys) -> Runs:
        """For every worker, the length of the longest leading run of `keys` that it holds."""
        return self._table.runs(keys)

    def hits_into(self, lookup: NativeLookup, keys: Keys, most_blocks: int, into: int, stride: int) -> Found:
        """See BlockTable.hits_into."""
        return self._table.hits_into(lookup, keys, most_blocks, into, stride)

    def hit_blocks(self, worker_id: str, keys: Sequence[bytes]) -> int:
        column = self.column(worker_id)
        return 0 if column is None or not keys else int(self.runs(as_keys(keys)).blocks[column])


class _Changes:
    """Adjacent changes of one kind, written to the table together."""

    def __init__(self, table: BlockTable, column: int) -> None:
        self._table = table
        self._column = column
        self._kind = ("stored", 0)
        self._keys: list[bytes] = []

    def note(self, event: KvEvent) -> None:
        kind = (event.kind, tier_index(event.tier))
        if kind != self._kind:
            self.write()
            self._kind = kind
        self._keys += event.keys

    def drop(self) -> None:
        self._keys = []

    def write(self) -> None:
        keys, self._keys = self._keys, []
        if keys:
            kind, tier = self._kind
            change = self._table.add if kind == "stored" else self._table.remove
            change(as_keys(keys), self._column, tier)


def _fold(worker: _Worker, event: KvEvent, changes: _Changes) -> bool:
    """Apply an event of an EXACT tier. False: an event before it is missing."""
    stream = worker.streams[tier_index(event.tier)]
    if event.epoch < worker.epoch or (event.epoch == worker.epoch and event.sequence <= stream.sequence):
        return True  # a repeat
    if event.epoch > worker.epoch or event.sequence != stream.sequence + 1:
        return False
    stream.sequence = event.sequence
    changes.note(event)
    return True


def _replay(worker: _Worker, stream: _Stream, changes: _Changes) -> None:
    if stream.mode is not IndexMode.EXACT:
        return
    waiting = sorted(stream.waiting, key=lambda event: (event.epoch, event.sequence))
    stream.waiting = []
    for i, event in enumerate(waiting):
        if not _fold(worker, event, changes):
            stream.mode = IndexMode.STALE
            stream.waiting = waiting[i:]
            return
