"""Transport between Transfers of one process: a copy of bytes. For tests, simulations and the self-test's floor."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque

import numpy as np

from diptych.common.errors import TransferError
from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.fabric.registry import TransportSpec, register
from diptych.kvtransfer.fabric.transport import (
    MAX_MESSAGE_BYTES,
    NoteArrived,
    PeerLost,
    ReceiveDone,
    RequestArrived,
    SendDone,
    TransportEvent,
    Wakeup,
    peer_key,
    sleep_on,
)
from diptych.kvtransfer.slabs.layout import Ring

_hub: dict[bytes, InprocTransport] = {}
_hub_lock = threading.Lock()


class InprocTransport:
    """Peers find each other by the name in KvAddress.blob. Messages are posted into the other's mailbox."""

    path = "inproc"

    def __init__(self, worker_id: str, incarnation: str) -> None:
        self._me = peer_key(worker_id, incarnation)
        self.address = KvAddress("inproc", "", 0, secrets.token_bytes(8))
        self._mail: deque[tuple[str, bytes, int, bytes]] = deque()
        self._events: list[TransportEvent] = []
        self._peers: dict[str, bytes] = {}
        """Peer key -> its name, of both directions."""
        self._gone: set[str] = set()
        """Lost since the last progress(): a new connection must wait until the loss was reported."""
        self._dest: dict[int, tuple[str, np.ndarray]] = {}
        self._ops = itertools.count(1)
        self._wakeup: Wakeup | None = None
        with _hub_lock:
            _hub[self.address.blob] = self

    def register(self, ring: Ring) -> None:
        return

    def connect(self, peer: PeerRef) -> str:
        key = peer_key(peer.worker_id, peer.incarnation)
        for other in [k for k in self._peers if k != key and k.rpartition("@")[0] == peer.worker_id]:
            self.drop(other, "the worker has started again")
        if key in self._gone:
            raise TransferError(f"peer lost: {key}")
        if key not in self._peers:
            if peer.address.blob not in _hub:
                raise TransferError(f"peer lost: {key}: not in this process")
            self._peers[key] = peer.address.blob
            self._post(peer.address.blob, "hello", 0, self._me.encode())
        return key

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        if len(body) > MAX_MESSAGE_BYTES:
            raise TransferError(f"request of {len(body)} bytes is too long")
        name = self._peers.get(peer)
        if name is None or not self._post(name, "read", read_id, body):
            raise TransferError(f"peer lost: {peer}")
        self._dest[read_id] = (peer, dest)

    def answer(self, conn: str, read_id: int, message: np.ndarray | bytes) -> int:
        op = next(self._ops)
        raw = message if isinstance(message, bytes) else message.tobytes()
        ok = self._post(self._peers.get(conn, b""), "answer", read_id, raw)
        self._events.append(SendDone(op, ok))
        return op

    def path_to(self, peer: str) -> str:
        return self.path if peer in self._peers else ""

    def notify(self, peer: str, body: bytes) -> None:
        self._post(self._peers.get(peer, b""), "note", 0, body)

    def progress(self) -> list[TransportEvent]:
        self._gone = {e.peer for e in self._events if isinstance(e, PeerLost)}
        while self._mail:
            kind, sender, read_id, body = self._mail.popleft()
            conn = next((key for key, name in self._peers.items() if name == sender), None)
            if kind == "hello":
                self._peers[body.decode()] = sender
            elif kind == "bye":
                if conn is not None:
                    self._lost(conn, "closed by peer")
            elif conn is None:
                continue
            elif kind == "read":
                self._events.append(RequestArrived(conn, read_id, body))
            elif kind == "note":
                self._events.append(NoteArrived(conn, body))
            elif read_id in self._dest:
                dest = self._dest.pop(read_id)[1]
                n = min(len(body), dest.size)
                dest[:n] = np.frombuffer(body, np.uint8)[:n]
                self._events.append(ReceiveDone(read_id))
        events, self._events = self._events, []
        return events

    def busy(self) -> bool:
        return bool(self._mail or self._events)

    def wait(self, wakeup: Wakeup, timeout_s: float, *, awaited: bool) -> None:
        self._wakeup = wakeup
        if not self.busy():
            sleep_on([wakeup.fileno()], timeout_s)

    def drop(self, peer: str, why: str) -> None:
        name = self._peers.get(peer)
        if name is not None:
            self._post(name, "bye", 0, b"")
            self._lost(peer, why)

    def close(self) -> None:
        with _hub_lock:
            _hub.pop(self.address.blob, None)
        for peer in list(self._peers):
            self.drop(peer, "closed")
        self._wakeup = None

    def _lost(self, peer: str, why: str) -> None:
        del self._peers[peer]
        self._gone.add(peer)
        for read_id in [i for i, (owner, _) in self._dest.items() if owner == peer]:
            del self._dest[read_id]
            self._events.append(ReceiveDone(read_id, f"peer lost: {peer}: {why}"))
        self._events.append(PeerLost(peer, why))

    def _post(self, name: bytes, kind: str, read_id: int, body: bytes) -> bool:
        with _hub_lock:
            other = _hub.get(name)
            if other is None:
                return False
            other._mail.append((kind, self.address.blob, read_id, body))
            if other._wakeup is not None:
                other._wakeup.set()
        return True


register(
    TransportSpec(
        name="inproc",
        summary="between workers of one process (tests, `diptych serve`)",
        make=lambda worker_id, incarnation, site: InprocTransport(worker_id, incarnation),
        in_process=True,
    )
)
