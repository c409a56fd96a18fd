"""A KV transport that loses, delays, reorders, duplicates and damages messages, and checks accesses to memory in
flight.

It keeps the contract of kvtransfer.fabric.transport: every read completes once (or never, while its endpoint exists), and
PeerLost follows the completion of all requests of that endpoint. Bytes are read and written when the network would do
it: late.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import xxhash
from handoff_sim.laws import Law, Report
from handoff_sim.links import Links, Node

from diptych.common.errors import TransferError
from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.fabric.transport import (
    NoteArrived,
    PeerLost,
    ReceiveDone,
    RequestArrived,
    SendDone,
    TransportEvent,
    Wakeup,
    peer_key,
)
from diptych.kvtransfer.slabs import handle as handles
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, Ring


@dataclass(frozen=True)
class Faults:
    """Probabilities for each message."""

    lose: float = 0.0
    twice: float = 0.0
    damage: float = 0.0
    stick: float = 0.0
    """A send that completes only with its endpoint."""
    forge: float = 0.0
    """An additional request or note: forged, stale or used."""


@dataclass(eq=False)
class _Conn:
    name: str
    """As prefill calls it; the reader's name for it is the peer key."""
    key: str
    reader: SimTransport
    source: SimTransport
    lost_by: set[SimTransport] = field(default_factory=set)

    def name_for(self, side: SimTransport) -> str:
        return self.key if side is self.reader else self.name

    def other(self, side: SimTransport) -> SimTransport:
        return self.source if side is self.reader else self.reader


@dataclass
class _Recv:
    conn: _Conn
    dest: np.ndarray
    slab: int


@dataclass
class _Send:
    conn: _Conn
    message: np.ndarray | bytes
    slab: int
    digest: int
    never: bool = False
    """It completes only with its endpoint, whether or not the bytes arrive."""


class Wires:
    """All transports of a world."""

    def __init__(self, links: Links, rng: Random, faults: Faults, report: Report) -> None:
        self.links, self.rng, self.faults, self.report = links, rng, faults, report
        self.transports: dict[bytes, SimTransport] = {}
        self.answered: list[bytes] = []
        """Bodies of requests that were answered with a slab: never again."""
        self.noted: list[bytes] = []
        self.forged: dict[int, str] = {}
        self._forged_ids = itertools.count(1 << 47)

    def chance(self, p: float) -> bool:
        return p > 0 and self.rng.random() < p

    def times(self) -> int:
        return 0 if self.chance(self.faults.lose) else 2 if self.chance(self.faults.twice) else 1

    def forgery(self, body: bytes) -> bytes:
        """A handle without a valid signature: each change makes another handle, of one byte, too."""
        handle = handles.decode(body)
        change = self.rng.choice(
            [
                {"attempt": handle.attempt + "x"},
                {"slab": handle.slab ^ 1},
                {"generation": handle.generation + self.rng.choice([-1, 1])},
                {"size_bytes": handle.size_bytes - 1 or 2},
                {"expires_ns": handle.expires_ns + 1},
                {"slab": 99},
            ]
        )
        try:
            return handles.encode(replace(handle, **change))
        except Exception:
            return body[:-1]

    def next_forged(self, kind: str) -> int:
        read_id = next(self._forged_ids)
        self.forged[read_id] = kind
        return read_id


