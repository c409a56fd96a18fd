"""Builders: a signed handle, both ledgers, and a pair of sides over a faulty in-process transport with a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import xxhash

from diptych.common.clock import FakeClock
from diptych.common.errors import DiptychError
from diptych.engine.messages import SlabGrant
from diptych.kvtransfer.api import PeerRef
from diptych.kvtransfer.ledgers import publisher_ledger as pub
from diptych.kvtransfer.ledgers import reader_ledger as rd
from diptych.kvtransfer.ledgers.publisher import PublishSide
from diptych.kvtransfer.ledgers.reader import ReadSide
from diptych.kvtransfer.slabs.handle import SlabHandle, sign
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, Ring, RingSpec, payload_capacity, write_frame
from diptych.kvtransfer.transports.inproc import InprocTransport
from diptych.kvtransfer.wrappers.faults import FaultyTransport

KEY = b"k" * 32
LAYOUT = 7
SLAB_BYTES = 4096
LEASE_S = 5.0


def make_handle(**changes: object) -> SlabHandle:
    base = SlabHandle(
        worker_id="p0", incarnation="life1", attempt="att-1", slab=0, generation=1, first_token=0, num_tokens=16,
        first_layer=0, num_layers=2, layout_hash=LAYOUT, size_bytes=1000, checksum=5, expires_ns=99,
    )  # fmt: skip
    return sign(KEY, replace(base, **changes))


def make_publisher(num_slabs: int = 3, quarantine_cap: int = 1) -> pub.PublisherLedger:
    return pub.PublisherLedger(
        num_slabs=num_slabs, payload_bytes=payload_capacity(SLAB_BYTES), worker_id="p0", incarnation="life1",
        layout_hash=LAYOUT, lease_s=LEASE_S, quarantine_cap=quarantine_cap,
    )  # fmt: skip


def make_reader(num_slabs: int = 3, peer_quota: int = 2, quarantine_cap: int = 1) -> rd.ReaderLedger:
    return rd.ReaderLedger(
        num_slabs=num_slabs, peer_quota=peer_quota, quarantine_cap=quarantine_cap, quarantine_s=LEASE_S
    )


class Pair:
    """Prefill and decode on one thread: `step()` is one turn of both transfer threads."""

    def __init__(self, num_slabs: int = 3) -> None:
        self.clock = FakeClock()
        self.grants: dict[int, SlabGrant] = {}
        self.settled: list[tuple[str, int]] = []
        self.silent: list[str] = []
        self.delivered: dict[int, int] = {}
        self.failed: dict[int, DiptychError] = {}
        spec = RingSpec(num_slabs, SLAB_BYTES)
        self.p_ring, self.d_ring = Ring(spec), Ring(spec)
        self.p_wire = FaultyTransport(InprocTransport("p0", "life1"), clock=self.clock.now)
        self.d_wire = FaultyTransport(InprocTransport("d0", "life1"), clock=self.clock.now)
        self.peer = PeerRef("p0", "life1", self.p_wire.address)
        self.p = PublishSide(
            make_publisher(num_slabs), self.p_wire, self.p_ring, KEY,
            lambda grant: self.grants.__setitem__(grant.slab, grant),
            lambda attempt, slab: self.settled.append((attempt, slab)),
            self.silent.append,
        )  # fmt: skip
        self.d = ReadSide(
            make_reader(num_slabs, peer_quota=num_slabs), self.d_wire, self.d_ring,
            layout_hash=LAYOUT, bytes_per_s=1e9, verify_checksum=True,
            on_delivered=lambda read_id, slab, path, _: self.delivered.__setitem__(read_id, slab),
            on_failed=lambda read_id, error, _: self.failed.__setitem__(read_id, error),
        )  # fmt: skip
        self.p.start(self.clock.now())

    def publish(self, attempt: str = "att-1", fill: int = 1, size: int = 1000) -> SlabHandle:
        _, grant = self.grants.popitem()
        grant.payload[:size] = bytes([fill]) * size
        handle = make_handle(
            attempt=attempt, slab=grant.slab, generation=grant.generation, size_bytes=size,
            checksum=xxhash.xxh3_64_intdigest(grant.payload[:size]),
        )  # fmt: skip
        write_frame(self.p_ring.slab(grant.slab), handle)
        self.p.publish("d0", handle, self.clock.now())
        return handle

    def want(self, read_id: int, handle: SlabHandle, within_s: float = 3.0) -> None:
        now = self.clock.now()
        self.d.want(read_id, self.peer, handle, now + within_s, now)

    def step(self, seconds: float = 0.0, turns: int = 4) -> None:
        self.clock.advance(seconds)
        now = self.clock.now()
        for _ in range(turns):
            for wire, side in ((self.p_wire, self.p), (self.d_wire, self.d)):
                for event in wire.progress():
                    side.on_transport(event, now)
        self.p.tick(now)
        self.d.tick(now)

    def payload(self, read_id: int, size: int = 1000) -> bytes:
        return bytes(self.d_ring.slab(self.delivered[read_id])[HEADER_BYTES : HEADER_BYTES + size])

    def close(self) -> None:
        self.d_wire.close()
        self.p_wire.close()


@pytest.fixture
def handle() -> Callable[..., SlabHandle]:
    return make_handle


@pytest.fixture
def key() -> bytes:
    return KEY


@pytest.fixture
def publisher() -> Callable[..., pub.PublisherLedger]:
    return make_publisher


@pytest.fixture
def reader() -> Callable[..., rd.ReaderLedger]:
    return make_reader


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = Pair()
    yield both
    assert both.p.check() == []
    assert both.d.check() == []
    both.close()
