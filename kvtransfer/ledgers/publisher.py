"""Publishing, on the transfer thread: turns transport events into ledger events, and ledger actions into sends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from diptych.engine.messages import SlabGrant
from diptych.kvtransfer.api import SlabCounts
from diptych.kvtransfer.fabric import transport as wire
from diptych.kvtransfer.ledgers import publisher_ledger as pub
from diptych.kvtransfer.ledgers.ledger import DropPeer
from diptych.kvtransfer.slabs import handle as handles
from diptych.kvtransfer.slabs.handle import Refusal, SlabHandle
from diptych.kvtransfer.slabs.layout import Ring, refusal_message

log = logging.getLogger(__name__)
_OFFER = -1
"""Read number of a slab that is sent before it was asked for."""


class PublishSide:
    """Single-threaded. `on_grant`, `on_settled` and `on_silent` are called in the middle of a step and must not block."""

    def __init__(
        self,
        ledger: pub.PublisherLedger,
        transport: wire.Transport,
        ring: Ring,
        key: bytes,
        on_grant: Callable[[SlabGrant], None],
        on_settled: Callable[[str, int], None],
        on_silent: Callable[[str], None],
    ) -> None:
        self._ledger = ledger
        self._transport = transport
        self._offering = transport if isinstance(transport, wire.Offering) else None
        self._ring = ring
        self._key = key
        self._on_grant = on_grant
        self._on_settled = on_settled
        self._on_silent = on_silent
        self._sending: dict[int, tuple[int, int, int]] = {}
        """Send operation -> slab, generation, payload bytes."""
        self._refusing: set[int] = set()
        self._offers: dict[tuple[int, int], str] = {}
        """Slab, generation -> the connection that it was offered to, until its send is done."""
        self.bytes_sent = 0

    # ---- calls of the event loop ----

    def start(self, now: float) -> None:
        self._feed(pub.GrantAsked(), now)

    def publish(self, peer: str, handle: SlabHandle, now: float) -> None:
        self._feed(pub.Published(peer, handle), now)
        if self._offering is not None and (conn := self._offering.subscriber(peer, handle.attempt)):
            # To the ledger it is a read like any other, which came at once.
            self._feed(pub.ReadAsked(conn, _OFFER, handle, authentic=True), now)

    def return_grant(self, slab: int, generation: int, now: float) -> None:
        self._feed(pub.GrantReturned(slab, generation), now)

    def release(self, attempt: str, now: float) -> None:
        self._feed(pub.Released(attempt), now)

    # ---- driven by the transfer thread ----

    def on_transport(self, event: wire.TransportEvent, now: float) -> None:
        match event:
            case wire.RequestArrived(conn, read_id, body):
                self._on_request(conn, read_id, body, now)
            case wire.NoteArrived(conn, body):
                try:
                    handle, renewal = handles.decode_note(body)
                except ValueError:
                    log.warning("note from %s does not parse", conn)
                    return
                authentic = handles.verify(self._key, handle)
                self._feed(pub.Renewed(handle, authentic) if renewal else pub.Acked(handle, authentic), now)
            case wire.SendDone(op, ok):
                self._refusing.discard(op)
                slab, generation, size = self._sending.pop(op, (-1, 0, 0))
                self._offers.pop((slab, generation), None)
                if slab >= 0:
                    self.bytes_sent += size if ok else 0
                    self._feed(pub.SendDone(slab, generation, ok), now)
            case wire.PeerLost(peer, why):
                log.debug("publishing to %s ends: %s", peer, why)
                self._feed(pub.PeerGone(peer), now)
            case _:
                raise TypeError(f"{type(event).__name__} is for the reading side")

    def tick(self, now: float) -> None:
        self._feed(pub.Tick(), now)

    @property
    def awaited(self) -> bool:
        """Slabs are published: a read may arrive at any moment."""
        return self._ledger.any_out

    def counts(self) -> SlabCounts:
        return self._ledger.counts()

    @property
    def expired_requests(self) -> int:
        return self._ledger.expired_requests

    def check(self) -> list[str]:
        return self._ledger.check()

    # ---- inside ----

    def _on_request(self, conn: str, read_id: int, body: bytes, now: float) -> None:
        try:
            handle = handles.decode(body)
        except ValueError:
            self._refuse(conn, read_id, Refusal.MALFORMED)
            return
        if self._offers.get((handle.slab, handle.generation)) == conn:
            return  # the two crossed: the offer is the answer
        self._feed(pub.ReadAsked(conn, read_id, handle, handles.verify(self._key, handle)), now)

    def _feed(self, event: pub.Event, now: float) -> None:
        for action in self._ledger.on_event(event, now):
            match action:
                case pub.Grant(slab, generation):
                    self._on_grant(SlabGrant(slab, generation, self._ring.payload(slab)))
                case pub.Send(conn, read_id, slab, generation, size):
                    message = self._ring.message(slab, size)
                    if read_id == _OFFER:
                        assert self._offering is not None
                        assert isinstance(event, pub.ReadAsked)
                        op = self._offering.offer(conn, handles.encode(event.handle), message)
                        self._offers[slab, generation] = conn
                    else:
                        op = self._transport.answer(conn, read_id, message)
                    self._sending[op] = (slab, generation, size)
                case pub.Refuse(conn, read_id, reason):
                    if read_id != _OFFER:  # else the reader asks, and is told then
                        self._refuse(conn, read_id, reason)
                case pub.Settled(attempt, slab):
                    self._on_settled(attempt, slab)
                case pub.PeerSilent(peer):
                    log.warning("%s sent no message about its slabs for a whole lease", peer)
                    self._on_silent(peer)
                case DropPeer(peer, why):
                    log.warning("closing the endpoint to %s: %s", peer, why)
                    self._transport.drop(peer, why)

    def _refuse(self, conn: str, read_id: int, reason: Refusal) -> None:
        log.warning("refused a read of %s: %s", conn, reason.name)
        self._refusing.add(self._transport.answer(conn, read_id, refusal_message(reason)))
