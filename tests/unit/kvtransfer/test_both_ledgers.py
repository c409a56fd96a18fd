"""Item: both ledgers in every worker. Two cores publish to and read from each other; turns are taken by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import xxhash

from diptych.common.clock import FakeClock
from diptych.common.errors import ConfigError, InternalError, TransferError
from diptych.engine.messages import RangePacked, SlabGrant
from diptych.kvtransfer.api import PeerRef, ReceivedSlab, SlabCounts
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.core import TICK_S, TransferCore
from diptych.kvtransfer.fabric.transport import peer_key
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.kvtransfer.slabs.layout import SlabQuotas
from diptych.kvtransfer.transports.inproc import InprocTransport

QUOTAS = SlabQuotas(publish=2, read=3)
LEASE_S = 5.0


class Worker:
    """One core, its grants and what its readers hold."""

    def __init__(self, name: str, clock: FakeClock, quotas: SlabQuotas = QUOTAS) -> None:
        self.name = name
        self.core = TransferCore(
            InprocTransport(name, "i"), TransferConfig(transport="inproc", slab_bytes=4096, lease_s=LEASE_S, peer_quota=3),
            worker_id=name, incarnation="i", quotas=quotas, layout_hash=7, num_layers=1, bytes_per_s=1e9,
            loop=asyncio.get_running_loop(), clock=clock.now,
        )  # fmt: skip
        self.ref = PeerRef(name, "i", self.core.address)
        self.grants: list[SlabGrant] = []
        if quotas.publish:
            self.core.start(self.grants.extend, lambda attempt, slab: None)
        self.core.turn()

    def publish(self, to: Worker, data: bytes, attempt: str = "a") -> SlabHandle:
        grant = self.grants.pop(0)
        grant.payload[: len(data)] = data
        packed = RangePacked(attempt, grant.slab, grant.generation, 0, 1, len(data), xxhash.xxh3_64_intdigest(data))
        return self.core.publish(peer_key(to.name, "i"), packed)

    def counts(self) -> tuple[SlabCounts, SlabCounts]:
        return self.core._publisher.counts(), self.core._reader.counts()

    def check(self) -> None:
        assert not [*self.core._publisher.check(), *self.core._reader.check(), *self.core._violations]


class Pair:
    def __init__(self, **quotas: SlabQuotas) -> None:
        self.clock = FakeClock()
        self.a = Worker("a", self.clock, quotas.get("a", QUOTAS))
        self.b = Worker("b", self.clock, quotas.get("b", QUOTAS))

    async def turns(self, until: Callable[[], bool] | None = None) -> None:
        for _ in range(200):
            for worker in (self.a, self.b):
                worker.core.turn()
                worker.check()
            await asyncio.sleep(0)
            if until is not None and until():
                return
        assert until is None, "it never happened"

    async def read(self, reader: Worker, source: Worker, *handles: SlabHandle) -> list[ReceivedSlab]:
        reads = [asyncio.ensure_future(reader.core.read(source.ref, handle, deadline_s=60.0)) for handle in handles]
        await self.turns(lambda: all(read.done() for read in reads))
        return [read.result() for read in reads]

    def all_free(self) -> bool:
        return all(count.free == count.total for worker in (self.a, self.b) for count in worker.counts())


@asynccontextmanager
async def pair_of(**quotas: SlabQuotas) -> AsyncIterator[Pair]:
    pair = Pair(**quotas)
    try:
        yield pair
    finally:
        for worker in (pair.a, pair.b):
            worker.core.shut()


async def test_a_worker_publishes_and_reads_at_once() -> None:
    async with pair_of() as pair:
        forth, back = pair.a.publish(pair.b, b"forth" * 9), pair.b.publish(pair.a, b"back" * 9)
        reads = [
            asyncio.ensure_future(pair.b.core.read(pair.a.ref, forth, deadline_s=60.0)),
            asyncio.ensure_future(pair.a.core.read(pair.b.ref, back, deadline_s=60.0)),
        ]
        await pair.turns(lambda: all(read.done() for read in reads))
        slabs = [read.result() for read in reads]
        assert [bytes(slab.payload) for slab in slabs] == [b"forth" * 9, b"back" * 9]
        assert all(slab.local_slab >= QUOTAS.publish for slab in slabs), "reads go behind the slabs to publish from"
        for worker, slab in ((pair.b, slabs[0]), (pair.a, slabs[1])):
            publish, read = worker.counts()
            assert (publish.total, read.total) == (QUOTAS.publish, QUOTAS.read)
            assert publish.free == QUOTAS.publish - 1
            assert read.free == QUOTAS.read - 1
            worker.core.finish(slab)
        await pair.turns(pair.all_free)


async def test_a_read_that_is_served_waits_for_no_read_that_is_made() -> None:
    """Every slab of `a` that it reads into is lent out, and it serves all the same; the other way round, too."""
    async with pair_of(a=SlabQuotas(2, 2)) as pair:
        held = await pair.read(pair.a, pair.b, *(pair.b.publish(pair.a, bytes([i]) * 50) for i in range(2)))
        assert pair.a.counts()[1].free == 0
        [served] = await pair.read(pair.b, pair.a, pair.a.publish(pair.b, b"served"))
        assert bytes(served.payload) == b"served"
        pair.b.core.finish(served)
        for slab in held:
            pair.a.core.finish(slab)
        await pair.turns(pair.all_free)
        packed = [pair.a.publish(pair.b, b"unread", f"u{i}") for i in range(2)]
        await pair.turns(lambda: len(pair.b.grants) == QUOTAS.publish)
        assert pair.a.counts()[0].free == 0
        [slab] = await pair.read(pair.a, pair.b, pair.b.publish(pair.a, b"read"))
        assert bytes(slab.payload) == b"read"
        pair.a.core.finish(slab)
        for handle in packed:
            pair.a.core.release(handle.attempt)
        await pair.turns(pair.all_free)


async def test_two_workers_swap_roles_over_the_same_cores() -> None:
    async with pair_of() as pair:
        for turn in range(6):
            source, reader = (pair.a, pair.b) if turn % 2 == 0 else (pair.b, pair.a)
            await pair.turns(lambda source=source: len(source.grants) == QUOTAS.publish)
            slabs = await pair.read(reader, source, *(source.publish(reader, bytes([turn, i]) * 30) for i in range(2)))
            assert [bytes(slab.payload) for slab in slabs] == [bytes([turn, i]) * 30 for i in range(2)]
            for slab in slabs:
                reader.core.finish(slab)
            await pair.turns(pair.all_free)


async def test_a_lost_peer_frees_both_parts() -> None:
    async with pair_of() as pair:
        [lent] = await pair.read(pair.a, pair.b, pair.b.publish(pair.a, b"lent"))
        await pair.read(pair.b, pair.a, pair.a.publish(pair.b, b"not acknowledged"))
        never = asyncio.ensure_future(pair.a.core.read(pair.b.ref, pair.b.publish(pair.a, b"never"), deadline_s=60.0))
        pair.a.core.turn()
        pair.b.core.shut()
        for _ in range(20):
            pair.a.core.turn()
            await asyncio.sleep(0)
        with pytest.raises(TransferError, match="peer lost"):
            await never
        publish, read = pair.a.counts()
        assert publish.free == publish.total
        assert read.settled == 1, "verified bytes of our own"
        pair.a.core.finish(lent)
        pair.a.core.turn()
        assert pair.a.counts()[1].free == QUOTAS.read


async def test_a_lease_ends_while_the_worker_also_reads() -> None:
    async with pair_of() as pair:
        pair.a.publish(pair.b, b"nobody comes")
        [slab] = await pair.read(pair.a, pair.b, pair.b.publish(pair.a, b"lent"))
        pair.clock.advance(LEASE_S + TICK_S)
        await pair.turns(lambda: pair.a.counts()[0].free == QUOTAS.publish)
        assert bytes(slab.payload) == b"lent"
        assert pair.a.core._publisher.expired_requests == 1


async def test_a_part_without_slabs_refuses() -> None:
    async with pair_of(a=SlabQuotas(2, 0), b=SlabQuotas(0, 2)) as pair:
        handle = pair.a.publish(pair.b, b"x")
        with pytest.raises(InternalError, match="no slabs to read into"):
            await pair.a.core.read(pair.b.ref, handle, deadline_s=1.0)
        with pytest.raises(InternalError, match="no slabs to publish from"):
            pair.b.core.release("a")
        [slab] = await pair.read(pair.b, pair.a, handle)
        pair.b.core.finish(slab)
        await pair.turns(pair.all_free)


def test_quotas_without_sense_are_refused() -> None:
    for publish, read in ((-1, 2), (0, 0), (2, -1)):
        with pytest.raises(ConfigError, match="num_slabs"):
            SlabQuotas(publish, read)
    config = TransferConfig(num_slabs=5)
    assert config.quotas_of(publishes=True, reads=False) == SlabQuotas(5, 0)
    assert config.quotas_of(publishes=True, reads=True) == SlabQuotas(5, 5)
