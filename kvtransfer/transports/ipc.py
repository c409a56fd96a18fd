"""Transport between GPUs of one host: control over a Unix socket, and the payload never moves here at all.

    decode                                             prefill
    HELLO(token, names) ---------------------------->
                 <---------------- WELCOME(handle of the ring, size)     decode maps the ring, once
    READ(read_id, slab handle) --------------------->  RequestArrived
                 <---------------- GO(read_id, slab, header, trailer), or NO(read_id, refusal)
    ReceiveDone: the payload is an address; the step thread's kernel reads the link straight into the request's blocks
    NOTE(slab handle) ------------------------------>  SendDone, NoteArrived

A reader that expects slabs of an attempt gets them as they are published, without a READ. Workers of earlier versions ignore
both messages:

    SUBSCRIBE(attempt) ----------------------------->
                 <---------------- OFFER(slab, header, trailer, slab handle)      OfferArrived, or GO to a READ that crossed it
    UNSUBSCRIBE(attempt) --------------------------->

Prefill's slab is IN_FLIGHT until decode's note: for so long a kernel may be reading it. Decode closes a connection only when
none of its kernels reads that peer any more, so the end of a connection is prefill's proof of death; a process that died reads
nothing. On decode's side nothing lands outside a kernel that decode itself launched and waits for.

The socket is an abstract one under a random name, and takes processes of this user that bring the token in our KvAddress.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import os
import secrets
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from diptych.common.errors import TransferError
from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.fabric.net_interfaces import host_identity
from diptych.kvtransfer.fabric.registry import Make, TransportSite, TransportSpec, register
from diptych.kvtransfer.fabric.self_test import SelfTest, run_ipc_self_test
from diptych.kvtransfer.fabric.transport import (
    MAX_MESSAGE_BYTES,
    NoteArrived,
    OfferArrived,
    PeerLost,
    ReceiveDone,
    RequestArrived,
    SendDone,
    TransportEvent,
    Wakeup,
    peer_key,
)
from diptych.kvtransfer.gpu.memory import SharedMemory
from diptych.kvtransfer.gpu.ring import GpuRing
from diptych.kvtransfer.slabs import handle as handles
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, TRAILER_BYTES, Ring, RingSpec, SlabQuotas, frame_generation

log = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_HEAD = struct.Struct("<BQ")
"""kind, read_id"""
_HELLO, _WELCOME, _READ, _NOTE, _GO, _NO, _SUBSCRIBE, _UNSUBSCRIBE, _OFFER = range(9)
_RING = struct.Struct("<QQ")
"""slabs, bytes of a slab"""
_SLAB = struct.Struct("<Q")
_SLOW_BYTES_PER_S = 10e9
"""A link between two GPUs that is slower than this is no link between two GPUs."""
_MAX_CONNECTIONS = 256
_MAX_UNSENT = 1024
_MAX_SUBSCRIPTIONS = 4096
"""Of one connection; what comes behind them is read as before."""
_GRANT_BYTES = _SLAB.size + HEADER_BYTES + TRAILER_BYTES
_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True, eq=False)
class _Link:
    """One connection. `granted`: (slab, generation) that a kernel of decode may be reading, with prefill's op or 0.
    `offered`: on decode's side, the grants that it has neither asked for nor accepted nor declined."""

    name: str
    sock: socket.socket
    outgoing: bool
    unsent: deque[bytes] = field(default_factory=deque)
    granted: dict[tuple[int, int], int] = field(default_factory=dict)
    offered: dict[tuple[int, int], bytes] = field(default_factory=dict)
    subscribed: set[str] = field(default_factory=set)
    ring: bytes = b""
    address: int = 0
    slab_bytes: int = 0
    num_slabs: int = 0
    lost: str = ""


@dataclass(slots=True)
class _Read:
    link: _Link
    dest: np.ndarray
    slab: tuple[int, int]


