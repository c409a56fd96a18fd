"""Frames between the engine and the process of a rank, on a socket pair.

    | kind, 1 byte | call, 4 bytes | length, 4 bytes | so many bytes |

An answer has the call of its question. A frame may come with a descriptor of shared memory.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator
from enum import IntEnum

HEAD = struct.Struct(">BII")
STEP = struct.Struct("<Bi")
"""In front of a step's sequences: flags, and of a launched step the call of the one in front of it."""
WITH_RESULT, WITH_LAYERS, MAY_GIVE_UP = 1, 2, 4
"""This rank answers with the result; it reports layers; the step may be given up."""
DRAW = struct.Struct("<i")
"""In front of a step's histories: its call."""
RANGE = struct.Struct("<iiqqiiQ")
"""KV in shared memory: number of the area, KV group of this rank, offset, bytes, layers [first, end) (-1: all), tokens. Block ids
follow."""
ELSEWHERE = -1
"""In place of an area: the engine is on another host, and the KV comes and goes as BYTES."""
_RECEIVE = 1 << 18


class Kind(IntEnum):
    """Questions in their order, then answers."""

    BOARD = 1
    """With the descriptor of a rank_board.Board: number of ranks, and of this one. It comes first, and has no answer."""
    READY = 2
    """Answered once the runner is made, with its capabilities."""
    EXECUTE = 3
    LAUNCH = 4
    """Answered once the step has landed."""
    DRAW = 5
    """It has no answer."""
    RESULT = 17
    """The engine waits for the step of this call; it has no answer of its own."""
    COPY = 6
    MAP = 7
    """With the descriptor of an area that pack and unpack use; its number is the call. It has no answer."""
    FORGET_AREAS = 8
    PACK = 9
    UNPACK = 10
    PULLED = 11
    OVERWRITTEN = 19
    """Blocks of the first KV group hold other KV now: see ModelRunner.note_overwritten."""
    READ_ADAPTER = 12
    ADAPTER_READ = 13
    INSTALL_ADAPTER = 14
    FORGET_ADAPTERS = 15
    COMPILED = 16
    """See ModelRunner.expect_compiled."""
    OK = 32
    NO_MEMORY = 33
    FAILED = 34
    ABORTED = 35
    REFUSED = 37
    """Of READY: a ConfigError, as JSON."""
    LAYERS = 36
    """Not an answer yet: so many layers of the step are computed."""
    BYTES = 18
    """KV of this call, between hosts that share no memory, see engine.ranks.nodes.links. It has no answer."""

    # Between the worker and the process of another host, see engine.ranks.nodes.
    CHALLENGE = 48
    HELLO = 49
    WELCOME = 50
    START = 51
    """The arguments of the node's ranks, as JSON."""
    PULSE = 52
    """A sign of life; to the worker, with those of the node's ranks."""
    MODEL = 53
    """To the worker: the fingerprint of the node's model folder."""
    END = 54
    """The worker ends as it was asked to."""


class EngineEnd:
    """Of one rank's socket; never blocks. `outgoing`: there is more to be sent."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        link.setblocking(False)
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._incoming = bytearray()

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def outgoing(self) -> bool:
        return bool(self._queue)

    def put(self, kind: int, call: int, body: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send as much as can be sent now. Raises: OSError."""
        frame = HEAD.pack(kind, call, len(body))
        if descriptors:  # the descriptors come with the body's first byte
            self._queue.append((memoryview(frame), ()))
            self._queue.append((memoryview(body), descriptors))
        else:
            self._queue.append((memoryview(frame + body), ()))
        self.send()

    def send(self) -> None:
        """What can be sent without waiting. Raises: OSError."""
        with contextlib.suppress(BlockingIOError):
            while self._queue:
                data, descriptors = self._queue[0]
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
                count = self._link.sendmsg([data], rights)
                if count < len(data):
                    self._queue[0] = data[count:], ()
                else:
                    self._queue.popleft()

    def receive(self) -> Iterator[tuple[int, int, bytes]]:
        """(kind, call, body) of what has come. Raises: OSError; EOFError."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._link.recv(_RECEIVE)
                if not data:
                    raise EOFError("its socket was closed")
                self._incoming += data
                if len(data) < _RECEIVE:
                    break
        while len(self._incoming) >= HEAD.size:
            kind, call, length = HEAD.unpack_from(self._incoming)
            end = HEAD.size + length
            if len(self._incoming) < end:
                return
            body = bytes(self._incoming[HEAD.size : end])
            del self._incoming[:end]
            yield kind, call, body

    def close(self) -> None:
        self._link.close()


class RankEnd:
    """Of the socket, in the rank's process; blocks."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def comes(self, timeout_s: float) -> bool:
        """Whether a frame comes within this time."""
        poll = select.poll()  # select() refuses descriptors from 1,024 on
        poll.register(self._link, select.POLLIN)
        return bool(poll.poll(1e3 * timeout_s))

    def receive(self) -> tuple[int, int, bytes, int]:
        """(kind, call, body, descriptor or -1). Raises: EOFError: the engine closed the socket."""
        kind, call, length = HEAD.unpack(self._exactly(HEAD.size))
        if kind in (Kind.BOARD, Kind.MAP):
            body, descriptors, _, _ = socket.recv_fds(self._link, length, 1)
            if not descriptors or len(body) < length:
                raise EOFError("no descriptor came")
            return kind, call, body, descriptors[0]
        return kind, call, self._exactly(length), -1

    def send(self, kind: int, call: int, body: bytes = b"") -> None:
        self._link.sendall(HEAD.pack(kind, call, len(body)) + body)

    def _exactly(self, size: int) -> bytes:
        data = self._link.recv(size, socket.MSG_WAITALL) if size else b""
        while len(data) < size:
            more = self._link.recv(size - len(data))
            if not more:
                raise EOFError("the engine closed the socket")
            data += more
        return data
