"""A KV transport that also offers slabs, as ipc does: in flight until the reader's note."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from handoff_sim.laws import Law
from handoff_sim.wire import SimTransport, _Conn, _Recv, _Send

from diptych.common.errors import TransferError
from diptych.kvtransfer.fabric.transport import OfferArrived, SendDone
from diptych.kvtransfer.slabs import handle as handles


def has_offers(seed: int) -> bool:
    """The other schedules are what they were without."""
    return seed % 11 == 4


class OfferingSimTransport(SimTransport):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._subscribed: set[tuple[_Conn, str]] = set()
        self._op_of: dict[tuple[_Conn, int, int], int] = {}
        """Prefill: by connection, slab and generation."""
        self._offered: dict[bytes, tuple[_Conn, bytes]] = {}
        """Decode: by handle, what was neither accepted nor declined."""
        self._asked: dict[int, bytes] = {}

    @property
    def num_open(self) -> int:
        return super().num_open + len(self._offered)

    # ---- decode ----

    def subscribe(self, peer: str, attempt: str) -> None:
        conn = self._out.get(peer)
        if conn is not None and self._wires.times():
            self._deliver(conn, lambda: conn.source._subscribed.add((conn, attempt)))  # type: ignore[attr-defined]

    def unsubscribe(self, peer: str, attempt: str) -> None:
        conn = self._out.get(peer)
        if conn is not None and self._wires.times():
            self._deliver(conn, lambda: conn.source._subscribed.discard((conn, attempt)))  # type: ignore[attr-defined]

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        if body in self._offered:
            self.accept(peer, read_id, body, dest)
            return
        self._asked[read_id] = body
        super().read(peer, read_id, body, dest)

    def accept(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        conn, data = self._offered.pop(body, (None, b""))
        if conn is None or self._out.get(peer) is not conn:
            raise TransferError(f"peer lost: {peer}")
        slab = self._slab_of(dest)
        if slab in self.touching() | self.lent():
            self._wires.report(
                Law.ONE_USER, f"{self.node.worker_id}: an offer is accepted into slab {slab}, which is in use"
            )
        self._recvs[read_id] = _Recv(conn, dest, slab)
        self._on_answer(conn, read_id, data)

    def _on_offer(self, conn: _Conn, body: bytes, data: bytes) -> None:
        if self in conn.lost_by:
            return
        crossed = next((i for i, recv in self._recvs.items() if recv.conn is conn and self._asked.get(i) == body), None)
        if crossed is not None:
            self._on_answer(conn, crossed, data)
            return
        self._offered[body] = (conn, data)
        self._emit(OfferArrived(conn.key, body))

    def notify(self, peer: str, body: bytes) -> None:
        self._offered.pop(body, None)
        super().notify(peer, body)

    # ---- prefill ----

    def subscriber(self, peer: str, attempt: str) -> str:
        names = (c.name for c in self._in.values() if (c, attempt) in self._subscribed)
        return next((name for name in names if name.rpartition("#")[0] == peer), "")

    def offer(self, conn: str, body: bytes, message: np.ndarray) -> int:
        op, to, wires = next(self._ops), self._in.get(conn), self._wires
        wires.answered.append(body)
        if to is None or self in to.lost_by:
            self._emit(SendDone(op, False))
            return op
        slab, handle = self._slab_of(message), handles.decode(body)
        if slab in self.touching():
            wires.report(Law.ONE_USER, f"{self.node.worker_id}: slab {slab} is offered while it is sent")
        self._sends[op] = _Send(to, message, slab, xxhash.xxh3_64_intdigest(message))
        self._op_of[to, handle.slab, handle.generation] = op
        data = bytes(message)
        if wires.times():
            self._deliver(to, lambda: to.reader._on_offer(to, body, data), back=True)  # type: ignore[attr-defined]
        return op

    def _on_note(self, conn: _Conn, body: bytes) -> None:
        handle, renewal = handles.decode_note(body)
        op = None if renewal else self._op_of.pop((conn, handle.slab, handle.generation), None)
        if op is not None and self not in conn.lost_by:
            self._sent(op)
        super()._on_note(conn, body)

    # ---- both ----

    def _buried(self, conn: _Conn, why: str) -> None:
        self._offered = {body: offer for body, offer in self._offered.items() if offer[0] is not conn}
        super()._buried(conn, why)
