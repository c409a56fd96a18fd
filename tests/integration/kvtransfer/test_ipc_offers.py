"""Slabs of the ipc transport that come as they are published, to a reader that expects them: by hand, turn by turn, so that
messages cross where a test wants it."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import numpy as np
import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import StaleReferenceError, TransferError
from diptych.engine.messages import RangePacked, SlabGrant
from diptych.kernels.kv_sum import kv_sum
from diptych.kvtransfer.api import PeerRef, ReceivedSlab
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.core import TransferCore
from diptych.kvtransfer.fabric.transport import RequestArrived
from diptych.kvtransfer.gpu.ring import GpuRing
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.kvtransfer.slabs.layout import RingSpec, SlabQuotas
from diptych.kvtransfer.transports.ipc import IpcTransport
from diptych_tests.device_pair import data_at, noise
from diptych_tests.host_memory import HostMemory

NUM_SLABS, SLAB, LEASE_S = 4, 8192, 5.0


class Counting(IpcTransport):
    """Says how many reads have arrived."""

    asked = 0

    def progress(self) -> list[Any]:
        events = super().progress()
        self.asked += sum(isinstance(event, RequestArrived) for event in events)
        return events


class Pair:
    """A publisher and a reader; nothing happens in either but by `turn` and `turns`."""

    def __init__(self, reader_slabs: int = NUM_SLABS) -> None:
        self.clock, self.memory, self.reader_memory = FakeClock(), HostMemory(), HostMemory()
        self.grants: list[SlabGrant] = []
        self.settled: list[int] = []
        self.taken: list[ReceivedSlab] = []
        spec = RingSpec(NUM_SLABS, SLAB)
        self.transport = Counting("p0", "life", host="127.0.0.1", memory=self.memory)
        self.publisher = self._core(
            self.transport,
            ("p0", "life"),
            GpuRing(spec, *self.memory.allocate(spec.total_bytes)),
            SlabQuotas(NUM_SLABS, 0),
        )
        self.reader = self.new_reader("x", reader_slabs)
        self.ref = PeerRef("p0", "life", self.publisher.address)
        self.publisher.start(self.grants.extend, lambda attempt, slab: self.settled.append(slab))

    def _core(self, transport: IpcTransport, me: tuple[str, str], ring: GpuRing, quotas: SlabQuotas) -> TransferCore:
        config = TransferConfig(transport="inproc", slab_bytes=SLAB, num_slabs=NUM_SLABS, lease_s=LEASE_S)
        return TransferCore(
            transport, config, worker_id=me[0], incarnation=me[1], quotas=quotas, layout_hash=7, num_layers=1,
            bytes_per_s=1e9, loop=asyncio.get_running_loop(), ring=ring, clock=self.clock.now,
        )  # fmt: skip

    def new_reader(self, life: str, num_slabs: int = NUM_SLABS) -> TransferCore:
        transport = IpcTransport("d0", life, host="127.0.0.1", memory=self.reader_memory)
        return self._core(transport, ("d0", life), GpuRing(RingSpec(num_slabs, SLAB)), SlabQuotas(0, num_slabs))

    async def turn(self, core: TransferCore) -> bool:
        worked = core.turn()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return worked

    async def turns(self) -> None:
        """Until nothing is on its way."""
        while any([await self.turn(core) for core in (self.publisher, self.reader) if not core._stopping]):
            pass

    async def expecting(self, attempt: str = "a") -> None:
        self.reader.expect(self.ref, attempt, self.taken.append, read_s=2.0)
        await self.turns()

    def publish(self, data: np.ndarray, attempt: str = "a", peer: str = "d0@x", first: int = 0) -> SlabHandle:
        grant = self.grants.pop()
        ctypes.memmove(grant.payload.address, data.ctypes.data, data.nbytes)  # type: ignore[union-attr]
        packed = RangePacked(attempt, grant.slab, grant.generation, first, 1, data.nbytes, kv_sum(data))
        return self.publisher.publish(peer, packed)

    def reading(self, handle: SlabHandle) -> asyncio.Task[ReceivedSlab]:
        return asyncio.create_task(self.reader.read(self.ref, handle, deadline_s=2.0))

    async def check(self) -> None:
        """Every slab of both is free, and no ledger saw anything that it should not."""
        await self.turns()
        for core in (self.publisher, self.reader):
            audit = core._audit(full=True)
            assert not audit.violations
            assert audit.slabs.free == audit.slabs.total
        assert len(self.grants) == NUM_SLABS

    def close(self) -> None:
        self.reader.shut()
        self.publisher.shut()


@pytest.fixture
async def pair():
    pair = Pair()
    await pair.turns()
    yield pair
    pair.close()


async def test_what_is_expected_comes_unasked_and_goes_back(pair) -> None:
    await pair.expecting()
    for seed in range(3 * NUM_SLABS):
        data = noise(seed, 8 * (1 + 40 * seed))
        handle = pair.publish(data)
        await pair.turns()
        [slab] = pair.taken
        assert slab.handle == handle
        assert np.array_equal(data_at(slab.payload), data)
        assert slab.payload.checksum == kv_sum(data)
        assert not pair.settled
        pair.reader.finish(pair.taken.pop())
        await pair.turns()
        assert pair.settled.pop() == handle.slab
    assert pair.transport.asked == 0
    await pair.check()


async def test_others_are_asked_for_as_before(pair) -> None:
    """An attempt that was not expected, one of another worker, and one that was expected too late."""
    await pair.expecting("another")
    early = pair.publish(noise(1))
    others = pair.publish(noise(2), "another", peer="d1@y")
    await pair.turns()
    await pair.expecting("a")
    assert not pair.taken
    for handle, seed in ((early, 1), (others, 2)):
        task = pair.reading(handle)
        await asyncio.sleep(0)
        await pair.turns()
        slab = await task
        assert np.array_equal(data_at(slab.payload), noise(seed))
        pair.reader.finish(slab)
    assert pair.transport.asked == 2
    await pair.check()


@pytest.mark.parametrize("order", ["read first", "offer first", "read when it is reported"])
async def test_a_read_and_an_offer_that_cross_are_one(pair, order) -> None:
    await pair.expecting()
    handle = pair.publish(noise(1))
    if order == "offer first":
        await pair.turn(pair.publisher)
    elif order == "read when it is reported":
        await pair.turn(pair.publisher)
        pair.reader.turn()
        pair.reader.turn()  # the report is on its way to the event loop
    task = pair.reading(handle)
    if order == "read first":
        await asyncio.sleep(0)
        await pair.turn(pair.reader)
    await asyncio.sleep(0)
    await pair.turns()
    slabs = [*pair.taken, *([await task] if order == "read first" or not pair.taken else [])]
    task.cancel()
    [slab] = slabs
    assert np.array_equal(data_at(slab.payload), noise(1))
    pair.reader.finish(slab)
    await pair.check()
    assert not pair.publisher._publisher._ledger.refused


async def test_a_read_that_was_called_off_while_the_offer_crossed_it(pair) -> None:
    await pair.expecting()
    task = pair.reading(pair.publish(noise(1)))
    await asyncio.sleep(0)
    await pair.turn(pair.reader)
    task.cancel()
    await pair.turns()
    assert not pair.taken
    await pair.check()


@pytest.mark.parametrize("when", ["before it is sent", "on its way", "when it is reported"])
async def test_what_nobody_expects_any_more_goes_back(pair, when) -> None:
    """At once, and not when its lease is over: a cancelled request holds nothing."""
    await pair.expecting()
    pair.publish(noise(1))
    if when != "before it is sent":
        await pair.turn(pair.publisher)
    if when == "when it is reported":
        pair.reader.turn()
    pair.reader.unexpect("a")
    await pair.turns()
    assert not pair.taken
    pair.publisher.release("a")
    if when == "before it is sent":
        pair.reader.finish(await asyncio.wait_for(_read(pair, pair.publish(noise(2))), 60))
    await pair.check()
    assert pair.reader_memory.open_handles, "the connection was not given up for it"


async def _read(pair: Pair, handle: SlabHandle) -> ReceivedSlab:
    task = pair.reading(handle)
    await asyncio.sleep(0)
    await pair.turns()
    return await task


async def test_a_slab_that_was_taken_is_the_readers_until_it_says_so(pair) -> None:
    await pair.expecting()
    pair.publish(noise(1))
    await pair.turns()
    pair.publisher.release("a")
    pair.reader.unexpect("a")
    await pair.turns()
    assert pair.publisher._audit(full=True).publish.quarantined == 1
    [slab] = pair.taken
    assert np.array_equal(data_at(slab.payload), noise(1))
    pair.reader.finish(slab)
    await pair.check()


async def test_offers_wait_for_a_slab_of_the_reader() -> None:
    pair = Pair(reader_slabs=1)
    await pair.turns()
    await pair.expecting()
    handles = [pair.publish(noise(seed)) for seed in range(3)]
    await pair.turns()
    assert [slab.handle for slab in pair.taken] == handles[:1]
    late = pair.reading(handles[1])  # announced meanwhile: the offer answers it
    await asyncio.sleep(0)
    for number in range(2):
        pair.reader.finish(pair.taken[0] if number == 0 else await late)
        await pair.turns()
    assert [slab.handle for slab in pair.taken] == [handles[0], handles[2]]
    pair.reader.finish(pair.taken[1])
    assert pair.transport.asked == 0
    await pair.check()
    pair.close()


async def test_an_offer_that_waits_too_long_goes_back_and_its_read_tells() -> None:
    pair = Pair(reader_slabs=1)
    await pair.turns()
    await pair.expecting()
    handles = [pair.publish(noise(seed)) for seed in range(2)]
    await pair.turns()
    late = pair.reading(handles[1])
    await asyncio.sleep(0)
    await pair.turns()
    pair.clock.advance(2.5)
    await pair.turns()
    with pytest.raises(TransferError, match="no free slab"):
        await late
    assert len(pair.taken) == 1
    pair.publish(noise(3))
    await pair.turns()
    pair.clock.advance(2.5)
    await pair.turns()
    assert isinstance(error := pair.taken.pop(), TransferError), "told at once, without a read"
    assert "no free slab" in error.message
    with pytest.raises(StaleReferenceError):
        await _read_with(pair, handles[1])
    await pair.check()
    pair.close()


async def _read_with(pair: Pair, handle: SlabHandle) -> ReceivedSlab:
    pair.reader.finish(pair.taken.pop())
    return await _read(pair, handle)


async def test_a_publisher_that_goes_leaves_nothing_behind(pair) -> None:
    await pair.expecting()
    handles = [pair.publish(noise(seed)) for seed in range(2)]
    await pair.turn(pair.publisher)
    pair.publisher.shut()
    task = pair.reading(handles[1])
    await asyncio.sleep(0)
    await pair.turns()
    with pytest.raises(TransferError, match="peer lost"):
        await task
    assert all(isinstance(taken, TransferError) for taken in pair.taken)
    pair.reader.unexpect("a")
    await pair.turns()
    audit = pair.reader._audit(full=True)
    assert not audit.violations
    assert audit.slabs.free == NUM_SLABS


async def test_a_reader_that_goes_gives_everything_back(pair) -> None:
    await pair.expecting()
    for seed in range(3):
        pair.publish(noise(seed))
    await pair.turn(pair.publisher)
    await pair.turn(pair.reader)
    pair.reader.shut()
    await pair.turns()
    audit = pair.publisher._audit(full=True)
    assert not audit.violations
    assert audit.slabs.free == NUM_SLABS


async def test_a_connection_has_a_bounded_number_of_subscriptions(pair, monkeypatch) -> None:
    monkeypatch.setattr("diptych.kvtransfer.transports.ipc._MAX_SUBSCRIPTIONS", 2)
    for attempt in ("a", "b", "c"):
        await pair.expecting(attempt)
    handles = {attempt: pair.publish(noise(1), attempt) for attempt in "abc"}
    await pair.turns()
    assert [slab.handle.attempt for slab in pair.taken] == ["a", "b"]
    pair.taken.append(await _read(pair, handles["c"]))
    for slab in pair.taken:
        pair.reader.finish(slab)
    for attempt in "abc":
        pair.reader.unexpect(attempt)
    await pair.check()
    [link] = pair.transport._in
    assert not link.subscribed
    assert not link.granted
    assert not pair.publisher._publisher._offers
