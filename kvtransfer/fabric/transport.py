"""What moves slabs between two processes. Owned and driven by the transfer thread; no method is thread-safe.

    decode: connect(peer) -> read(peer, read_id, body, dest) ......................... -> ReceiveDone(read_id)
    prefill:                     RequestArrived(conn, read_id, body) -> answer() -> SendDone(op)
    decode: notify(peer, body)   -> NoteArrived(conn, body)

Every read is answered by exactly one message into `dest`: the slab, or a refusal. PeerLost is reported after all requests of
the lost endpoint have completed, and not before: it is the proof of death.

A transport that offers slabs (`Offering`) answers reads that nobody has sent yet:

    decode: subscribe(peer, attempt) ..... OfferArrived(peer, body) -> accept(peer, read_id, body, dest) -> ReceiveDone(read_id)
    prefill:                  subscriber(peer, attempt) -> offer()  ............... notify() of decode -> SendDone(op)
"""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.slabs.layout import Ring

MAX_MESSAGE_BYTES = 4096
"""Of a request or a note; a longer one is dropped."""


def peer_key(worker_id: str, incarnation: str) -> str:
    """One life of a worker."""
    return f"{worker_id}@{incarnation}"


@dataclass(frozen=True, slots=True)
class RequestArrived:
    conn: str
    read_id: int
    body: bytes


@dataclass(frozen=True, slots=True)
class NoteArrived:
    conn: str
    body: bytes


@dataclass(frozen=True, slots=True)
class SendDone:
    op: int
    ok: bool


@dataclass(frozen=True, slots=True)
class ReceiveDone:
    """`error` empty: `dest` holds an answer, which is still to be verified."""

    read_id: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class OfferArrived:
    """A slab that may be accepted. Whether it is or not, a note about its handle must follow: it is in flight."""

    peer: str
    body: bytes


TransportEvent = RequestArrived | NoteArrived | SendDone | ReceiveDone | PeerLost | OfferArrived


class Wakeup:
    """Ends the transfer thread's sleep from any thread."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def sleep_on(fds: list[int], timeout_s: float) -> None:
    """Sleep until one of `fds` is readable or the time is up; below a millisecond, which poll() cannot do, just the time."""
    if 0.0 < timeout_s < 0.001:
        time.sleep(timeout_s)
        return
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    poll.poll(max(0.0, timeout_s) * 1000.0)


class Transport(Protocol):
    path: str
    """What bytes travel on, for example "ucx:tcp"; final after the first transfer, for transports that choose by the peer."""

    @property
    def address(self) -> KvAddress:
        """The address that peers use; final once the ring is registered."""
        ...

    def register(self, ring: Ring) -> None:
        """Sends and receives will be from and into this ring's slabs."""
        ...

    def connect(self, peer: PeerRef) -> str:
        """Make sure there is an endpoint to this life of the peer, and none to a former one. Returns its key.

        Raises: TransferError.
        """
        ...

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        """Post the receive into `dest`, then send the request. `read_id` is below 2**48. Raises: TransferError."""
        ...

    def answer(self, conn: str, read_id: int, message: np.ndarray | bytes) -> int:
        """Send a slab or a refusal; `message` must stay as it is until SendDone(op). Returns: op. A connection that is
        gone is no error: SendDone(ok=False) follows."""
        ...

    def path_to(self, peer: str) -> str:
        """What this peer's bytes travel on; empty: not known (yet), or not connected."""
        ...

    def notify(self, peer: str, body: bytes) -> None:
        """Send a small message if the peer is connected; else nothing."""
        ...

    def progress(self) -> list[TransportEvent]: ...

    def busy(self) -> bool:
        """Requests are pending that progress() can complete."""
        ...

    def wait(self, wakeup: Wakeup, timeout_s: float, *, awaited: bool) -> None:
        """Sleep until something may have happened, at most `timeout_s`.

        Args:
            awaited: messages are expected soon, since slabs are published or reads are open.
        """
        ...

    def drop(self, peer: str, why: str) -> None:
        """Close the endpoint (of either direction); PeerLost follows."""
        ...

    def close(self) -> None:
        """Close everything. Idempotent."""
        ...


@runtime_checkable
class Offering(Protocol):
    """What a transport has in addition that sends slabs as they are published: for memory that a reader maps, a grant
    is all that must travel, and it costs nothing when it comes early."""

    def subscribe(self, peer: str, attempt: str) -> None:
        """Have this connected peer offer every slab of the attempt that it publishes from now on."""
        ...

    def unsubscribe(self, peer: str, attempt: str) -> None:
        """Offers that are on their way still arrive."""
        ...

    def accept(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        """As `read`, of a slab that was offered: ReceiveDone follows without a message. Raises: TransferError."""
        ...

    def subscriber(self, peer: str, attempt: str) -> str:
        """The connection on which this life of a worker has subscribed to the attempt; empty: it has not."""
        ...

    def offer(self, conn: str, body: bytes, message: np.ndarray) -> int:
        """As `answer`, before the read arrived, and perhaps after it was sent: the reader takes it for the answer to that.
        Returns: op."""
        ...
