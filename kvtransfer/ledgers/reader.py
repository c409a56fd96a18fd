"""Reading, on the transfer thread: turns transport events into ledger events, and ledger actions into reads."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from diptych.common.errors import DiptychError, StaleReferenceError, TransferError
from diptych.kvtransfer.api import PeerRef, SlabCounts
from diptych.kvtransfer.fabric import transport as wire
from diptych.kvtransfer.ledgers import reader_ledger as rd
from diptych.kvtransfer.ledgers.ledger import DropPeer
from diptych.kvtransfer.slabs import handle as handles
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.kvtransfer.slabs.layout import Ring, check_slab, clear_frame, message_bytes, payload_capacity

log = logging.getLogger(__name__)
_SMOOTHING = 0.2
_OWN_IDS = 1 << 62
"""Numbers of reads that nobody has asked for begin here. They never travel, so they may exceed the wire's 48 bits."""


@dataclass(slots=True)
class _Wanted:
    peer: PeerRef
    key: str
    handle: SlabHandle
    slab: int = -1
    started: float = 0.0
    offered: bool = False
    """The peer has sent it already: it is accepted, not asked for."""
    own: bool = False
    """No caller has asked for it: it is reported with its handle."""
    reported: bool = False


@dataclass(frozen=True, slots=True)
class _Expected:
    peer: str
    read_s: float


