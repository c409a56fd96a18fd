"""The ledger of slabs to publish from: granted, packed, read, acknowledged. Pure. The life cycle is in ledger.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from diptych.kvtransfer.api import SlabCounts
from diptych.kvtransfer.ledgers.ledger import DropPeer, SlabState, SlabTable
from diptych.kvtransfer.slabs.handle import Refusal, SlabHandle

_MOST_EXPIRED = 1024

# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GrantAsked:
    """The step thread may take slabs from now on: every free slab is lent to it, now and whenever one becomes free."""


@dataclass(frozen=True, slots=True)
class Published:
    """A granted slab was packed; header and trailer are written. `peer` is the life of a decode worker it is for."""

    peer: str
    handle: SlabHandle


@dataclass(frozen=True, slots=True)
class GrantReturned:
    slab: int
    generation: int


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """A peer's request. `authentic`: the MAC fits."""

    conn: str
    read_id: int
    handle: SlabHandle
    authentic: bool


@dataclass(frozen=True, slots=True)
class SendDone:
    slab: int
    generation: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Acked:
    handle: SlabHandle
    authentic: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    """Decode still wants the slab."""

    handle: SlabHandle
    authentic: bool


@dataclass(frozen=True, slots=True)
class Released:
    attempt: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The endpoint is closed and all its requests have completed: proof of death."""

    conn: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = GrantAsked | Published | GrantReturned | ReadAsked | SendDone | Acked | Renewed | Released | PeerGone | Tick

# ---- actions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    slab: int
    generation: int


@dataclass(frozen=True, slots=True)
class Send:
    conn: str
    read_id: int
    slab: int
    generation: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Refuse:
    conn: str
    read_id: int
    reason: Refusal


@dataclass(frozen=True, slots=True)
class Settled:
    """The attempt has one slab less outstanding: acknowledged, expired or lost with its peer."""

    attempt: str
    slab: int


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """The reader sent no message about any of its slabs for a whole lease: none of them will be read."""

    peer: str


Action = Grant | Send | Refuse | Settled | PeerSilent | DropPeer


@dataclass(slots=True)
class _Outstanding:
    """What a slab that is not free holds."""

    peer: str
    handle: SlabHandle
    expires: float
    conn: str = ""
    acked: bool = False
    quarantined_at: float = 0.0


class PublisherLedger:
    """Owns the slabs to publish from.

    Args:
        worker_id, incarnation, layout_hash: what a handle must name.
        lease_s: from publish, or from the reader's last message, until an unread or unacknowledged slab is taken back.
        quarantine_cap: more quarantined slabs than this to one connection, and its reads are refused (UNUSABLE). A slab
            that stays quarantined for a lease has its endpoint closed: that is the proof of death.
    """

    def __init__(
        self,
        *,
        num_slabs: int,
        payload_bytes: int,
        worker_id: str,
        incarnation: str,
        layout_hash: int,
        lease_s: float,
        quarantine_cap: int,
    ) -> None:
        self.table = SlabTable(num_slabs)
        self._payload_bytes = payload_bytes
        self._me = (worker_id, incarnation)
        self._layout_hash = layout_hash
        self._lease_s = lease_s
        self._cap = quarantine_cap
        self._granting = False
        self._granted: dict[int, int] = {}
        self._outstanding: dict[int, _Outstanding] = {}
        self._last_message: dict[str, float] = {}
        """Time of the last message of each reader about a slab of its own; of readers that hold any."""
        self.refused: Counter[Refusal] = Counter()
        self.rejected_publishes = 0
        self.expired_requests = 0
        self._expired: dict[str, None] = {}
        """The latest of them: a request's slabs expire one by one."""

    def on_event(self, event: Event, now: float) -> list[Action]:
        return self._HANDLERS[type(event)](self, event, now)

    def counts(self) -> SlabCounts:
        return self.table.counts()

    @property
    def any_out(self) -> bool:
        """A slab is published and not free again."""
        return bool(self._outstanding)

    def held_by(self, peer: str) -> int:
        """Slabs that are not free on account of decode worker `peer`."""
        return sum(life.peer == peer for life in self._outstanding.values())

    def check(self) -> list[str]:
        broken = self.table.check()
        for slab in self.table.slabs:
            if (slab.state is SlabState.FREE) == (slab.index in self._outstanding):
                broken.append(f"slab {slab.index}: {slab.state.name} but in_use={slab.index in self._outstanding}")
            if slab.state is not SlabState.FREE and slab.index in self._granted:
                broken.append(f"slab {slab.index}: {slab.state.name} and granted")
            if self._granted.get(slab.index, slab.generation) != slab.generation:
                broken.append(
                    f"slab {slab.index}: granted generation {self._granted[slab.index]}, now {slab.generation}"
                )
        return broken

    # ---- events ----

    def _on_grant_asked(self, event: GrantAsked, now: float) -> list[Action]:
        self._granting = True
        return [a for slab in self.table.slabs for a in self._grant(slab.index)]

    def _on_published(self, event: Published, now: float) -> list[Action]:
        handle = event.handle
        if self._granted.get(handle.slab) != handle.generation:
            # Not lent out in this generation: such a handle is never readable.
            self.rejected_publishes += 1
            return [Settled(handle.attempt, handle.slab)]
        del self._granted[handle.slab]
        self.table.move(handle.slab, SlabState.PACKED, f"published for {handle.attempt}")
        self._outstanding[handle.slab] = _Outstanding(event.peer, handle, now + self._lease_s)
        return []

    def _on_grant_returned(self, event: GrantReturned, now: float) -> list[Action]:
        if self._granted.get(event.slab) != event.generation:
            return []
        del self._granted[event.slab]
        return self._grant(event.slab)

    def _on_read_asked(self, event: ReadAsked, now: float) -> list[Action]:
        reason = self._why_not(event, now)
        if reason is not None:
            self.refused[reason] += 1
            return [Refuse(event.conn, event.read_id, reason)]
        handle = event.handle
        self.table.move(handle.slab, SlabState.IN_FLIGHT, f"read by {event.conn}")
        life = self._outstanding[handle.slab]
        life.conn = event.conn
        self._last_message[life.peer] = now
        return [Send(event.conn, event.read_id, handle.slab, handle.generation, handle.size_bytes)]

    def _why_not(self, event: ReadAsked, now: float) -> Refusal | None:
        handle = event.handle
        if (handle.worker_id, handle.incarnation) != self._me:
            return Refusal.UNKNOWN if handle.worker_id != self._me[0] else Refusal.STALE
        if handle.slab >= len(self.table.slabs) or handle.size_bytes > self._payload_bytes:
            return Refusal.OUT_OF_RANGE
        if not event.authentic:
            return Refusal.FORGED
        if handle.layout_hash != self._layout_hash:
            return Refusal.OUT_OF_RANGE
        slab, life = self.table.slabs[handle.slab], self._outstanding.get(handle.slab)
        if slab.generation != handle.generation:
            return Refusal.STALE
        if life is None:
            return Refusal.UNKNOWN
        if slab.state is not SlabState.PACKED:
            return Refusal.USED
        if life.expires <= now:
            return Refusal.EXPIRED
        if self._quarantined(event.conn) > self._cap:
            return Refusal.UNUSABLE
        return None

    def _on_send_done(self, event: SendDone, now: float) -> list[Action]:
        life = self._outstanding_slab(event.slab, event.generation)
        if life is None:
            return []
        state = self.table.slabs[event.slab].state
        if state is SlabState.QUARANTINED:
            return self._free(event.slab, "send completed")
        if state is not SlabState.IN_FLIGHT:
            return []
        if not event.ok:
            return [Settled(life.handle.attempt, event.slab), *self._free(event.slab, "send failed")]
        self.table.move(event.slab, SlabState.SETTLED, "send completed")
        return self._acknowledged(event.slab, life) if life.acked else []

    def _on_acked(self, event: Acked, now: float) -> list[Action]:
        handle = event.handle
        life = self._outstanding_slab(handle.slab, handle.generation) if event.authentic else None
        if life is None:
            return []
        self._last_message[life.peer] = now
        state = self.table.slabs[handle.slab].state
        if state is SlabState.IN_FLIGHT:
            # Decode has it all, but our own send has not completed yet: the network still owns the slab.
            life.acked = True
            return []
        if state is SlabState.SETTLED:
            return self._acknowledged(handle.slab, life)
        if state is SlabState.PACKED:
            # Decode gave it up unread.
            return [Settled(life.handle.attempt, handle.slab), *self._free(handle.slab, "given up by decode")]
        return []

    def _on_renewed(self, event: Renewed, now: float) -> list[Action]:
        """Only a lease that still runs: what was taken back stays so. It ends with the leg at the latest (Released)."""
        handle = event.handle
        life = self._outstanding_slab(handle.slab, handle.generation) if event.authentic else None
        if life is not None and self.table.slabs[handle.slab].state is not SlabState.QUARANTINED and life.expires > now:
            life.expires = now + self._lease_s
            self._last_message[life.peer] = now
        return []

    def _on_released(self, event: Released, now: float) -> list[Action]:
        actions: list[Action] = []
        for index in [i for i, life in self._outstanding.items() if life.handle.attempt == event.attempt]:
            actions += self._take_back(index, now, "released")
        return actions

    def _on_peer_gone(self, event: PeerGone, now: float) -> list[Action]:
        actions: list[Action] = []
        for index in [i for i, life in self._outstanding.items() if life.conn == event.conn]:
            if self.table.slabs[index].state is not SlabState.QUARANTINED:
                actions.append(Settled(self._outstanding[index].handle.attempt, index))
            actions += self._free(index, "endpoint closed")
        return actions

    def _on_tick(self, event: Tick, now: float) -> list[Action]:
        actions: list[Action] = []
        doomed: dict[str, None] = {}
        silent: dict[str, None] = {}
        for index, life in list(self._outstanding.items()):
            if self.table.slabs[index].state is SlabState.QUARANTINED:
                if life.quarantined_at + self._lease_s <= now:
                    doomed[life.conn] = None
            elif life.expires <= now:
                self._count_expired(life.handle.attempt)
                if self._last_message.get(life.peer, -math.inf) + self._lease_s <= now:
                    silent[life.peer] = None
                actions += [Settled(life.handle.attempt, index), *self._take_back(index, now, "lease over")]
        actions += map(PeerSilent, silent)
        return [*actions, *(DropPeer(conn, "a send did not complete within a lease") for conn in doomed)]

    def _count_expired(self, attempt: str) -> None:
        if attempt in self._expired:
            return
        self.expired_requests += 1
        self._expired[attempt] = None
        if len(self._expired) > _MOST_EXPIRED:
            del self._expired[next(iter(self._expired))]

    # ---- moves ----

    def _take_back(self, index: int, now: float, why: str) -> list[Action]:
        state = self.table.slabs[index].state
        if state is SlabState.IN_FLIGHT:
            self._outstanding[index].quarantined_at = now
            self.table.move(index, SlabState.QUARANTINED, why)
            return []
        return self._free(index, why) if state in (SlabState.PACKED, SlabState.SETTLED) else []

    def _acknowledged(self, index: int, life: _Outstanding) -> list[Action]:
        return [Settled(life.handle.attempt, index), *self._free(index, "acknowledged")]

    def _free(self, index: int, why: str) -> list[Action]:
        self.table.move(index, SlabState.FREE, why)
        peer = self._outstanding.pop(index).peer
        if not self.held_by(peer):
            self._last_message.pop(peer, None)
        return self._grant(index)

    def _grant(self, index: int) -> list[Action]:
        slab = self.table.slabs[index]
        if not self._granting or slab.state is not SlabState.FREE or index in self._granted:
            return []
        self._granted[index] = slab.generation
        return [Grant(index, slab.generation)]

    def _outstanding_slab(self, index: int, generation: int) -> _Outstanding | None:
        life = self._outstanding.get(index)
        return life if life is not None and life.handle.generation == generation else None

    def _quarantined(self, conn: str) -> int:
        slabs = self.table.slabs
        return sum(
            life.conn == conn and slabs[i].state is SlabState.QUARANTINED for i, life in self._outstanding.items()
        )

    _HANDLERS: ClassVar[dict[type, Callable[..., list[Action]]]] = {
        GrantAsked: _on_grant_asked,
        Published: _on_published,
        GrantReturned: _on_grant_returned,
        ReadAsked: _on_read_asked,
        SendDone: _on_send_done,
        Acked: _on_acked,
        Renewed: _on_renewed,
        Released: _on_released,
        PeerGone: _on_peer_gone,
        Tick: _on_tick,
    }
