"""Connections between the hosts of one worker: TCP, with the cluster's certificates where it has some.

Frames are those of engine.ranks.frames, without descriptors. Of a rank on another host, KV goes through its own connection:

    engine -> rank   BYTES, then UNPACK           from a slab of the worker's ring to the rank's memory
    engine <- rank   BYTES, then PACK's answer    into the slab

Each rank has one connection, and each node one for signs of life. So KV of a rank passes through no other process.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from diptych.common.errors import ConfigError
from diptych.engine.progress import progress
from diptych.engine.ranks.frames import HEAD, Kind, RankEnd
from diptych.engine.ranks.nodes.joining import (
    CHALLENGE_BYTES,
    FROM_OTHER,
    FROM_WORKER,
    MOST_GREETING_BYTES,
    Greeting,
    Hello,
    Refusal,
    Welcome,
    refusal_of,
)

GREETING_S = 10.0
"""For one greeting."""
_PIECE_BYTES = 1 << 20
"""Of KV: between two of them a rank counts a sign of life."""
_QUIET_S = 10
"""Until a host that does not answer counts as gone, to the kernel: it then ends the connection of a rank."""


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files of the cluster's certificates on this host, see common.tls. name: that a peer's must hold; empty: its host."""

    ca: str
    cert: str
    key: str
    name: str = ""

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Both sides must have a certificate of the cluster's authority. Raises: OSError."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.load_verify_locations(self.ca)
        made.load_cert_chain(self.cert, self.key)
        made.verify_mode = ssl.CERT_REQUIRED
        return made


class Place(msgspec.Struct, frozen=True):
    """Where a rank of another host finds its worker.

    Args (fields): key: of the greeting, hexadecimal. named: the host as it was named, for its certificate.
    """

    host: str
    port: int
    named: str
    key: str
    tls: TlsFiles | None
    hello: Hello


class RefusedError(Exception):
    """The other side was not admitted. `error`: what it was told."""

    def __init__(self, error: ConfigError) -> None:
        super().__init__(str(error))
        self.error = error


def prepare(sock: socket.socket) -> None:
    """Frames are small, and the other host may vanish."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, _QUIET_S)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _QUIET_S)


def listen(host: str, port: int) -> socket.socket:
    """On this address only. Args: host: an address of this machine, or a name that has one. Raises: ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError("master_addr", host, f"has no address: {error.strerror}") from None
    try:
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if isinstance(error, OSError) and error.errno in (99, 49):
            raise ConfigError("master_addr", host, "is no address of this machine") from None
        raise ConfigError("master_port", port, f"cannot be listened on: {error.strerror}") from None


def stop_listening(listener: socket.socket) -> None:
    """At once: closing alone lets the kernel go on accepting for as long as another thread's poll has the socket."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connect(host: str, port: int, named: str, tls: TlsFiles | None, timeout_s: float) -> socket.socket:
    """Raises: OSError (ssl.SSLError is one)."""
    until = time.monotonic() + timeout_s
    sock = socket.create_connection((host, port), timeout_s)
    try:
        prepare(sock)
        if tls is None:
            return sock
        context = tls.context(server=False)
        wrapped = context.wrap_socket(sock, server_hostname=tls.name or named, do_handshake_on_connect=False)
        return _shake_hands(wrapped, until)
    except BaseException:
        sock.close()
        raise


def accept_tls(sock: socket.socket, context: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    """The worker's side of the handshake. Raises: OSError."""
    if context is None:
        return sock
    until = time.monotonic() + timeout_s
    return _shake_hands(context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False), until)


def _shake_hands(sock: ssl.SSLSocket, until: float) -> ssl.SSLSocket:
    """In this time, however slowly the other side sends. Raises: OSError."""
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.do_handshake()
                return sock
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wants:
                poll = select.poll()
                poll.register(sock, select.POLLIN if isinstance(wants, ssl.SSLWantReadError) else select.POLLOUT)
                if not poll.poll(1000.0 * max(0.0, until - time.monotonic())):
                    raise TimeoutError("the TLS handshake took too long") from None
    except BaseException:
        sock.close()
        raise


# ---- greeting: both sides block, with a deadline ----


