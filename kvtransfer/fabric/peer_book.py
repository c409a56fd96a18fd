"""The endpoints of a transport by name, those that are closing, and those whose loss was not reported yet.

outgoing: peers that we read from, by peer key          incoming: peers that read from us, by connection number
     `lose` takes an endpoint out of either and keeps it among the dying until the transport reports that nothing of it is
     under way any more (`bury`). A new endpoint to a peer whose loss was not reported has to wait: the report of the old
     one's death would be taken for its own, and free slabs that are being read into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from diptych.common.errors import TransferError
from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.fabric.net_interfaces import why_unreachable
from diptych.kvtransfer.fabric.transport import PeerLost, TransportEvent, peer_key

TOKEN_BYTES = 16
"""In front of the address: it stands in every control message, and one without it is dropped unparsed."""
MAX_CONNECTIONS = 256
_LENGTH_BYTES = 4


class Endpoint(Protocol):
    """`conn` is sent in control messages; `lost`: why it was closed."""

    name: str
    conn: int
    lost: str


E = TypeVar("E", bound=Endpoint)


class PeerBook(Generic[E]):
    """Args:
    transport, host: what an address must be of, and where we are.
    lose: closes an endpoint (and comes back here through `closed`).
    """

    def __init__(self, transport: str, host: str, lose: Callable[[E, str], None]) -> None:
        self._transport, self._host = transport, host
        self._lose = lose
        self.outgoing: dict[str, E] = {}
        self.incoming: dict[int, E] = {}
        self.dying: list[E] = []
        self._untold: set[str] = set()

    def endpoints(self) -> list[E]:
        return [*self.outgoing.values(), *self.incoming.values()]

    def reader(self, name: str) -> E | None:
        """The connection that reads from us, by its name."""
        return next((peer for peer in self.incoming.values() if peer.name == name), None)

    def address_of(self, peer: PeerRef) -> KvAddress:
        """Where to connect to `peer`, which has no endpoint yet; those to its former lives are closed.

        Raises: TransferError.
        """
        key = peer_key(peer.worker_id, peer.incarnation)
        if key in self._untold:
            raise TransferError(f"peer lost: {key}")
        for other in [e for k, e in self.outgoing.items() if k.rpartition("@")[0] == peer.worker_id]:
            self._lose(other, "the worker has started again")
        address = peer.address
        if address.transport != self._transport or len(address.blob) <= TOKEN_BYTES:
            raise TransferError(f"{key} has no {self._transport.upper()} address")
        why = why_unreachable(address.host, self._host)
        if why:
            raise TransferError(f"{key}: {why}")
        return address

    def may_greet(self, worker_id: str) -> bool:
        """A HELLO of `worker_id` came: its former connections are closed. False: there is no room for another."""
        for old in [e for e in self.incoming.values() if e.name.rpartition("@")[0] == worker_id]:
            self._lose(old, "the worker has connected again")
        return len(self.incoming) < MAX_CONNECTIONS

    def closed(self, peer: E, why: str) -> None:
        """The endpoint was closed; something of it may still be under way."""
        peer.lost = why
        self._untold.add(peer.name)
        self.dying.append(peer)
        if self.outgoing.get(peer.name) is peer:
            del self.outgoing[peer.name]
        elif self.incoming.get(peer.conn) is peer:
            del self.incoming[peer.conn]

    def bury(self, peer: E) -> PeerLost:
        """Nothing of it is under way any more."""
        self.dying.remove(peer)
        return PeerLost(peer.name, peer.lost)

    def begin_turn(self, events: Iterable[TransportEvent]) -> None:
        """`events` are about to be reported: any other peer that is not closing may connect again."""
        told_now = {event.peer for event in events if isinstance(event, PeerLost)}
        self._untold = {peer.name for peer in self.dying} | told_now

    def drop(self, name: str, why: str) -> None:
        for peer in [e for e in self.endpoints() if e.name == name]:
            self._lose(peer, why)


def pack_parts(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)


def unpack_parts(body: bytes, count: int) -> list[bytes] | None:
    """The first `count` parts of what anybody may have sent; None: it is cut."""
    parts, at = [], 0
    for _ in range(count):
        length = int.from_bytes(body[at : at + _LENGTH_BYTES], "little")
        at += _LENGTH_BYTES
        if at + length > len(body):
            return None
        parts.append(body[at : at + length])
        at += length
    return parts
