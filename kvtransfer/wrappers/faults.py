"""A transport that misbehaves on command, around any other. For tests; a start-up option can switch it on.

Kinds of events that can be held, dropped, delayed or duplicated: "read" (a request on its way out), "note" (a note on its
way out), "request", "send_done", "receive", "peer_lost" (what progress() reports).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.fabric.transport import (
    NoteArrived,
    PeerLost,
    ReceiveDone,
    RequestArrived,
    SendDone,
    Transport,
    TransportEvent,
    Wakeup,
)
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, Ring

KINDS = ("read", "note", "request", "send_done", "receive", "peer_lost")
_KIND_OF: dict[type, str] = {
    RequestArrived: "request",
    NoteArrived: "note_arrived",
    SendDone: "send_done",
    ReceiveDone: "receive",
    PeerLost: "peer_lost",
}


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """Faults from start on. `corrupt_every`: flip one payload byte of every n-th slab that was received; 0: never."""

    corrupt_every: int = 0
    drop_reads: int = 0
    duplicate_reads: int = 0
    delay_receive_s: float = 0.0


class FaultyTransport:
    """Wraps `inner`. hold(), release(), drop_next(), duplicate_next(), corrupt_next() may be called from any thread."""

    def __init__(
        self, inner: Transport, spec: FaultSpec | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        spec = spec or FaultSpec()
        self.inner = inner
        self.path = inner.path
        self._spec = spec
        self._clock = clock
        self._held: set[str] = set()
        self._drop: Counter[str] = Counter({"read": spec.drop_reads})
        self._twice: Counter[str] = Counter({"read": spec.duplicate_reads})
        self._corrupt = 0
        self._received = 0
        self._outbox: deque[tuple[str, Callable[[], None]]] = deque()
        self._inbox: deque[tuple[float, TransportEvent]] = deque()
        self._dest: dict[int, np.ndarray] = {}
        self.seen: Counter[str] = Counter()

    # ---- the test's side ----

    def hold(self, kind: str) -> None:
        """Keep back everything of this kind until release()."""
        self._held.add(kind)

    def release(self, kind: str) -> None:
        self._held.discard(kind)

    def drop_next(self, kind: str, count: int = 1) -> None:
        self._drop[kind] += count

    def duplicate_next(self, kind: str, count: int = 1) -> None:
        self._twice[kind] += count

    def corrupt_next(self, count: int = 1) -> None:
        """Flip one payload byte of the next slabs that are received."""
        self._corrupt += count

    # ---- Transport ----

    @property
    def address(self) -> KvAddress:
        return self.inner.address

    def register(self, ring: Ring) -> None:
        self.inner.register(ring)

    def connect(self, peer: PeerRef) -> str:
        return self.inner.connect(peer)

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        self._dest[read_id] = dest
        if "read" in self._held:
            self._outbox.append(("read", lambda: self._send_read(peer, read_id, body, dest)))
        else:
            self._send_read(peer, read_id, body, dest)

    def _send_read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        for _ in range(self._times("read")):
            self.inner.read(peer, read_id, body, dest)

    def answer(self, conn: str, read_id: int, message: np.ndarray | bytes) -> int:
        return self.inner.answer(conn, read_id, message)

    def path_to(self, peer: str) -> str:
        return self.inner.path_to(peer)

    def notify(self, peer: str, body: bytes) -> None:
        if "note" in self._held:
            self._outbox.append(("note", lambda: self._send_note(peer, body)))
        else:
            self._send_note(peer, body)

    def _send_note(self, peer: str, body: bytes) -> None:
        for _ in range(self._times("note")):
            self.inner.notify(peer, body)

    def progress(self) -> list[TransportEvent]:
        for _ in range(len(self._outbox)):
            kind, send = self._outbox.popleft()
            if kind in self._held:
                self._outbox.append((kind, send))
            else:
                send()
        now = self._clock()
        for event in self.inner.progress():
            delay = self._spec.delay_receive_s if isinstance(event, ReceiveDone) else 0.0
            self._inbox.append((now + delay, event))
        out: list[TransportEvent] = []
        for _ in range(len(self._inbox)):
            due, event = self._inbox.popleft()
            kind = _KIND_OF[type(event)]
            if kind in self._held or due > now:
                self._inbox.append((due, event))
                continue
            if isinstance(event, ReceiveDone):
                self._maybe_corrupt(event)
            out += [event] * self._times(kind)
        return out

    def busy(self) -> bool:
        return self.inner.busy()

    def wait(self, wakeup: Wakeup, timeout_s: float, *, awaited: bool) -> None:
        limit = min(timeout_s, 0.001) if self._inbox or self._outbox else timeout_s
        self.inner.wait(wakeup, limit, awaited=awaited)

    def drop(self, peer: str, why: str) -> None:
        self.inner.drop(peer, why)

    def close(self) -> None:
        self.inner.close()

    def _times(self, kind: str) -> int:
        self.seen[kind] += 1
        if self._drop[kind] > 0:
            self._drop[kind] -= 1
            return 0
        if self._twice[kind] > 0:
            self._twice[kind] -= 1
            return 2
        return 1

    def _maybe_corrupt(self, event: ReceiveDone) -> None:
        dest = self._dest.pop(event.read_id, None)
        if dest is None or event.error:
            return
        self._received += 1
        every = self._spec.corrupt_every
        if self._corrupt > 0 or (every and self._received % every == 0):
            self._corrupt = max(0, self._corrupt - 1)
            damage(dest)


def damage(dest: np.ndarray) -> None:
    """Flip one bit in the middle of a slab that was read. [bytes] uint8."""
    middle = HEADER_BYTES + (dest.size - HEADER_BYTES) // 2
    dest[middle | 3] ^= 0x40  # the exponent of a little-endian fp32: a change that cannot be lost in rounding