def greet_worker(sock: socket.socket, key: bytes, hello: Hello, secret_name: str) -> Welcome:
    """Join. Args: secret_name: of the file with the secret, for an error. Raises: ConfigError; OSError; EOFError."""
    until = time.monotonic() + GREETING_S
    own = os.urandom(CHALLENGE_BYTES)
    _send(sock, Kind.CHALLENGE, own, until)
    greeting = Greeting(key, _challenge(sock, until), own)
    _send(sock, Kind.HELLO, greeting.sealed(FROM_OTHER, msgspec.json.encode(hello)), until)
    kind, data = _receive(sock, until)
    body = greeting.opened(FROM_WORKER, data)
    if body is None:
        raise ConfigError("secret_file", secret_name, "is not the secret of the worker at master_addr")
    if kind == Kind.REFUSED:
        raise msgspec.json.decode(body, type=Refusal).error()
    return msgspec.json.decode(body, type=Welcome)


def greet_other(sock: socket.socket, key: bytes, admit: Callable[[Hello], Welcome]) -> Hello:
    """Args: admit: raises ConfigError for who may not join. Raises: RefusedError; OSError; EOFError."""
    until = time.monotonic() + GREETING_S
    challenge = os.urandom(CHALLENGE_BYTES)
    _send(sock, Kind.CHALLENGE, challenge, until)
    greeting = Greeting(key, challenge, _challenge(sock, until))
    kind, data = _receive(sock, until)
    if kind != Kind.HELLO:
        raise EOFError("it did not say who it is")
    body = greeting.opened(FROM_OTHER, data)
    try:
        if body is None:
            raise ConfigError("secret_file", "", "is another one there")
        try:
            hello = msgspec.json.decode(body, type=Hello)
        except msgspec.DecodeError as error:
            raise ConfigError("version", "", f"its greeting is not understood: {error}") from None
        welcome = admit(hello)
    except ConfigError as error:
        refusal = msgspec.json.encode(refusal_of(error))
        _send(sock, Kind.REFUSED, greeting.sealed(FROM_WORKER, refusal), until)
        raise RefusedError(error) from None
    _send(sock, Kind.WELCOME, greeting.sealed(FROM_WORKER, msgspec.json.encode(welcome)), until)
    return hello


def _challenge(sock: socket.socket, until: float) -> bytes:
    kind, challenge = _receive(sock, until)
    if kind != Kind.CHALLENGE or len(challenge) != CHALLENGE_BYTES:
        raise EOFError("it is no part of a worker with several hosts")
    return challenge


def _send(sock: socket.socket, kind: int, body: bytes, until: float) -> None:
    sock.settimeout(max(until - time.monotonic(), 0.001))
    sock.sendall(HEAD.pack(kind, 0, len(body)) + body)


def _receive(sock: socket.socket, until: float) -> tuple[int, bytes]:
    kind, _, length = HEAD.unpack(_exactly(sock, HEAD.size, until))
    if length > MOST_GREETING_BYTES:
        raise EOFError("its greeting is too long")
    return kind, _exactly(sock, length, until)


def _exactly(sock: socket.socket, size: int, until: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(until - time.monotonic(), 0.001))
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError("it closed the connection")
        data += more
    return data


# ---- frames ----


@dataclass(slots=True)
class _Incoming:
    """A frame's body that comes into `view`."""

    kind: int
    call: int
    body: bytearray
    view: memoryview
    filled: int = 0