class IpcTransport:
    """See transport.Transport. Its ring is a GpuRing. Raises: TransferError when no socket can be had."""

    name = "ipc"

    def __init__(self, worker_id: str, incarnation: str, *, host: str, memory: SharedMemory) -> None:
        self._me = (worker_id, incarnation)
        self._memory = memory
        self.path = memory.path
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        name = f"diptych-{secrets.token_hex(16)}".encode()
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            self._listener.bind(b"\0" + name)
            self._listener.listen(64)
        except OSError as error:
            raise TransferError(f"no Unix socket: {error}") from error
        self._host_identity = identity = host_identity()
        self.address = KvAddress(self.name, host, 0, b"\n".join((self._token.hex().encode(), identity, name)))
        self._ring: GpuRing | None = None
        self._ring_handle = b""
        self._out: dict[str, _Link] = {}
        self._in: list[_Link] = []
        self._unidentified: list[_Link] = []
        """Accepted connections that have not sent HELLO."""
        self._dying: list[_Link] = []
        self._gone: set[str] = set()
        self._reads: dict[int, _Read] = {}
        self._ops = itertools.count(1)
        self._events: list[TransportEvent] = []
        self._closed = False

    def register(self, ring: Ring) -> None:
        if not isinstance(ring, GpuRing):
            raise TransferError("the ipc transport needs a ring in GPU memory")
        self._ring, self._ring_handle = ring, ring.handle

    # ---- decode's side ----

    def connect(self, peer: PeerRef) -> str:
        key = peer_key(peer.worker_id, peer.incarnation)
        if key in self._out:
            return key
        if key in self._gone or any(link.name == key for link in self._dying):
            raise TransferError(f"peer lost: {key}")
        for other in [k for k in self._out if k.rpartition("@")[0] == peer.worker_id]:
            self.drop(other, "the worker has started again")
        parts = peer.address.blob.split(b"\n")
        if peer.address.transport != self.name or len(parts) != 3:
            raise TransferError(f"{key} has no ipc address")
        token, identity, name = parts
        if identity != self._host_identity:
            raise TransferError(f"{key} is not on this host (or in another network namespace): ipc cannot reach it")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            sock.connect(b"\0" + name)
        except OSError as error:
            sock.close()
            raise TransferError(f"peer lost: {key}: {error}") from error
        link = self._out[key] = _Link(key, sock, outgoing=True)
        names = [part.encode() for part in self._me]
        self._say(link, _HELLO, 0, b"\n".join((token, *names)))
        return key

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        link = self._out.get(peer)
        if link is None:
            raise TransferError(f"peer lost: {peer}")
        if len(body) + _HEAD.size > MAX_MESSAGE_BYTES:
            raise TransferError(f"request of {len(body)} bytes is too long")
        try:
            wanted = handles.decode(body)
            slab = (wanted.slab, wanted.generation)
        except ValueError:
            slab = (-1, -1)  # prefill will refuse it
        self._reads[read_id] = _Read(link, dest, slab)
        if (grant := link.offered.pop(slab, None)) is not None:
            self._on_answer(link, read_id, grant, granted=True)  # it has come before anybody looked at the offer
        else:
            self._say(link, _READ, read_id, body)

    def path_to(self, peer: str) -> str:
        return self.path if peer in self._out else ""

    def notify(self, peer: str, body: bytes) -> None:
        for link in [*self._out.values(), *self._dying]:
            if link.name == peer and link.outgoing:
                self._say(link, _NOTE, 0, body)
                with contextlib.suppress(ValueError):
                    noted = handles.decode(body)
                    link.granted.pop((noted.slab, noted.generation), None)
                    link.offered.pop((noted.slab, noted.generation), None)

    def subscribe(self, peer: str, attempt: str) -> None:
        if peer in self._out:
            self._say(self._out[peer], _SUBSCRIBE, 0, attempt.encode())

    def unsubscribe(self, peer: str, attempt: str) -> None:
        if peer in self._out:
            self._say(self._out[peer], _UNSUBSCRIBE, 0, attempt.encode())

    def accept(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        link = self._out.get(peer)
        if link is None:
            raise TransferError(f"peer lost: {peer}")
        wanted = handles.decode(body)
        slab = (wanted.slab, wanted.generation)
        grant = link.offered.pop(slab, None)
        if grant is None:
            raise TransferError(f"slab {wanted.slab} of {peer} is not offered any more")
        self._reads[read_id] = _Read(link, dest, slab)
        self._on_answer(link, read_id, grant, granted=True)

    # ---- prefill's side ----

    def answer(self, conn: str, read_id: int, message: np.ndarray | bytes) -> int:
        op = next(self._ops)
        link = next((link for link in self._in if link.name == conn), None)
        if link is None or self._ring is None:
            self._events.append(SendDone(op, False))
        elif isinstance(message, bytes):
            self._say(link, _NO, read_id, message)
            self._events.append(SendDone(op, True))
        else:
            self._say(link, _GO, read_id, self._grant(link, self._ring, message, op))
        return op

    def _grant(self, link: _Link, ring: GpuRing, message: np.ndarray, op: int) -> bytes:
        index = ring.index_of(message)
        link.granted[index, frame_generation(message.data)] = op
        return _SLAB.pack(index) + message[:HEADER_BYTES].tobytes() + message[-TRAILER_BYTES:].tobytes()

    def subscriber(self, peer: str, attempt: str) -> str:
        names = (link.name for link in self._in if attempt in link.subscribed)
        return next((name for name in names if name.rpartition("#")[0] == peer), "")

    def offer(self, conn: str, body: bytes, message: np.ndarray) -> int:
        op = next(self._ops)
        link = next((link for link in self._in if link.name == conn), None)
        if link is None or self._ring is None:
            self._events.append(SendDone(op, False))
            return op
        self._say(link, _OFFER, 0, self._grant(link, self._ring, message, op) + body)
        return op

    # ---- both ----

    def progress(self) -> list[TransportEvent]:
        if not self._closed:
            self._accept()
            for link in [*self._out.values(), *self._in, *self._unidentified]:
                self._receive(link)
                self._flush(link)
        self._bury_dead()
        events, self._events = self._events, []
        # Peers whose loss is reported now: a new link of that name must wait until then.
        self._gone = {event.peer for event in events if isinstance(event, PeerLost)}
        return events

    def busy(self) -> bool:
        return bool(self._events)

    def wait(self, wakeup: Wakeup, timeout_s: float, *, awaited: bool) -> None:
        if self._events:
            return
        poll = select.poll()
        poll.register(wakeup.fileno(), select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        for link in [*self._out.values(), *self._in, *self._unidentified]:
            poll.register(link.sock, select.POLLIN | (select.POLLOUT if link.unsent else 0))
        poll.poll(max(0.0, timeout_s) * 1000.0)

    def drop(self, peer: str, why: str) -> None:
        for link in [link for link in (*self._out.values(), *self._in) if link.name == peer]:
            self._lose(link, why)

    def close(self) -> None:
        """No read of a peer's ring is under way: the engine is closed first."""
        if self._closed:
            return
        for link in [*self._out.values(), *self._in, *self._unidentified]:
            self._lose(link, "closed")
        for link in self._dying:
            link.granted.clear()
        self._bury_dead()
        self._closed = True
        self._listener.close()

    # ---- inside ----

    def _say(self, link: _Link, kind: int, read_id: int, body: bytes) -> None:
        if link.lost and kind != _NOTE:
            return
        link.unsent.append(_HEAD.pack(kind, read_id) + body)
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        while link.unsent:
            try:
                link.sock.send(link.unsent[0])
            except BlockingIOError:
                if len(link.unsent) > _MAX_UNSENT:
                    self._lose(link, "it does not read its messages")
                return
            except OSError as error:
                link.unsent.clear()
                self._lose(link, str(error))
                return
            link.unsent.popleft()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                return
            sock.setblocking(False)
            _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if uid != os.getuid() or len(self._in) + len(self._unidentified) >= _MAX_CONNECTIONS:
                sock.close()
                continue
            self._unidentified.append(_Link("", sock, outgoing=False))

    def _receive(self, link: _Link) -> None:
        while not link.lost:
            try:
                raw = link.sock.recv(2 * MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(link, str(error))
                return
            if not raw:
                self._lose(link, "connection lost")
            elif len(raw) >= _HEAD.size:
                kind, read_id = _HEAD.unpack_from(raw)
                self._on_message(link, kind, read_id, raw[_HEAD.size :])

    def _on_message(self, link: _Link, kind: int, read_id: int, body: bytes) -> None:
        if link in self._unidentified:
            if kind == _HELLO:
                self._on_hello(link, body)
            else:
                self._lose(link, "it did not identify itself")
        elif link.outgoing:
            if kind == _WELCOME:
                self._on_welcome(link, body)
            elif kind in (_GO, _NO):
                self._on_answer(link, read_id, body, granted=kind == _GO)
            elif kind == _OFFER:
                self._on_offer(link, body)
        elif len(body) <= MAX_MESSAGE_BYTES and read_id < 1 << 48:
            if kind == _READ:
                self._events.append(RequestArrived(link.name, read_id, body))
            elif kind == _NOTE:
                self._on_note(link, body)
            elif kind == _SUBSCRIBE and len(link.subscribed) < _MAX_SUBSCRIPTIONS:
                link.subscribed.add(body.decode(errors="replace"))
            elif kind == _UNSUBSCRIBE:
                link.subscribed.discard(body.decode(errors="replace"))

    def _on_offer(self, link: _Link, body: bytes) -> None:
        grant, named = body[:_GRANT_BYTES], body[_GRANT_BYTES:]
        try:
            wanted = handles.decode(named)
        except ValueError:
            self._lose(link, "it sent a malformed offer")  # whatever it offers stays in flight until this ends
            return
        slab = (wanted.slab, wanted.generation)
        crossed = next((i for i, read in self._reads.items() if read.link is link and read.slab == slab), None)
        if crossed is not None:
            self._on_answer(link, crossed, grant, granted=True)
            return
        link.offered[slab] = grant
        self._events.append(OfferArrived(link.name, named))

    def _on_hello(self, link: _Link, body: bytes) -> None:
        token, _, rest = body.partition(b"\n")
        worker, _, incarnation = rest.partition(b"\n")
        self._unidentified.remove(link)
        if not hmac.compare_digest(token, self._token.hex().encode()) or self._ring is None:
            link.lost = "it does not know our token"
            link.sock.close()
            return
        worker_id = worker.decode(errors="replace")
        for old in [known for known in self._in if known.name.rpartition("@")[0] == worker_id]:
            self._lose(old, "the worker has connected again")
        key = peer_key(worker_id, incarnation.decode(errors="replace"))
        link.name = f"{key}#{secrets.token_hex(8)}"
        self._in.append(link)
        spec = self._ring.spec
        self._say(link, _WELCOME, 0, _RING.pack(spec.num_slabs, spec.slab_bytes) + self._ring_handle)

    def _on_welcome(self, link: _Link, body: bytes) -> None:
        link.num_slabs, link.slab_bytes = _RING.unpack_from(body)
        handle = body[_RING.size :]
        try:
            link.address = self._memory.open(handle)
            link.ring = handle
            rate = self._memory.probe(link.address, link.num_slabs * link.slab_bytes)
        except TransferError as error:
            self._lose(link, f"its GPU memory cannot be reached: {error.message}")
            return
        report = log.info if rate >= _SLOW_BYTES_PER_S else log.warning
        report("kv transfer: %s reads %s at %.1f GB/s", self.path, link.name, rate / 1e9)

    def _on_answer(self, link: _Link, read_id: int, body: bytes, *, granted: bool) -> None:
        read = self._reads.get(read_id)
        if read is None or read.link is not link:
            return
        del self._reads[read_id]
        if not granted:
            size = min(len(body), read.dest.size)
            read.dest[:size] = np.frombuffer(body, np.uint8)[:size]
            self._events.append(ReceiveDone(read_id))
            return
        if len(body) != _GRANT_BYTES or self._ring is None:
            self._events.append(ReceiveDone(read_id, f"{link.name} sent a malformed answer"))
            return
        (index,) = _SLAB.unpack_from(body)
        if index != read.slab[0] or index >= link.num_slabs or read.dest.size > link.slab_bytes or not link.address:
            self._events.append(ReceiveDone(read_id, f"{link.name} offers slab {index}, {read.slab[0]} was asked for"))
            return
        frame = np.frombuffer(body, np.uint8)[_SLAB.size :]
        read.dest[:HEADER_BYTES], read.dest[-TRAILER_BYTES:] = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
        link.granted[read.slab] = 0
        self._ring.arrive(self._ring.index_of(read.dest), link.address + index * link.slab_bytes)
        self._events.append(ReceiveDone(read_id))

    def _on_note(self, link: _Link, body: bytes) -> None:
        with contextlib.suppress(ValueError):
            noted = handles.decode(body)
            op = link.granted.pop((noted.slab, noted.generation), 0)
            if op:
                self._events.append(SendDone(op, True))
        self._events.append(NoteArrived(link.name, body))

    def _lose(self, link: _Link, why: str) -> None:
        """From here on nothing new is read over it; it is closed and reported lost once nothing reads over it any more."""
        if link.lost:
            return
        link.lost = why
        if link in self._unidentified:
            self._unidentified.remove(link)
            link.sock.close()
            return
        self._out = {name: other for name, other in self._out.items() if other is not link}
        self._in = [other for other in self._in if other is not link]
        for read_id in [i for i, read in self._reads.items() if read.link is link]:
            del self._reads[read_id]
            self._events.append(ReceiveDone(read_id, f"peer lost: {link.name}: {why}"))
        if not link.outgoing:  # its kernels have ended, or we do not care what they read: they check it
            for op in link.granted.values():
                self._events.append(SendDone(op, False))
            link.granted.clear()
        self._dying.append(link)

    def _bury_dead(self) -> None:
        for link in [link for link in self._dying if not link.granted]:
            self._dying.remove(link)
            self._flush(link)
            link.sock.close()
            if link.ring:
                with contextlib.suppress(TransferError):
                    self._memory.close(link.ring)
            self._events.append(PeerLost(link.name, link.lost))


def _make(worker_id: str, incarnation: str, site: TransportSite) -> IpcTransport:
    assert site.memory is not None
    return IpcTransport(worker_id, incarnation, host=site.host, memory=site.memory)


def _self_test(make: Make, site: TransportSite) -> SelfTest:
    assert site.memory is not None
    return run_ipc_self_test(make, site.memory, RingSpec(1, site.ring.slab_bytes))


def _ring(site: TransportSite, quotas: SlabQuotas) -> Ring:
    """A read goes into the request's blocks: slabs to read into need no GPU memory. They come last in the arena."""
    if not quotas.publish:
        return GpuRing(site.ring)
    assert site.memory is not None
    return GpuRing(site.ring, *site.memory.allocate(quotas.publish * site.ring.slab_bytes))


register(
    TransportSpec(
        name="ipc",
        summary="CUDA IPC between GPUs of one host",
        make=_make,
        self_test=_self_test,
        make_ring=_ring,
        device="cuda",
        gpu_slabs=lambda quotas: quotas.publish,
        auto_rank=10,
        auto_min_gpus=2,
        shares_a_gpu=True,
    )
)