class SimTransport:
    path = "sim"

    def __init__(self, wires: Wires, node: Node, wake: Callable[[], None]) -> None:
        self._wires, self._links, self.node, self._wake = wires, wires.links, node, wake
        blob = f"{node.worker_id}@{node.incarnation}".encode()
        self.address = KvAddress("sim", "10.0.0.1", 0, blob)
        wires.transports[blob] = self
        self._out: dict[str, _Conn] = {}
        self._in: dict[str, _Conn] = {}
        self._gone: set[str] = set()
        self._dying: list[_Conn] = []
        self._events: list[TransportEvent] = []
        self._recvs: dict[int, _Recv] = {}
        self._sends: dict[int, _Send] = {}
        self._bodies: dict[int, bytes] = {}
        self._ops = itertools.count(1)
        self._base = 0
        self._slab_bytes = 1
        self.lent: Callable[[], set[int]] = set
        """Slabs whose payload is in other hands: the step thread unpacks them."""

    # ---- for the checks ----

    def touching(self) -> set[int]:
        """Slabs that the network may still read or write."""
        return {r.slab for r in self._recvs.values()} | {s.slab for s in self._sends.values() if s.slab >= 0}

    @property
    def num_open(self) -> int:
        return len(self._recvs) + len(self._sends)

    # ---- Transport ----

    def register(self, ring: Ring) -> None:
        self._base = ring.array.ctypes.data
        self._slab_bytes = ring.spec.slab_bytes

    def _slab_of(self, array: np.ndarray) -> int:
        return (array.ctypes.data - self._base) // self._slab_bytes

    def connect(self, peer: PeerRef) -> str:
        key = peer_key(peer.worker_id, peer.incarnation)
        if key in self._out:
            return key
        if key in self._gone:
            raise TransferError(f"peer lost: {key}")
        for other in [k for k in self._out if k.rpartition("@")[0] == peer.worker_id]:
            self.drop(other, "the worker has started again")
        source = self._wires.transports.get(peer.address.blob)
        if source is None or source.node.dead:
            raise TransferError(f"peer lost: {key}: nobody there")
        conn = _Conn(f"{self.address.blob.decode()}#{next(self._ops)}", key, self, source)
        self._out[key] = conn
        for old in [c for c in source._in.values() if c.reader.node.worker_id == self.node.worker_id]:
            source.lose(old, "the worker has connected again")
        source._in[conn.name] = conn
        return key

    def path_to(self, peer: str) -> str:
        return self.path if peer in self._out else ""

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        conn = self._out.get(peer)
        if conn is None:
            raise TransferError(f"peer lost: {peer}")
        slab = self._slab_of(dest)
        if slab in self.touching():
            self._wires.report(
                Law.ONE_USER, f"{self.node.worker_id}: slab {slab} is read into while an older read may still land"
            )
        if slab in self.lent():
            self._wires.report(Law.ONE_USER, f"{self.node.worker_id}: slab {slab} is read into while it is unpacked")
        self._recvs[read_id] = _Recv(conn, dest, slab)
        for _ in range(self._wires.times()):
            self._deliver(conn, lambda: conn.source._on_request(conn, read_id, body))

    def _on_request(self, conn: _Conn, read_id: int, body: bytes) -> None:
        if self in conn.lost_by:
            return
        wires = self._wires
        arrivals = [RequestArrived(conn.name, read_id, body)]
        if wires.chance(wires.faults.forge):
            forged = RequestArrived(conn.name, wires.next_forged("forged"), wires.forgery(body))
            arrivals.insert(wires.rng.randint(0, 1), forged)
        for arrival in arrivals:
            self._emit(arrival)
        if wires.answered and wires.chance(wires.faults.forge):
            self._emit(RequestArrived(conn.name, wires.next_forged("used"), wires.rng.choice(wires.answered)))
        if wires.chance(wires.faults.forge):
            self._emit(NoteArrived(conn.name, wires.forgery(body)))
        if wires.noted and wires.chance(wires.faults.forge):
            self._emit(NoteArrived(conn.name, wires.rng.choice(wires.noted)))

    def answer(self, conn: str, read_id: int, message: np.ndarray | bytes) -> int:
        wires, op = self._wires, next(self._ops)
        to = self._in.get(conn)
        if not isinstance(message, bytes):
            kind = wires.forged.get(read_id)
            if kind:
                wires.report(Law.HANDLES, f"{self.node.worker_id}: a {kind} handle was answered with a slab")
            wires.answered.append(self._bodies[read_id])
        if to is None or self in to.lost_by:
            self._emit(SendDone(op, False))
            return op
        slab = -1 if isinstance(message, bytes) else self._slab_of(message)
        if slab >= 0 and slab in self.touching():
            wires.report(Law.ONE_USER, f"{self.node.worker_id}: slab {slab} is sent twice at once")
        self._sends[op] = _Send(to, message, slab, xxhash.xxh3_64_intdigest(message))
        stuck = slab >= 0 and wires.chance(wires.faults.stick)
        self._sends[op].never = stuck
        if not stuck or wires.chance(0.5):
            self._links.deliver(self.node, self.node, self._links.delay(), lambda: self._transmit(op, read_id))
        return op

    def _transmit(self, op: int, read_id: int) -> None:
        send = self._sends.get(op)
        if send is None:
            return
        self._unchanged(send)
        data = bytes(send.message)
        conn = send.conn
        if self._wires.times():
            self._deliver(conn, lambda: conn.reader._on_answer(conn, read_id, data), back=True)
        if not send.never:
            self._links.deliver(self.node, self.node, self._links.delay(), lambda: self._sent(op))

    def _sent(self, op: int) -> None:
        send = self._sends.pop(op, None)
        if send is not None:
            self._unchanged(send)
            self._emit(SendDone(op, True))

    def _unchanged(self, send: _Send) -> None:
        if xxhash.xxh3_64_intdigest(send.message) != send.digest:
            self._wires.report(
                Law.ONE_USER, f"{self.node.worker_id}: slab {send.slab} was written while it was being sent"
            )

    def _on_answer(self, conn: _Conn, read_id: int, data: bytes) -> None:
        recv = self._recvs.get(read_id)
        if recv is None or self in conn.lost_by:
            return
        del self._recvs[read_id]
        if recv.slab in self.lent():
            self._wires.report(
                Law.ONE_USER, f"{self.node.worker_id}: a read landed in slab {recv.slab} while it is unpacked"
            )
        size = min(len(data), recv.dest.size)
        recv.dest[:size] = np.frombuffer(data, np.uint8)[:size]
        if self._wires.chance(self._wires.faults.damage):
            at = self._wires.rng.randrange(size) if self._wires.chance(0.3) else min(size - 1, HEADER_BYTES + 5)
            recv.dest[at] ^= 0x40
        self._emit(ReceiveDone(read_id))
        if self._wires.chance(self._wires.faults.twice):
            self._emit(ReceiveDone(read_id))

    def notify(self, peer: str, body: bytes) -> None:
        conn = self._out.get(peer)
        if conn is not None:
            self._wires.noted.append(body)
            for _ in range(self._wires.times()):
                self._deliver(conn, lambda: conn.source._on_note(conn, body))

    def _on_note(self, conn: _Conn, body: bytes) -> None:
        if self not in conn.lost_by:
            self._emit(NoteArrived(conn.name, body))

    def progress(self) -> list[TransportEvent]:
        # Peers whose loss is being reported: a new endpoint of that name must wait until all sides are notified.
        lost = {event.peer for event in self._events if isinstance(event, PeerLost)}
        self._gone = {conn.name_for(self) for conn in self._dying} | lost
        events, self._events = self._events, []
        return events

    def busy(self) -> bool:
        return bool(self._events)

    def wait(self, wakeup: Wakeup, timeout_s: float, *, awaited: bool) -> None:
        raise AssertionError("nobody waits on virtual time")

    def drop(self, peer: str, why: str) -> None:
        for conn in [c for c in (*self._out.values(), *self._in.values()) if c.name_for(self) == peer]:
            self.lose(conn, why)

    def lose(self, conn: _Conn, why: str) -> None:
        """Close this side of an endpoint; the other side is notified when possible."""
        if self in conn.lost_by:
            return
        conn.lost_by.add(self)
        self._out = {k: c for k, c in self._out.items() if c is not conn}
        self._in = {k: c for k, c in self._in.items() if c is not conn}
        self._gone.add(conn.name_for(self))
        self._dying.append(conn)
        self._links.deliver(self.node, self.node, self._links.delay(), lambda: self._buried(conn, why))
        other = conn.other(self)
        self._links.deliver(self.node, other.node, self._links.delay(), lambda: other.lose(conn, "closed by peer"))

    def _buried(self, conn: _Conn, why: str) -> None:
        for read_id in [i for i, r in self._recvs.items() if r.conn is conn]:
            del self._recvs[read_id]
            self._emit(ReceiveDone(read_id, f"peer lost: {why}"))
        for op in [i for i, s in self._sends.items() if s.conn is conn]:
            del self._sends[op]
            self._emit(SendDone(op, False))
        self._dying.remove(conn)
        self._emit(PeerLost(conn.name_for(self), why))

    def die(self) -> None:
        """The process is gone; its peers notice some time later."""
        for conn in [*self._out.values(), *self._in.values()]:
            other = conn.other(self)
            noticed = self._links.rng.choice((0.02, 0.2, 1.5))
            self._links.deliver(self.node, other.node, noticed, lambda c=conn, o=other: o.lose(c, "killed"))

    def close(self) -> None:
        for conn in [*self._out.values(), *self._in.values()]:
            self.lose(conn, "closed")

    def _deliver(self, conn: _Conn, call: Callable[[], None], back: bool = False) -> None:
        source, target = (conn.source, conn.reader) if back else (conn.reader, conn.source)
        self._links.deliver(source.node, target.node, self._links.delay(), call)

    def _emit(self, event: TransportEvent) -> None:
        if isinstance(event, RequestArrived):
            self._bodies[event.read_id] = event.body
        self._events.append(event)
        self._wake()