class RemoteEnd:
    """Of a connection to another host; never blocks. Has what EngineEnd has. `outgoing`: there is more to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)
        self._queue: deque[memoryview] = deque()
        self._head = bytearray()
        self._incoming: _Incoming | None = None
        self._targets: dict[int, memoryview] = {}

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def outgoing(self) -> bool:
        return bool(self._queue)

    def expect_bytes(self, call: int, target: memoryview) -> None:
        """KV of this call is received into `target`, which has its length."""
        self._targets[call] = target

    def put_bytes(self, call: int, data: memoryview) -> None:
        """KV of the question of this call, which `put` sends next. It is read until that is answered. Raises: OSError."""
        self._queue.append(memoryview(HEAD.pack(Kind.BYTES, call, len(data))))
        self._queue.append(data)

    def put(self, kind: int, call: int, body: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send as much as can be sent now. Raises: OSError."""
        assert not descriptors, "memory is not shared between hosts"
        self._queue.append(memoryview(HEAD.pack(kind, call, len(body)) + body))
        self.send()

    def wait(self, timeout_s: float) -> None:
        """Until something came, or can be sent."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._queue else 0))
        poll.poll(1000.0 * timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Send all of it, before the end; within this time. Raises: OSError."""
        until = time.monotonic() + timeout_s
        while self._queue and time.monotonic() < until:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            poll.poll(1000.0 * max(0.0, until - time.monotonic()))
            self.send()

    def send(self) -> None:
        """What can be sent without waiting. Raises: OSError."""
        try:
            while self._queue:
                count = self._sock.send(self._queue[0])
                if count < len(self._queue[0]):
                    self._queue[0] = self._queue[0][count:]
                else:
                    self._queue.popleft()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass

    def receive(self) -> Iterator[tuple[int, int, bytes]]:
        """(kind, call, body) of what has come. Raises: OSError; EOFError."""
        try:
            while True:
                if self._incoming is None:
                    self._read_head()
                one = self._incoming
                if one is not None:
                    while one.filled < len(one.view):
                        one.filled += self._read_into(one.view[one.filled :])
                    self._incoming = None
                    if one.kind != Kind.BYTES:
                        yield one.kind, one.call, bytes(one.body)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass

    def _read_head(self) -> None:
        while len(self._head) < HEAD.size:
            more = bytearray(HEAD.size - len(self._head))
            count = self._read_into(memoryview(more))
            self._head += more[:count]
        kind, call, length = HEAD.unpack(self._head)
        self._head.clear()
        if kind == Kind.BYTES:
            target = self._targets.pop(call, None)
            if target is None or len(target) != length:
                raise EOFError(f"{length} bytes of KV came for call {call}")
            self._incoming = _Incoming(kind, call, bytearray(), target)
        else:
            body = bytearray(length)
            self._incoming = _Incoming(kind, call, body, memoryview(body))

    def _read_into(self, view: memoryview) -> int:
        count = self._sock.recv_into(view)
        if not count:
            raise EOFError("its connection was closed")
        return count

    def close(self) -> None:
        self._sock.close()


class RemoteRankEnd(RankEnd):
    """Of the connection, in the process of a rank on another host; blocks."""

    def __init__(self, link: socket.socket) -> None:
        super().__init__(link)
        link.settimeout(None)
        self._room = bytearray()
        """For KV that came, or is to be sent."""

    def comes(self, timeout_s: float) -> bool:
        """See RankEnd."""
        if isinstance(self._link, ssl.SSLSocket) and self._link.pending():
            return True
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        return bool(poll.poll(1000.0 * timeout_s))

    def receive(self) -> tuple[int, int, bytes, int]:
        """See RankEnd. There are no descriptors."""
        while True:
            kind, call, length = HEAD.unpack(self._exactly(HEAD.size))
            if kind != Kind.BYTES:
                return kind, call, self._exactly(length), -1
            self._fill(self.room(length))

    def room(self, size: int) -> memoryview:
        """The bytes that came with this question, or where its answer's are put."""
        if len(self._room) < size:
            self._room = bytearray(size)
        return memoryview(self._room)[:size]

    def send_bytes(self, call: int, data: memoryview) -> None:
        """In front of the answer to this call."""
        self._link.sendall(HEAD.pack(Kind.BYTES, call, len(data)))
        for at in range(0, len(data), _PIECE_BYTES):
            self._link.sendall(data[at : at + _PIECE_BYTES])
            progress()

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            count = self._link.recv_into(view[filled:])
            if not count:
                raise EOFError("the engine closed the connection")
            filled += count


def join_as_rank(place: Place) -> RemoteRankEnd:
    """Raises: ConfigError; OSError; EOFError."""
    sock = connect(place.host, place.port, place.named, place.tls, GREETING_S)
    greet_worker(sock, bytes.fromhex(place.key), place.hello, "")
    return RemoteRankEnd(sock)
