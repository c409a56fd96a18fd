"""Transport over UCX, through UCXX's core API, driven synchronously by the transfer thread.

    decode                                             prefill
    endpoint from prefill's worker address
    HELLO(token, connection, our worker address) --->  endpoint back
    tag_recv(DATA | read_id) into the slab
    READ(token, connection, read_id, handle) ------->  RequestArrived
                 <-------- tag_send(DATA | read_id): the slab, or a header that refuses
    NOTE(token, connection, handle) ---------------->  NoteArrived

Worker addresses and not a listener, because UCXX's listener binds to every interface: UCX_NET_DEVICES keeps the socket on
the interface of the configured host. UCX has no authentication; control messages carry a token from the address that
prefill registered, and one without it is dropped before anything in it is parsed. Endpoint error handling is on: it is
what reports a dead peer.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from diptych.common.errors import ConfigError, TransferError
from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.fabric.net_interfaces import interface_of, numeric, ucx_address_family
from diptych.kvtransfer.fabric.peer_book import TOKEN_BYTES, PeerBook, pack_parts, unpack_parts
from diptych.kvtransfer.fabric.registry import TransportSpec, register
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
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, Ring, read_refusal

_HEAD = struct.Struct("<16sBQQ")
"""token, kind, connection, read_id"""
_HELLO, _READ, _NOTE = 1, 2, 3
_MAX_ADDRESS_BYTES = 2048
_CONTROL_SLOTS = 16
"""Receives that are posted ahead for control messages."""
_TAG_CONTROL = 0x4450_0001 << 32
_TAG_DATA = 0x4451 << 48
_PROGRESS_ROUNDS = 64
_CLOSE_S = 2.0


_chosen: dict[str, str] = {}
"""UCX's settings that ucxx and we chose ourselves: they hold while UCX reads them, and no child inherits them."""


@contextlib.contextmanager
def ucx_settings() -> Iterator[None]:
    """UCX reads its environment when it is loaded and when a context and a worker are made. Importing ucxx leaves choices of its
    own there, with which NIXL's UCX in a child of this process would take another path."""
    before = {name for name in os.environ if name.startswith("UCX_")}
    os.environ.update({name: value for name, value in _chosen.items() if name not in before})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_") and name not in before]:
            _chosen[name] = os.environ.pop(name)


def load_ucxx() -> tuple[Any, Any]:
    """UCXX's core module and its array wrapper. Raises: ConfigError."""
    with ucx_settings():
        # What the operator has set stays.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        os.environ.setdefault("UCX_LOG_FILE", "stderr")
        try:
            from ucxx._lib import libucxx
            from ucxx._lib.arr import Array
        except ImportError as error:
            raise ConfigError("transport", "ucx", f"UCXX cannot be loaded: {error}") from error
    return libucxx, Array


def configured_path(tls: str) -> str:
    """What UCX_TLS leaves to choose from, as a path's name: "tcp,self" is "ucx:tcp"."""
    return "ucx:" + "|".join(name for name in tls.split(",") if name != "self")


@dataclass(slots=True)
class _Endpoint:
    """`conn` and `token` stand in our control messages (decode's side only)."""

    name: str
    ep: Any
    conn: int
    token: bytes = b""
    lost: str = ""


@dataclass(slots=True)
class _Pending:
    request: Any
    buffer: Any
    """Kept alive until UCX is done with it."""
    endpoint: _Endpoint
    op: int = 0
    read_id: int = -1
    dest: np.ndarray | None = None


_NO_ENDPOINT = _Endpoint("", None, 0)


