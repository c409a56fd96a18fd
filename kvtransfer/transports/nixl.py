"""Transport over NVIDIA's NIXL (UCX inside): notifications carry the control messages, decode reads one-sided.

    decode                                             prefill
    HELLO(token, connection, our metadata) --------->  the agent is made known
    READ(token, connection, read_id, handle) ------->  RequestArrived
                 <-------------------- GO(read_id, address, size), or NO(read_id, refusal)
    NIXL READ into the slab
    DONE(read_id) as the read's notification ------->  SendDone
    NOTE(token, connection, handle) ---------------->  NoteArrived

Decode posts every read itself, and releasing the request (which cancels it) is its proof of death: nothing lands later. A slab
of prefill that a lost peer may still be reading is free at once, too: such a reader checks what it got, and finds another life.

NIXL does not report that a peer is gone: a read fails, or the control plane notices (the call breaks, or is silent) and closes
the endpoint. Nor does it report which path UCX chose for a peer: shared memory, or TCP where a container or a namespace hides
the memory of the other process. So the first read from each peer is made alone, and the kernel's TCP counters show its path.

NIXL's progress thread would spin (its Python layer sets no delay), so there is none: the transfer thread
drives all progress, sleeping 0.2 ms between two looks while messages come, 2 ms while slabs are out, and 50 ms otherwise:
a reader sends no message before a slab was announced to it.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import secrets
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from diptych.common.errors import TransferError
from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.fabric.net_interfaces import numeric, ucx_address_family
from diptych.kvtransfer.fabric.nixl_parts import Answers, Peer, Read, load_nixl
from diptych.kvtransfer.fabric.peer_book import TOKEN_BYTES, PeerBook, pack_parts, unpack_parts
from diptych.kvtransfer.fabric.registry import TransportSpec, register
from diptych.kvtransfer.fabric.tcp_counters import carried_by_tcp, tcp_bytes_received
from diptych.kvtransfer.fabric.transport import (
    MAX_MESSAGE_BYTES,
    NoteArrived,
    ReceiveDone,
    RequestArrived,
    SendDone,
    TransportEvent,
    Wakeup,
    peer_key,
    sleep_on,
)
from diptych.kvtransfer.slabs.layout import Ring

_HEAD = struct.Struct("<4s16sBQQ")
"""magic, token, kind, connection, read_id"""
_MAGIC = b"DKVn"
_HELLO, _READ, _NOTE, _GO, _NO, _DONE = range(6)
_WHERE = struct.Struct("<QQ")
"""address, size"""
_MAX_METADATA_BYTES = 64 << 10
_ACTIVE_S = 0.05
"""So long after the last sign of life more of it is expected at any moment."""
_ACTIVE_SLEEP_S, _AWAITED_SLEEP_S, _IDLE_SLEEP_S = 0.0002, 0.002, 0.05
_CLOSE_S = 1.0
UNKNOWN_PATH = "nixl:any"
_BOOT = blake3(Path("/proc/sys/kernel/random/boot_id").read_bytes()).digest(8)
"""Names the running kernel: peers that share it share memory, if their namespaces let them."""


class NixlTransport:
    """One NIXL agent. See transport.Transport."""

    def __init__(self, worker_id: str, incarnation: str, *, host: str, require_path: str = "") -> None:
        api = load_nixl()
        self._me = (worker_id, incarnation)
        self._host = numeric(host)
        self._require_path = require_path
        self.path = UNKNOWN_PATH
        """Of the last peer whose path became known."""
        name = f"{worker_id}@{incarnation}#{secrets.token_hex(4)}"
        try:
            with ucx_address_family(self._host):
                self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        except Exception as error:  # the bindings raise classes of their own
            raise TransferError(f"NIXL cannot start: {error}") from error
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._ring: Ring | None = None
        self._registered: Any = None
        self.address = KvAddress("nixl", self._host, 0, self._token + _BOOT + self._agent.get_agent_metadata())
        self._book: PeerBook[Peer] = PeerBook("nixl", self._host, self._lose)
        self._reads: dict[int, Read] = {}
        self._answers: dict[Peer, Answers] = {}
        self._ops = itertools.count(1)
        self._events: list[TransportEvent] = []
        self._active_at = 0.0
        self._awaited = False
        self._closed = False

    def register(self, ring: Ring) -> None:
        self._ring = ring
        base = ring.array.ctypes.data
        self._registered = self._agent.register_memory([(base, ring.spec.total_bytes, 0, "ring")], mem_type="DRAM")
        # The metadata holds the addresses that peers may read: it is complete only now.
        self.address = KvAddress("nixl", self._host, 0, self._token + _BOOT + self._agent.get_agent_metadata())

    # ---- decode's side ----

    def connect(self, peer: PeerRef) -> str:
        key = peer_key(peer.worker_id, peer.incarnation)
        if key in self._book.outgoing:
            return key
        address = self._book.address_of(peer)
        try:
            agent = self._agent.add_remote_agent(address.blob[TOKEN_BYTES + len(_BOOT) :])
        except Exception as error:
            raise TransferError(f"peer lost: {key}: {error}") from error
        name = agent.decode() if isinstance(agent, bytes) else agent
        found = Peer(key, name, secrets.randbits(63), address.blob[:TOKEN_BYTES])
        found.same_host = address.blob[TOKEN_BYTES : TOKEN_BYTES + len(_BOOT)] == _BOOT
        # Our answers' token, our names, our metadata: with them the peer can talk back.
        names = [part.encode() for part in self._me]
        self._say(found, _HELLO, 0, pack_parts(self._token, *names, self._agent.get_agent_metadata()))
        self._book.outgoing[key] = found
        return key

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        found = self._book.outgoing.get(peer)
        if found is None:
            raise TransferError(f"peer lost: {peer}")
        if len(body) + _HEAD.size > MAX_MESSAGE_BYTES:
            raise TransferError(f"request of {len(body)} bytes is too long")
        self._say(found, _READ, read_id, body)
        self._reads[read_id] = Read(found, dest)

    def path_to(self, peer: str) -> str:
        found = self._book.outgoing.get(peer)
        return found.path if found is not None else ""

    def notify(self, peer: str, body: bytes) -> None:
        found = self._book.outgoing.get(peer)
        if found is not None:
            with contextlib.suppress(TransferError):
                self._say(found, _NOTE, 0, body)

    # ---- prefill's side ----

    def answer(self, conn: str, read_id: int, message: np.ndarray | bytes) -> int:
        op = next(self._ops)
        peer = self._book.reader(conn)
        if peer is None:
            self._events.append(SendDone(op, False))
            return op
        try:
            if isinstance(message, bytes):
                self._say(peer, _NO, read_id, message)
                self._events.append(SendDone(op, True))
            else:
                self._say(peer, _GO, read_id, _WHERE.pack(message.ctypes.data, message.nbytes))
                self._answers.setdefault(peer, Answers()).ops[read_id] = op
        except TransferError:
            self._events.append(SendDone(op, False))
        return op

    # ---- both ----

    def progress(self) -> list[TransportEvent]:
        self._book.begin_turn(self._events)
        if not self._closed:
            for bodies in self._agent.get_new_notifs().values():
                for body in bodies:
                    self._on_message(body)
            for read_id, read in [(i, r) for i, r in self._reads.items() if r.xfer is not None]:
                self._check(read_id, read)
            self._post_granted()
        events, self._events = self._events, []
        if events:
            self._active_at = time.monotonic()
        return events

    def busy(self) -> bool:
        return bool(self._events or self._reads or any(a.ops for a in self._answers.values()))

    def wait(self, wakeup: Wakeup, timeout_s: float, *, awaited: bool) -> None:
        # NIXL has nothing to sleep on. A read in flight is worth a core.
        if any(read.xfer is not None for read in self._reads.values()):
            return
        now = time.monotonic()
        if awaited and not self._awaited:
            self._active_at = now  # the first slab is published: a read follows soon
        self._awaited = awaited
        if self._reads or now - self._active_at < _ACTIVE_S:
            pause = _ACTIVE_SLEEP_S
        else:
            pause = _AWAITED_SLEEP_S if awaited else _IDLE_SLEEP_S
        sleep_on([wakeup.fileno()], min(timeout_s, pause))

    def drop(self, peer: str, why: str) -> None:
        self._book.drop(peer, why)

    def close(self) -> None:
        if self._closed:
            return
        for peer in self._book.endpoints():
            self._lose(peer, "closed")
        self._closed = True
        limit = time.monotonic() + _CLOSE_S
        while any(read.xfer is not None for read in self._reads.values()) and time.monotonic() < limit:
            self._agent.get_new_notifs()
            for read_id, read in list(self._reads.items()):
                self._check(read_id, read)
        if self._registered is not None and not self._reads:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(self._registered)
        self._registered = None

    # ---- inside ----

    def _say(self, peer: Peer, kind: int, read_id: int, body: bytes) -> None:
        raw = _HEAD.pack(_MAGIC, peer.token, kind, peer.conn, read_id) + body
        try:
            self._agent.send_notif(peer.agent, raw)
        except Exception as error:
            self._lose(peer, f"notification: {error}")
            raise TransferError(f"peer lost: {peer.name}: {error}") from error

    def _on_message(self, raw: bytes) -> None:
        if len(raw) < _HEAD.size:
            return
        magic, token, kind, conn, read_id = _HEAD.unpack_from(raw)
        if magic != _MAGIC or not hmac.compare_digest(token, self._token):
            return
        body = raw[_HEAD.size :]
        if kind == _HELLO:
            self._on_hello(conn, body)
        elif kind in (_GO, _NO):
            self._on_answer(conn, read_id, body, granted=kind == _GO)
        elif (
            (peer := self._book.incoming.get(conn)) is not None and read_id < 1 << 48 and len(body) <= MAX_MESSAGE_BYTES
        ):
            if kind == _READ:
                self._events.append(RequestArrived(peer.name, read_id, body))
            elif kind == _NOTE:
                self._events.append(NoteArrived(peer.name, body))
            elif kind == _DONE:
                op = self._answers.get(peer, Answers()).ops.pop(read_id, 0)
                if op:
                    self._events.append(SendDone(op, True))

    def _on_hello(self, conn: int, body: bytes) -> None:
        parts = unpack_parts(body, 4)
        if parts is None or len(parts[0]) != TOKEN_BYTES or not 0 < len(parts[3]) <= _MAX_METADATA_BYTES:
            return
        token, worker, incarnation, metadata = parts
        worker_id = worker.decode(errors="replace")
        if not self._book.may_greet(worker_id):
            return
        try:
            agent = self._agent.add_remote_agent(metadata)
        except Exception:
            return
        name = agent.decode() if isinstance(agent, bytes) else agent
        key = peer_key(worker_id, incarnation.decode(errors="replace"))
        self._book.incoming[conn] = Peer(f"{key}#{conn:x}", name, conn, token)

    def _on_answer(self, conn: int, read_id: int, body: bytes, *, granted: bool) -> None:
        read = self._reads.get(read_id)
        if read is None or read.peer.conn != conn or read.address:
            return
        if not granted:
            size = min(len(body), read.dest.size)
            read.dest[:size] = np.frombuffer(body, np.uint8)[:size]
            self._finish(read_id)
            return
        if len(body) != _WHERE.size:
            return
        address, size = _WHERE.unpack(body)
        if size != read.dest.nbytes:
            self._finish(read_id, f"{read.peer.name} offers {size} bytes, {read.dest.nbytes} were asked for")
            return
        read.address = address
        self._post_granted()

    def _post_granted(self) -> None:
        """Begin the reads that prefill has let us make. One from a peer whose path is not known is made alone."""
        flying = any(read.xfer is not None for read in self._reads.values())
        granted = [(i, read) for i, read in self._reads.items() if read.address and read.xfer is None]
        measured = next((entry for entry in granted if entry[1].measures_path), None)
        if measured is None:
            if not any(read.tcp_before >= 0 for read in self._reads.values()):
                for read_id, read in granted:
                    self._post(read_id, read)
        elif not flying:
            measured[1].tcp_before = tcp_bytes_received()
            self._post(*measured)

    def _post(self, read_id: int, read: Read) -> None:
        peer, size = read.peer, read.dest.nbytes
        done = _HEAD.pack(_MAGIC, peer.token, _DONE, peer.conn, read_id)
        try:
            local = self._agent.get_xfer_descs([(read.dest.ctypes.data, size, 0)], mem_type="DRAM")
            remote = self._agent.get_xfer_descs([(read.address, size, 0)], mem_type="DRAM")
            read.xfer = self._agent.initialize_xfer("READ", local, remote, peer.agent, done)
            if self._agent.transfer(read.xfer) == "ERR":
                raise RuntimeError("the read could not be posted")
        except Exception as error:
            self._finish(read_id, f"read from {peer.name}: {error}")

    def _learn_path(self, read: Read) -> str:
        """The read that shows the path is done. Returns: why the peer is refused; empty: it is accepted."""
        tcp = carried_by_tcp(read.dest.nbytes, read.tcp_before, tcp_bytes_received())
        peer = read.peer
        peer.path = self.path = f"nixl:{'tcp' if tcp else 'shm' if peer.same_host else 'rdma'}"
        if self._require_path and peer.path != self._require_path:
            return f"KV from {peer.name} comes on {peer.path}, {self._require_path} is required"
        return ""

    def _check(self, read_id: int, read: Read) -> None:
        """Has the read ended? A lost peer's is cancelled, which may take more than one try."""
        try:
            state = self._agent.check_xfer_state(read.xfer)
            error = "" if state == "DONE" else f"read from {read.peer.name} failed"
        except Exception as problem:
            state, error = "ERR", f"peer lost: {read.peer.name}: {problem}"
        if state == "PROC":
            if not read.peer.lost:
                return
            error = f"peer lost: {read.peer.name}: {read.peer.lost}"
        peer = read.peer
        if state == "DONE" and not error and read.tcp_before >= 0:
            error = self._learn_path(read)
            if error:
                state = "ERR"
        if self._finish(read_id, error) and peer.lost:
            self._maybe_buried(peer)
        elif state == "ERR":
            self._lose(peer, error)

    def _finish(self, read_id: int, error: str = "") -> bool:
        """Give the request back: from then on nothing of it lands. False: NIXL could not cancel it yet."""
        read = self._reads[read_id]
        if read.xfer is not None:
            try:
                self._agent.release_xfer_handle(read.xfer)
            except Exception:
                return False
        del self._reads[read_id]
        self._events.append(ReceiveDone(read_id, error))
        return True

    def _lose(self, peer: Peer, why: str) -> None:
        """Close an endpoint. It is reported as lost once the last of its reads was given back."""
        if peer.lost:
            return
        self._book.closed(peer, why)
        for op in self._answers.pop(peer, Answers()).ops.values():
            self._events.append(SendDone(op, False))
        for read_id in [i for i, r in self._reads.items() if r.peer is peer]:
            self._finish(read_id, f"peer lost: {peer.name}: {why}")
        self._maybe_buried(peer)

    def _maybe_buried(self, peer: Peer) -> None:
        if peer not in self._book.dying or any(read.peer is peer for read in self._reads.values()):
            return
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(peer.agent)
        self._events.append(self._book.bury(peer))


register(
    TransportSpec(
        name="nixl",
        summary="one-sided reads by NIXL: shared memory within a host, RDMA or TCP between hosts",
        make=lambda worker_id, incarnation, site: NixlTransport(
            worker_id, incarnation, host=site.host, require_path=site.require_path
        ),
        auto_rank=30,
    )
)
