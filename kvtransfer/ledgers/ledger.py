"""The ledger of staging slabs: who owns each one. Pure: events and the time go in, actions come out.

Each line is a move: state, event, state. Events are classes of publisher_ledger.py and reader_ledger.py.

Slabs to publish from (PublisherLedger, publisher_ledger.py):

    FREE        --Published-->   PACKED         the step thread packed a granted slab
    PACKED      --ReadAsked-->   IN_FLIGHT      the handle is valid: the send begins
    IN_FLIGHT   --SendDone-->    SETTLED        sent; with an error, or acknowledged meanwhile: FREE
    SETTLED     --Acked-->       FREE           decode has verified it
    PACKED      --Acked-->       FREE           decode gave it up unread
    PACKED      --Released-->    FREE           also by Tick, when the lease is over
    SETTLED     --Released-->    FREE           also by Tick, when the lease is over
    IN_FLIGHT   --Released-->    QUARANTINED    also by Tick: the network may still read the slab
    IN_FLIGHT   --PeerGone-->    FREE           the endpoint is closed, its requests completed
    QUARANTINED --SendDone-->    FREE
    QUARANTINED --PeerGone-->    FREE

Slabs to read into (ReaderLedger, reader_ledger.py):

    FREE        --ReadWanted-->  IN_FLIGHT      a slab is free, else the read waits for one; the receive is posted
    IN_FLIGHT   --Received-->    SETTLED        intact; damaged or refused: FREE
    SETTLED     --Finished-->    FREE           unpacked
    IN_FLIGHT   --Finished-->    QUARANTINED    cancelled: the network may still write into the slab
    IN_FLIGHT   --Tick-->        QUARANTINED    the deadline has passed
    IN_FLIGHT   --PeerGone-->    FREE
    QUARANTINED --Received-->    FREE           late; its content is dropped
    QUARANTINED --PeerGone-->    FREE

A slab that is lent to the step thread (granted) counts as FREE. QUARANTINED: the network may still touch the slab; only
proof of death frees it: the request completed, or the endpoint is closed with all its requests completed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from diptych.kvtransfer.api import SlabCounts


class SlabState(Enum):
    FREE = "free"
    PACKED = "packed"
    IN_FLIGHT = "in_flight"
    SETTLED = "settled"
    QUARANTINED = "quarantined"


_S = SlabState
LEGAL_MOVES: frozenset[tuple[SlabState, SlabState]] = frozenset(
    {
        (_S.FREE, _S.PACKED),
        (_S.FREE, _S.IN_FLIGHT),
        (_S.PACKED, _S.IN_FLIGHT),
        (_S.PACKED, _S.FREE),
        (_S.IN_FLIGHT, _S.SETTLED),
        (_S.IN_FLIGHT, _S.QUARANTINED),
        (_S.IN_FLIGHT, _S.FREE),
        (_S.SETTLED, _S.FREE),
        (_S.QUARANTINED, _S.FREE),
    }
)
_HISTORY_LENGTH = 12


class IllegalMoveError(AssertionError):
    """A bug here: a move that the table does not allow. The message holds the slab's history."""


@dataclass(slots=True)
class Slab:
    """One slab of the ring. `generation` rises each time it becomes free."""

    index: int
    state: SlabState = SlabState.FREE
    generation: int = 1
    history: list[str] = field(default_factory=list)


class SlabTable:
    """States, counters and histories of a ring's slabs. The only place where a state changes."""

    def __init__(self, num_slabs: int) -> None:
        self.slabs = [Slab(index) for index in range(num_slabs)]
        self._count = dict.fromkeys(SlabState, 0)
        self._count[SlabState.FREE] = num_slabs

    def move(self, index: int, to: SlabState, why: str) -> Slab:
        """Raises: IllegalMoveError."""
        slab = self.slabs[index]
        if (slab.state, to) not in LEGAL_MOVES:
            history = "; ".join(slab.history)
            raise IllegalMoveError(
                f"slab {index}: {slab.state.name} -> {to.name} ({why}) is no legal move. History: {history}"
            )
        self._count[slab.state] -= 1
        self._count[to] += 1
        slab.history.append(f"g{slab.generation} {slab.state.name} -> {to.name}: {why}")
        del slab.history[:-_HISTORY_LENGTH]
        slab.state = to
        if to is SlabState.FREE:
            slab.generation += 1
        return slab

    def counts(self) -> SlabCounts:
        c = self._count
        return SlabCounts(
            total=len(self.slabs),
            free=c[_S.FREE],
            packed=c[_S.PACKED],
            in_flight=c[_S.IN_FLIGHT],
            settled=c[_S.SETTLED],
            quarantined=c[_S.QUARANTINED],
        )

    def check(self) -> list[str]:
        """Check every slab. Returns: a sentence for each invariant that does not hold."""
        broken = []
        for state in SlabState:
            walked = sum(slab.state is state for slab in self.slabs)
            if walked != self._count[state]:
                broken.append(f"{state.name}: counted {self._count[state]}, walked {walked}")
        if sum(self._count.values()) != len(self.slabs):
            broken.append(f"slabs by state sum to {sum(self._count.values())}, not {len(self.slabs)}")
        return broken


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Action of both ledgers: close the endpoint to `peer`; answered by PeerGone once all its requests completed."""

    peer: str
    why: str