class ReadSide:
    """Single-threaded. `on_delivered(read_id, slab, path, handle)` and `on_failed(read_id, error, handle)` must not block;
    `handle` is None but for slabs that came unasked, of an expected attempt.

    Args: first_slab: the ledger's slab 0 is this one of the arena; callers get the arena's numbers.
    """

    def __init__(
        self,
        ledger: rd.ReaderLedger,
        transport: wire.Transport,
        ring: Ring,
        *,
        first_slab: int = 0,
        layout_hash: int,
        bytes_per_s: float,
        verify_checksum: bool,
        on_delivered: Callable[[int, int, str, SlabHandle | None], None],
        on_failed: Callable[[int, DiptychError, SlabHandle | None], None],
    ) -> None:
        self._ledger = ledger
        self._transport = transport
        self._offering = transport if isinstance(transport, wire.Offering) else None
        self._expected: dict[str, _Expected] = {}
        """By attempt."""
        self._peers: dict[str, PeerRef] = {}
        """Those that slabs are expected from, by key."""
        self._own_ids = itertools.count(_OWN_IDS)
        self._ring = ring
        self._first_slab = first_slab
        self._layout_hash = layout_hash
        self._verify_checksum = verify_checksum
        self._on_delivered = on_delivered
        self._on_failed = on_failed
        self._wanted: dict[int, _Wanted] = {}
        self._events: deque[rd.Event] = deque()
        self.bytes_per_s = bytes_per_s
        self.bytes_received = 0

    # ---- calls of the event loop ----

    def want(self, read_id: int, peer: PeerRef, handle: SlabHandle, deadline: float, now: float) -> None:
        error = self._cannot(peer, handle)
        if error is not None:
            self._on_failed(read_id, error, None)
            return
        if self._is_offered(handle):
            return  # what is reported of the offer answers this read
        key = wire.peer_key(peer.worker_id, peer.incarnation)
        self._wanted[read_id] = _Wanted(peer, key, handle)
        self._feed(rd.ReadWanted(read_id, key, deadline), now)

    def expect(self, peer: PeerRef, attempt: str, read_s: float, now: float) -> None:
        """Slabs of the attempt that the peer publishes from now on are delivered without being asked for, if the transport
        offers them. `read_s`: the deadline of each, from its arrival."""
        if self._offering is None:
            return
        try:
            key = self._transport.connect(peer)
        except TransferError as error:  # the first read will tell
            log.info("no slab of %s is expected: %s", peer.worker_id, error.message)
            return
        self._expected[attempt] = _Expected(key, read_s)
        self._peers[key] = peer
        self._offering.subscribe(key, attempt)

    def unexpect(self, attempt: str, now: float) -> None:
        """Offers that were not delivered are given back, and so is what still comes."""
        expected = self._expected.pop(attempt, None)
        if expected is None or self._offering is None:
            return
        if all(other.peer != expected.peer for other in self._expected.values()):
            del self._peers[expected.peer]
        self._offering.unsubscribe(expected.peer, attempt)
        for read_id, wanted in list(self._wanted.items()):
            if wanted.own and not wanted.reported and wanted.handle.attempt == attempt:
                wanted.reported = True
                self._feed(rd.Finished(read_id), now)

    def finish(self, read_id: int, now: float) -> None:
        """Also cancels a read in any phase."""
        self._feed(rd.Finished(read_id), now)

    def renew(self, peer: str, handle: SlabHandle, now: float) -> None:
        self._transport.notify(peer, handles.encode_renewal(handle))

    def forget(self, peer: str, now: float) -> None:
        """Close the endpoint; its reads fail once the transport reports that the peer is lost."""
        self._transport.drop(peer, "forgotten")

    # ---- driven by the transfer thread ----

    def on_transport(self, event: wire.TransportEvent, now: float) -> None:
        match event:
            case wire.ReceiveDone(read_id, error):
                self._on_received(read_id, error, now)
            case wire.OfferArrived(peer, body):
                self._on_offer(peer, body, now)
            case wire.PeerLost(peer, why):
                log.info("peer lost: %s: %s", peer, why)
                self._feed(rd.PeerGone(peer, why), now)
            case _:
                raise TypeError(f"{type(event).__name__} is for the publishing side")

    def tick(self, now: float) -> None:
        self._feed(rd.Tick(), now)

    def next_deadline(self) -> float | None:
        return self._ledger.next_deadline()

    @property
    def may_be_offered(self) -> bool:
        """The transport brings slabs unasked, where a peer offers them. From any thread."""
        return self._offering is not None

    @property
    def awaited(self) -> bool:
        """Reads are open."""
        return bool(self._wanted)

    def counts(self) -> SlabCounts:
        return self._ledger.counts()

    def check(self) -> list[str]:
        return self._ledger.check()

    def fail_all(self, why: str) -> None:
        for read_id, wanted in list(self._wanted.items()):
            self._on_failed(read_id, TransferError(why), wanted.handle if wanted.own else None)

    # ---- inside ----

    def _is_offered(self, handle: SlabHandle) -> bool:
        """The slab has come unasked; also while the report of it is on its way to the event loop."""
        return any(wanted.own and wanted.handle == handle for wanted in self._wanted.values())

    def _on_offer(self, key: str, body: bytes, now: float) -> None:
        handle = handles.decode(body)
        expected = self._expected.get(handle.attempt)
        if expected is None or expected.peer != key or self._cannot(self._peers[key], handle) is not None:
            self._transport.notify(key, body)  # nobody waits for it, so nothing will be read
            return
        asked = next((wanted for wanted in self._wanted.values() if wanted.handle == handle), None)
        if asked is not None:
            # Either it waits for a slab of ours, or the transport has taken the offer for its answer.
            asked.offered = True
            return
        read_id = next(self._own_ids)
        self._wanted[read_id] = _Wanted(self._peers[key], key, handle, offered=True, own=True)
        self._feed(rd.ReadWanted(read_id, key, now + expected.read_s), now)
        if read_id not in self._wanted:
            self._transport.notify(key, body)

    def _cannot(self, peer: PeerRef, handle: SlabHandle) -> DiptychError | None:
        if (handle.worker_id, handle.incarnation) != (peer.worker_id, peer.incarnation):
            return StaleReferenceError(
                f"handle of {handle.worker_id}@{handle.incarnation} is not of this life of the peer"
            )
        expected = peer.layout_hash or self._layout_hash
        if handle.layout_hash != expected:
            return TransferError(f"layout {handle.layout_hash:016x} of {handle.worker_id}, expected {expected:016x}")
        room = payload_capacity(self._ring.spec.slab_bytes)
        if not 0 < handle.size_bytes <= room:
            return TransferError(f"slab of {handle.size_bytes} bytes: ours hold 1 to {room}")
        return None

    def _on_received(self, read_id: int, error: str, now: float) -> None:
        wanted = self._wanted.get(read_id)
        if wanted is None:
            return
        problem: DiptychError | None = None
        if error:
            problem = TransferError(error)
        elif self._ledger.awaited(read_id):
            here = self._verify_checksum and not self._ring.verifies_later
            problem = check_slab(self._ring.slab(wanted.slab), wanted.handle, verify_checksum=here)
            if problem is None:
                self._measure(wanted, now)
        self._feed(rd.Received(read_id, problem), now)

    def _measure(self, wanted: _Wanted, now: float) -> None:
        size = wanted.handle.size_bytes
        self.bytes_received += size
        elapsed = now - wanted.started
        if elapsed > 0 and size >= 1 << 18 and not self._ring.verifies_later:
            rate = message_bytes(size) / elapsed
            self.bytes_per_s += _SMOOTHING * (rate - self.bytes_per_s)

    def _start(self, read_id: int, slab: int, now: float) -> None:
        wanted = self._wanted[read_id]
        wanted.slab = slab = self._first_slab + slab
        wanted.started = now
        size = wanted.handle.size_bytes
        clear_frame(self._ring.slab(slab), size)
        try:
            dest = self._ring.message(slab, size)
            if wanted.offered:
                assert self._offering is not None
                self._offering.accept(wanted.key, read_id, handles.encode(wanted.handle), dest)
            else:
                key = self._transport.connect(wanted.peer)
                self._transport.read(key, read_id, handles.encode(wanted.handle), dest)
        except TransferError as error:
            self._feed(rd.Received(read_id, error), now)

    def _report(self, read_id: int) -> SlabHandle | None:
        """The handle, of a read that nobody has asked for; from now on it is the event loop's to answer for."""
        wanted = self._wanted.get(read_id)
        if wanted is None or not wanted.own:
            return None
        wanted.reported = True
        return wanted.handle

    def _feed(self, event: rd.Event, now: float) -> None:
        """Events that an action causes are queued: a lost peer with many waiting reads must not recurse."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            try:
                for action in self._ledger.on_event(self._events[0], now):
                    self._do(action, now)
            finally:
                self._events.popleft()

    def _do(self, action: rd.Action, now: float) -> None:
        match action:
            case rd.StartRead(read_id, slab):
                self._start(read_id, slab, now)
            case rd.Deliver(read_id, slab):
                path = self._transport.path_to(self._wanted[read_id].key)
                self._on_delivered(read_id, self._first_slab + slab, path, self._report(read_id))
            case rd.FailRead(read_id, error):
                self._on_failed(read_id, error, self._report(read_id))
            case rd.Acknowledge(read_id):
                wanted = self._wanted[read_id]
                self._transport.notify(wanted.key, handles.encode(wanted.handle))
            case rd.Forget(read_id):
                self._wanted.pop(read_id, None)
            case DropPeer(peer, why):
                log.warning("closing the endpoint to %s: %s", peer, why)
                self._transport.drop(peer, why)