class UcxTransport:
    """One UCX context and worker. See transport.Transport."""

    name = "ucx"
    default_tls = "tcp,self"
    """Used where UCX_TLS is not set."""

    def __init__(self, worker_id: str, incarnation: str, *, host: str) -> None:
        self._ucx, self._array = load_ucxx()
        self._me = (worker_id, incarnation)
        host = numeric(host)
        config: dict[str, str] = {}
        if "UCX_TLS" not in os.environ:
            config["TLS"] = self.default_tls
        if "UCX_NET_DEVICES" not in os.environ:
            config["NET_DEVICES"] = interface_of(host)
        self.path = configured_path(os.environ.get("UCX_TLS", self.default_tls))
        try:
            with ucx_settings(), ucx_address_family(host):
                self._context = self._ucx.UCXContext(config, (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP))
                self._worker = self._ucx.UCXWorker(self._context)
                self._worker.init_blocking_progress_mode()
        except self._ucx.UCXError as error:
            raise TransferError(f"UCX cannot start on {config}: {error}") from error
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._worker_address = bytes(self._worker.address.tobytes())
        self.address = KvAddress(self.name, host, 0, self._token + self._worker_address)
        self._book: PeerBook[_Endpoint] = PeerBook(self.name, host, self._bury)
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._events: list[TransportEvent] = []
        self._control: list[tuple[Any, np.ndarray]] = []
        self._active = False
        self._closed = False
        for _ in range(_CONTROL_SLOTS):
            self._control.append(self._post_control())

    def register(self, ring: Ring) -> None:
        return  # host memory over TCP needs no registration

    # ---- decode's side ----

    def connect(self, peer: PeerRef) -> str:
        key = peer_key(peer.worker_id, peer.incarnation)
        if key in self._book.outgoing:
            return key
        address = self._book.address_of(peer)
        conn = secrets.randbits(63)
        endpoint = _Endpoint(key, self._endpoint_to(address.blob[TOKEN_BYTES:]), conn, address.blob[:TOKEN_BYTES])
        self._book.outgoing[key] = endpoint
        body = pack_parts(self._worker_address, *(part.encode() for part in self._me))
        self._send_control(endpoint, _HELLO, 0, body)
        return key

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        endpoint = self._book.outgoing.get(peer)
        if endpoint is None or not endpoint.ep.alive:
            raise TransferError(f"peer lost: {peer}")
        if len(body) + _HEAD.size + 2 > MAX_MESSAGE_BYTES:
            raise TransferError(f"request of {len(body)} bytes is too long")
        try:
            buffer = self._array(dest)
            request = endpoint.ep.tag_recv(buffer, self._ucx.UCXXTag(_TAG_DATA | read_id))
        except self._ucx.UCXError as error:
            raise TransferError(f"receive from {peer}: {error}") from error
        self._pending[next(self._ids)] = _Pending(request, buffer, endpoint, read_id=read_id, dest=dest)
        self._send_control(endpoint, _READ, read_id, body)

    def path_to(self, peer: str) -> str:
        return self.path if peer in self._book.outgoing else ""

    def notify(self, peer: str, body: bytes) -> None:
        endpoint = self._book.outgoing.get(peer)
        if endpoint is not None:
            self._send_control(endpoint, _NOTE, 0, body)

    # ---- prefill's side ----

    def answer(self, conn: str, read_id: int, message: np.ndarray | bytes) -> int:
        op = next(self._ids)
        endpoint = self._book.reader(conn)
        if endpoint is None or not endpoint.ep.alive:
            self._events.append(SendDone(op, False))
            return op
        array = np.frombuffer(message, np.uint8) if isinstance(message, bytes) else message
        self._send(endpoint, array, _TAG_DATA | read_id, op)
        return op

    # ---- both ----

    def progress(self) -> list[TransportEvent]:
        self._book.begin_turn(self._events)
        rounds = 0
        while rounds < _PROGRESS_ROUNDS and self._worker.progress_once():
            rounds += 1
        self._active = rounds > 0
        self._take_control()
        self._take_completed()
        self._take_unexpected()
        for endpoint in self._book.endpoints():
            if not endpoint.ep.alive:
                self._bury(endpoint, "connection lost")
        self._take_dead()
        events, self._events = self._events, []
        return events

    def busy(self) -> bool:
        return bool(self._pending or self._events or self._book.dying or self._active)

    def wait(self, wakeup: Wakeup, timeout_s: float, *, awaited: bool) -> None:
        # arm() refuses while there is something to progress: then there is nothing to wait for.
        if not self._active and not self._events and self._worker.arm():
            sleep_on([self._worker.epoll_file_descriptor, wakeup.fileno()], timeout_s)

    def drop(self, peer: str, why: str) -> None:
        self._book.drop(peer, why)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        limit = time.monotonic() + _CLOSE_S
        # Notes on their way out are small: let them leave before the endpoints are closed under them.
        while any(p.op == 0 and p.read_id < 0 for p in self._pending.values()) and time.monotonic() < limit - 1.5:
            self.progress()
        for endpoint in self._book.endpoints():
            self._bury(endpoint, "closed")
        while self._pending and time.monotonic() < limit:
            self.progress()
        self._worker.cancel_inflight_requests()
        for _ in range(_PROGRESS_ROUNDS):
            if not self._worker.progress_once():
                break
        self._control.clear()

    # ---- inside ----

    def _endpoint_to(self, worker_address: bytes) -> Any:
        try:
            address = self._ucx.UCXAddress.create_from_buffer(worker_address)
            return self._ucx.UCXEndpoint.create_from_worker_address(self._worker, address, endpoint_error_handling=True)
        except (self._ucx.UCXError, ValueError, TypeError) as error:
            raise TransferError(f"peer lost: no UCX endpoint: {error}") from error

    def _send_control(self, endpoint: _Endpoint, kind: int, read_id: int, body: bytes) -> None:
        if kind != _HELLO:
            body = len(body).to_bytes(2, "little") + body
        raw = _HEAD.pack(endpoint.token, kind, endpoint.conn, read_id) + body
        self._send(endpoint, np.frombuffer(raw, np.uint8), _TAG_CONTROL, 0)

    def _send(self, endpoint: _Endpoint, array: np.ndarray, tag: int, op: int) -> None:
        try:
            buffer = self._array(array)
            request = endpoint.ep.tag_send(buffer, self._ucx.UCXXTag(tag))
        except self._ucx.UCXError:
            # A dead endpoint: progress() reports the peer.
            if op:
                self._events.append(SendDone(op, False))
            return
        self._pending[next(self._ids)] = _Pending(request, (buffer, array), endpoint, op=op)

    def _post_control(self) -> tuple[Any, np.ndarray]:
        array = np.zeros(MAX_MESSAGE_BYTES, np.uint8)
        return self._worker.tag_recv(self._array(array), self._ucx.UCXXTag(_TAG_CONTROL)), array

    def _take_control(self) -> None:
        if self._closed:
            return
        for _ in range(_CONTROL_SLOTS):
            request, array = self._control[0]
            if not request.completed:
                return
            # Slots are matched in the order in which they were posted, so only the first can be the next to complete.
            self._control.pop(0)
            self._control.append(self._post_control())
            with contextlib.suppress(self._ucx.UCXMessageTruncatedError, self._ucx.UCXMsgTruncated):
                # UCXX reports a message shorter than its buffer as truncated, too; the parser bounds what it reads.
                request.check_error()
            self._on_control(array.tobytes())

    def _on_control(self, raw: bytes) -> None:
        token, kind, conn, read_id = _HEAD.unpack_from(raw)
        if not hmac.compare_digest(token, self._token):
            return
        body = raw[_HEAD.size :]
        if kind == _HELLO:
            self._on_hello(conn, body)
            return
        endpoint = self._book.incoming.get(conn)
        if endpoint is None or endpoint.lost:
            return
        (length,) = struct.unpack_from("<H", body)
        payload = body[2 : 2 + length]
        if kind == _READ and read_id < 1 << 48:
            self._events.append(RequestArrived(endpoint.name, read_id, payload))
        elif kind == _NOTE:
            self._events.append(NoteArrived(endpoint.name, payload))

    def _on_hello(self, conn: int, body: bytes) -> None:
        parts = unpack_parts(body, 3)
        if parts is None or not 0 < len(parts[0]) <= _MAX_ADDRESS_BYTES:
            return
        worker, incarnation = (part.decode(errors="replace") for part in parts[1:])
        if self._book.may_greet(worker):
            with contextlib.suppress(TransferError):
                name = f"{peer_key(worker, incarnation)}#{conn:x}"
                self._book.incoming[conn] = _Endpoint(name, self._endpoint_to(parts[0]), conn)

    def _take_completed(self) -> None:
        for number, pending in list(self._pending.items()):
            if not pending.request.completed:
                continue
            del self._pending[number]
            error = ""
            try:
                pending.request.check_error()
            except self._ucx.UCXError as problem:
                error = f"{type(problem).__name__}: {problem}"
            if pending.read_id >= 0:
                event = self._received(pending, error)
                if event is not None:
                    self._events.append(event)
            elif pending.op:
                self._events.append(SendDone(pending.op, not error))

    def _take_unexpected(self) -> None:
        """An answer that no receive waits for (a request was doubled, or a peer misbehaves) is received and thrown away;
        UCX would keep it for ever. A real answer never shows here: its receive is posted before its request is sent."""
        if not self._active or self._closed:
            return
        found = self._worker.tag_probe(self._ucx.UCXXTag(_TAG_DATA), self._ucx.UCXXTagMask(0xFFFF << 48), remove=True)
        if found.matched:
            scratch = np.empty(max(1, found.length), np.uint8)
            buffer = self._array(scratch)
            request = self._worker.tag_recv_with_handle(buffer, found)
            self._pending[next(self._ids)] = _Pending(request, buffer, _NO_ENDPOINT)

    def _received(self, pending: _Pending, error: str) -> ReceiveDone | None:
        """None: more of the answer is on its way."""
        assert pending.dest is not None
        if error and read_refusal(pending.dest[:HEADER_BYTES].data) is not None:
            error = ""  # a refusal is shorter than the slab that was asked for
        if error and (pending.endpoint.lost or not pending.endpoint.ep.alive):
            error = f"peer lost: {pending.endpoint.name}: {pending.endpoint.lost or error}"
        return ReceiveDone(pending.read_id, error)

    def _bury(self, endpoint: _Endpoint, why: str) -> None:
        """Close an endpoint. It is reported as lost once the last of its requests has completed."""
        self._book.closed(endpoint, why)
        with contextlib.suppress(self._ucx.UCXError):
            endpoint.ep.close_blocking()

    def _take_dead(self) -> None:
        if not self._book.dying:
            return
        # UCXX has put the requests of closed endpoints (and only those) on a list that its progress_once() leaves alone.
        self._worker.cancel_inflight_requests()
        self._take_completed()
        alive = {id(p.endpoint) for p in self._pending.values()}
        self._events += [self._book.bury(e) for e in list(self._book.dying) if id(e) not in alive]


register(
    TransportSpec(
        name="ucx",
        summary="UCX; UCX_TLS names the path, by default TCP",
        make=lambda worker_id, incarnation, site: UcxTransport(worker_id, incarnation, host=site.host),
        auto_rank=40,
    )
)
