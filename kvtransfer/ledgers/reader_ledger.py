"""The ledger of slabs to read into: wanted, in flight, verified, finished. Pure. The life cycle is in ledger.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from diptych.common.errors import DiptychError, TransferError
from diptych.kvtransfer.api import SlabCounts
from diptych.kvtransfer.ledgers.ledger import DropPeer, SlabState, SlabTable

# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadWanted:
    """A read waits for a slab. `deadline`: set by the caller, for all of it, the wait included."""

    read_id: int
    peer: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Received:
    """The receive completed. `error` None: it was verified. A late one (its read was given up) may carry anything."""

    read_id: int
    error: DiptychError | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine has unpacked the slab, or it is no longer wanted; also a read that was cancelled in any phase."""

    read_id: int


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The endpoint is closed and all its requests have completed: proof of death."""

    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = ReadWanted | Received | Finished | PeerGone | Tick

# ---- actions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartRead:
    read_id: int
    slab: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """The read succeeded; its slab is lent to the engine until Finished."""

    read_id: int
    slab: int


@dataclass(frozen=True, slots=True)
class FailRead:
    read_id: int
    error: DiptychError


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Notify the publisher that its slab is no longer needed."""

    read_id: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing of this read is left."""

    read_id: int


Action = StartRead | Deliver | FailRead | Acknowledge | Forget | DropPeer


@dataclass(slots=True)
class _Read:
    peer: str
    deadline: float
    slab: int | None = None
    quarantined_at: float = 0.0


class ReaderLedger:
    """Owns the slabs to read into.

    Args:
        peer_quota: slabs that one prefill worker may keep busy, so that a stopped one does not stall the others.
        quarantine_cap: more quarantined slabs than this, and the pair is unusable: reads fail at once.
        quarantine_s: a slab that stays quarantined for so long has its endpoint closed: that is the proof of death.
    """

    def __init__(self, *, num_slabs: int, peer_quota: int, quarantine_cap: int, quarantine_s: float) -> None:
        self.table = SlabTable(num_slabs)
        self._quota = peer_quota
        self._cap = quarantine_cap
        self._quarantine_s = quarantine_s
        self._reads: dict[int, _Read] = {}

    def on_event(self, event: Event, now: float) -> list[Action]:
        return self._HANDLERS[type(event)](self, event, now)

    def counts(self) -> SlabCounts:
        return self.table.counts()

    def awaited(self, read_id: int) -> bool:
        """This read's receive is still expected."""
        return self._state(read_id) is SlabState.IN_FLIGHT

    def pending(self, peer: str) -> bool:
        return any(read.peer == peer for read in self._reads.values())

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest for a read's sake."""
        waiting = [
            r.deadline for r in self._reads.values() if r.slab is None or self._slab_state(r) is SlabState.IN_FLIGHT
        ]
        return min(waiting, default=None)

    def check(self) -> list[str]:
        broken = self.table.check()
        held = [read.slab for read in self._reads.values() if read.slab is not None]
        if len(held) != len(set(held)):
            broken.append(f"a slab has two reads: {sorted(held)}")
        for slab in self.table.slabs:
            if (slab.state is SlabState.FREE) == (slab.index in held):
                broken.append(f"slab {slab.index}: {slab.state.name} but held={slab.index in held}")
        return broken

    # ---- events ----

    def _on_wanted(self, event: ReadWanted, now: float) -> list[Action]:
        stuck = self._quarantined(event.peer)
        if stuck > self._cap:
            error = TransferError(f"the pair with {event.peer} is unusable: {stuck} slabs are quarantined")
            return [FailRead(event.read_id, error), Forget(event.read_id)]
        self._reads[event.read_id] = _Read(event.peer, event.deadline)
        return self._start_waiting(now)

    def _on_received(self, event: Received, now: float) -> list[Action]:
        state = self._state(event.read_id)
        if state is SlabState.QUARANTINED:
            return self._free(event.read_id, "receive completed late", now, acknowledge=True)
        if state is not SlabState.IN_FLIGHT:
            return []  # an answer to no open read
        if event.error is not None:
            failed = FailRead(event.read_id, event.error)
            return [failed, *self._free(event.read_id, "received, not usable", now, acknowledge=True)]
        slab = self._slab(event.read_id)
        self.table.move(slab, SlabState.SETTLED, "received and verified")
        return [Deliver(event.read_id, slab)]

    def _on_finished(self, event: Finished, now: float) -> list[Action]:
        read = self._reads.get(event.read_id)
        if read is None:
            return []
        if read.slab is None:
            del self._reads[event.read_id]
            return [Acknowledge(event.read_id), Forget(event.read_id)]
        state = self._slab_state(read)
        if state is SlabState.SETTLED:
            return self._free(event.read_id, "finished", now, acknowledge=True)
        if state is SlabState.IN_FLIGHT:
            self._quarantine(read, now, "cancelled")
        return []

    def _on_peer_gone(self, event: PeerGone, now: float) -> list[Action]:
        actions: list[Action] = []
        error = TransferError(f"peer lost: {event.peer}: {event.why}")
        for read_id, read in list(self._reads.items()):
            if read.peer != event.peer:
                continue
            if read.slab is None:
                del self._reads[read_id]
                actions += [FailRead(read_id, error), Forget(read_id)]
            elif self._slab_state(read) is SlabState.IN_FLIGHT:
                actions += [FailRead(read_id, error), *self._free(read_id, "endpoint closed", now, acknowledge=False)]
            elif self._slab_state(read) is SlabState.QUARANTINED:
                actions += self._free(read_id, "endpoint closed", now, acknowledge=False)
            # SETTLED: verified bytes of our own; the engine may go on with them.
        return actions

    def _on_tick(self, event: Tick, now: float) -> list[Action]:
        actions: list[Action] = []
        doomed: dict[str, None] = {}
        for read_id, read in list(self._reads.items()):
            if read.slab is None:
                if read.deadline <= now:
                    del self._reads[read_id]
                    error = TransferError(f"read from {read.peer}: no free slab before the deadline")
                    actions += [FailRead(read_id, error), Acknowledge(read_id), Forget(read_id)]
            elif self._slab_state(read) is SlabState.IN_FLIGHT:
                if read.deadline <= now:
                    self._quarantine(read, now, "deadline")
                    error = TransferError(f"read from {read.peer}: no answer before the deadline")
                    actions.append(FailRead(read_id, error))
            elif self._slab_state(read) is SlabState.QUARANTINED and read.quarantined_at + self._quarantine_s <= now:
                doomed[read.peer] = None
        return [*actions, *(DropPeer(peer, "a receive did not complete in time") for peer in doomed)]

    # ---- moves ----

    def _start_waiting(self, now: float) -> list[Action]:
        """Give free slabs to waiting reads, oldest first, passing over peers at their quota."""
        free = [slab.index for slab in self.table.slabs if slab.state is SlabState.FREE]
        busy: dict[str, int] = {}
        for read in self._reads.values():
            if read.slab is not None:
                busy[read.peer] = busy.get(read.peer, 0) + 1
        actions: list[Action] = []
        for read_id, read in self._reads.items():
            if not free:
                break
            if read.slab is not None or busy.get(read.peer, 0) >= self._quota:
                continue
            read.slab = free.pop(0)
            busy[read.peer] = busy.get(read.peer, 0) + 1
            self.table.move(read.slab, SlabState.IN_FLIGHT, f"read {read_id} from {read.peer}")
            actions.append(StartRead(read_id, read.slab))
        return actions

    def _quarantine(self, read: _Read, now: float, why: str) -> None:
        assert read.slab is not None
        read.quarantined_at = now
        self.table.move(read.slab, SlabState.QUARANTINED, why)

    def _free(self, read_id: int, why: str, now: float, *, acknowledge: bool) -> list[Action]:
        self.table.move(self._slab(read_id), SlabState.FREE, why)
        del self._reads[read_id]
        notes: list[Action] = [Acknowledge(read_id)] if acknowledge else []
        return [*notes, Forget(read_id), *self._start_waiting(now)]

    def _slab(self, read_id: int) -> int:
        slab = self._reads[read_id].slab
        assert slab is not None
        return slab

    def _state(self, read_id: int) -> SlabState | None:
        read = self._reads.get(read_id)
        return self._slab_state(read) if read is not None and read.slab is not None else None

    def _slab_state(self, read: _Read) -> SlabState:
        assert read.slab is not None
        return self.table.slabs[read.slab].state

    def _quarantined(self, peer: str) -> int:
        return sum(
            read.peer == peer and read.slab is not None and self._slab_state(read) is SlabState.QUARANTINED
            for read in self._reads.values()
        )

    _HANDLERS: ClassVar[dict[type, Callable[..., list[Action]]]] = {
        ReadWanted: _on_wanted,
        Received: _on_received,
        Finished: _on_finished,
        PeerGone: _on_peer_gone,
        Tick: _on_tick,
    }
