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

NIXL tells nobody that a peer is gone: a read reports it, else the control plane notices (the call breaks, or is silent) and
closes the endpoint. NIXL's progress thread would spin (its Python layer sets no delay), so there is none: the transfer thread
drives all progress, sleeping 0.2 ms between two looks while messages come and 5 ms when idle.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diptych.common.errors import ConfigError, TransferError
from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.interfaces import why_unreachable
from diptych.kvtransfer.layout import Ring
from diptych.kvtransfer.transport import (
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

_TOKEN_BYTES = 16
_HEAD = struct.Struct("<4s16sBQQ")
"""magic, token, kind, connection, read_id"""
_MAGIC = b"DKVn"
_HELLO, _READ, _NOTE, _GO, _NO, _DONE = range(6)
_WHERE = struct.Struct("<QQ")
"""address, size"""
_MAX_METADATA_BYTES = 64 << 10
_MAX_CONNECTIONS = 256
_ACTIVE_S = 0.05
"""So long after the last sign of life more of it is expected at any moment."""
_ACTIVE_SLEEP_S, _IDLE_SLEEP_S = 0.0002, 0.005
_CLOSE_S = 1.0


def load_nixl() -> Any:
    """NIXL's Python API. Raises: ConfigError."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        from nixl_cu12 import _api
    except ImportError as error:
        raise ConfigError("transport", "nixl", f"NIXL cannot be loaded (extra `nixl`): {error}") from error
    return _api


@dataclass(slots=True, eq=False)
class _Peer:
    """`conn` and `token` stand in our control messages."""

    name: str
    agent: str
    conn: int
    token: bytes
    outgoing: bool
    lost: str = ""


@dataclass(slots=True)
class _Read:
    peer: _Peer
    dest: np.ndarray
    xfer: Any = None


@dataclass(slots=True)
class _Answers:
    """Slabs that a peer may be reading, by read id."""

    ops: dict[int, int] = field(default_factory=dict)


class NixlTransport:
    """One NIXL agent. See transport.Transport."""

    def __init__(self, worker_id: str, incarnation: str, *, host: str) -> None:
        api = load_nixl()
        self._me = (worker_id, incarnation)
        self._host = host
        tls = os.environ.get("UCX_TLS", "")
        self.path = "nixl:" + ("|".join(name for name in tls.split(",") if name != "self") or "any")
        name = f"{worker_id}@{incarnation}#{secrets.token_hex(4)}"
        try:
            self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        except Exception as error:  # the bindings raise classes of their own
            raise TransferError(f"NIXL cannot start: {error}") from error
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._ring: Ring | None = None
        self._registered: Any = None
        self.address = KvAddress("nixl", host, 0, self._token + self._agent.get_agent_metadata())
        self._out: dict[str, _Peer] = {}
        self._in: dict[int, _Peer] = {}
        self._gone: set[str] = set()
        self._dying: list[_Peer] = []
        self._reads: dict[int, _Read] = {}
        self._answers: dict[_Peer, _Answers] = {}
        self._ops = itertools.count(1)
        self._events: list[TransportEvent] = []
        self._active_at = 0.0
        self._closed = False

    def register(self, ring: Ring) -> None:
        self._ring = ring
        base = ring.array.ctypes.data
        self._registered = self._agent.register_memory([(base, ring.spec.total_bytes, 0, "ring")], mem_type="DRAM")
        # The metadata tells peers where they may read: it is complete only now.
        self.address = KvAddress("nixl", self._host, 0, self._token + self._agent.get_agent_metadata())

    # ---- decode's side ----

    def connect(self, peer: PeerRef) -> str:
        key = peer_key(peer.worker_id, peer.incarnation)
        if key in self._out:
            return key
        if key in self._gone:
            raise TransferError(f"peer lost: {key}")
        for other in [k for k in self._out if k.rpartition("@")[0] == peer.worker_id]:
            self.drop(other, "the worker has started again")
        address = peer.address
        if address.transport != "nixl" or len(address.blob) <= _TOKEN_BYTES:
            raise TransferError(f"{key} has no NIXL address")
        why = why_unreachable(address.host, self._host)
        if why:
            raise TransferError(f"{key}: {why}")
        try:
            agent = self._agent.add_remote_agent(address.blob[_TOKEN_BYTES:])
        except Exception as error:
            raise TransferError(f"peer lost: {key}: {error}") from error
        name = agent.decode() if isinstance(agent, bytes) else agent
        found = _Peer(key, name, secrets.randbits(63), address.blob[:_TOKEN_BYTES], True)
        names = [part.encode() for part in self._me]
        # Our answers' token, our names, our metadata: with them the peer can talk back.
        body = b"".join(
            len(part).to_bytes(4, "little") + part for part in (self._token, *names, self._agent.get_agent_metadata())
        )
        self._say(found, _HELLO, 0, body)
        self._out[key] = found
        return key

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        found = self._out.get(peer)
        if found is None:
            raise TransferError(f"peer lost: {peer}")
        if len(body) + _HEAD.size > MAX_MESSAGE_BYTES:
            raise TransferError(f"request of {len(body)} bytes is too long")
        self._say(found, _READ, read_id, body)
        self._reads[read_id] = _Read(found, dest)

    def notify(self, peer: str, body: bytes) -> None:
        found = self._out.get(peer)
        if found is not None:
            with contextlib.suppress(TransferError):
                self._say(found, _NOTE, 0, body)

    # ---- prefill's side ----

    def answer(self, conn: str, read_id: int, message: np.ndarray | bytes) -> int:
        op = next(self._ops)
        peer = next((p for p in self._in.values() if p.name == conn), None)
        if peer is None:
            self._events.append(SendDone(op, False))
            return op
        try:
            if isinstance(message, bytes):
                self._say(peer, _NO, read_id, message)
                self._events.append(SendDone(op, True))
            else:
                self._say(peer, _GO, read_id, _WHERE.pack(message.ctypes.data, message.nbytes))
                self._answers.setdefault(peer, _Answers()).ops[read_id] = op
        except TransferError:
            self._events.append(SendDone(op, False))
        return op

    # ---- both ----

    def progress(self) -> list[TransportEvent]:
        # Whoever is dying, and whose loss is told just now: a new endpoint of that name must wait until everybody knows.
        lost = {event.peer for event in self._events if isinstance(event, PeerLost)}
        self._gone = {peer.name for peer in self._dying} | lost
        if not self._closed:
            for bodies in self._agent.get_new_notifs().values():
                for body in bodies:
                    self._on_message(body)
            for read_id, read in [(i, r) for i, r in self._reads.items() if r.xfer is not None]:
                self._check(read_id, read)
        events, self._events = self._events, []
        if events:
            self._active_at = time.monotonic()
        return events

    def busy(self) -> bool:
        return bool(self._events or self._reads or any(a.ops for a in self._answers.values()))

    def wait(self, wakeup: Wakeup, timeout_s: float) -> None:
        # NIXL has nothing to sleep on. A read in flight is worth a core.
        if any(read.xfer is not None for read in self._reads.values()):
            return
        pause = timeout_s
        if self._reads or time.monotonic() - self._active_at < _ACTIVE_S:
            pause = _ACTIVE_SLEEP_S
        elif self._registered is not None:
            pause = _IDLE_SLEEP_S  # a first HELLO may come at any time
        sleep_on([wakeup.fileno()], min(timeout_s, pause))

    def drop(self, peer: str, why: str) -> None:
        for found in [p for p in (*self._out.values(), *self._in.values()) if p.name == peer]:
            self._lose(found, why)

    def close(self) -> None:
        if self._closed:
            return
        for peer in [*self._out.values(), *self._in.values()]:
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

    def _say(self, peer: _Peer, kind: int, read_id: int, body: bytes) -> None:
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
        elif (peer := self._in.get(conn)) is not None and read_id < 1 << 48 and len(body) <= MAX_MESSAGE_BYTES:
            if kind == _READ:
                self._events.append(RequestArrived(peer.name, read_id, body))
            elif kind == _NOTE:
                self._events.append(NoteArrived(peer.name, body))
            elif kind == _DONE:
                op = self._answers.get(peer, _Answers()).ops.pop(read_id, 0)
                if op:
                    self._events.append(SendDone(op, True))

    def _on_hello(self, conn: int, body: bytes) -> None:
        parts, at = [], 0
        for _ in range(4):
            length = int.from_bytes(body[at : at + 4], "little")
            parts.append(body[at + 4 : at + 4 + length])
            at += 4 + length
        token, worker, incarnation, metadata = parts
        if at != len(body) or len(token) != _TOKEN_BYTES or not 0 < len(metadata) <= _MAX_METADATA_BYTES:
            return
        if len(self._in) >= _MAX_CONNECTIONS:
            return
        worker_id = worker.decode(errors="replace")
        for old in [p for p in self._in.values() if p.name.rpartition("@")[0] == worker_id]:
            self._lose(old, "the worker has connected again")
        try:
            agent = self._agent.add_remote_agent(metadata)
        except Exception:
            return
        name = agent.decode() if isinstance(agent, bytes) else agent
        key = peer_key(worker_id, incarnation.decode(errors="replace"))
        self._in[conn] = _Peer(f"{key}#{conn:x}", name, conn, token, False)

    def _on_answer(self, conn: int, read_id: int, body: bytes, *, granted: bool) -> None:
        read = self._reads.get(read_id)
        if read is None or read.peer.conn != conn or read.xfer is not None:
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
        done = _HEAD.pack(_MAGIC, read.peer.token, _DONE, conn, read_id)
        try:
            local = self._agent.get_xfer_descs([(read.dest.ctypes.data, size, 0)], mem_type="DRAM")
            remote = self._agent.get_xfer_descs([(address, size, 0)], mem_type="DRAM")
            read.xfer = self._agent.initialize_xfer("READ", local, remote, read.peer.agent, done)
            if self._agent.transfer(read.xfer) == "ERR":
                raise RuntimeError("the read could not be posted")
        except Exception as error:
            self._finish(read_id, f"read from {read.peer.name}: {error}")

    def _check(self, read_id: int, read: _Read) -> None:
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

    def _lose(self, peer: _Peer, why: str) -> None:
        """Close an endpoint. It is reported as lost once the last of its reads was given back."""
        if peer.lost:
            return
        peer.lost = why
        self._gone.add(peer.name)
        self._dying.append(peer)
        if peer.outgoing:
            self._out.pop(peer.name, None)
        else:
            self._in.pop(peer.conn, None)
        for op in self._answers.pop(peer, _Answers()).ops.values():
            self._events.append(SendDone(op, False))
        for read_id in [i for i, r in self._reads.items() if r.peer is peer]:
            self._finish(read_id, f"peer lost: {peer.name}: {why}")
        self._maybe_buried(peer)

    def _maybe_buried(self, peer: _Peer) -> None:
        if peer not in self._dying or any(read.peer is peer for read in self._reads.values()):
            return
        self._dying.remove(peer)
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(peer.agent)
        self._events.append(PeerLost(peer.name, peer.lost))
