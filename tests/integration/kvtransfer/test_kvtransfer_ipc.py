"""The ipc transport's protocol over memory that stands in for a GPU's: real sockets, real threads, the doors of `Transfer`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import ConfigError, StaleReferenceError, TransferError
from diptych.kernels.kv_sum import kv_sum
from diptych.kvtransfer.api import KvAddress
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.fabric import self_test
from diptych.kvtransfer.fabric.self_test import run_ipc_self_test
from diptych.kvtransfer.gpu.ring import GpuRing
from diptych.kvtransfer.slabs.layout import RingSpec
from diptych.kvtransfer.transports.ipc import IpcTransport
from diptych_tests.device_pair import DevicePair, data_at, noise
from diptych_tests.host_memory import HostMemory
from diptych_tests.waiting import until

SLAB = 8192
NUM_SLABS = 4


@pytest.fixture
async def pair():
    spec = RingSpec(NUM_SLABS, SLAB)
    memory, reader_memory = HostMemory(), HostMemory()
    pair = DevicePair(
        IpcTransport("p0", "life", host="127.0.0.1", memory=memory),
        GpuRing(spec, *memory.allocate(spec.total_bytes)),
        IpcTransport("d0", "x", host="127.0.0.1", memory=reader_memory),
        GpuRing(spec),
    )
    pair.reader_memory = reader_memory
    yield pair
    await pair.close()


async def test_slabs_arrive_by_address_and_all_come_back(pair) -> None:
    for seed in range(20):
        data = noise(seed, 8 * (1 + 40 * seed))
        received = await pair.read(await pair.publish("a", data))
        assert np.array_equal(data_at(received.payload), data)
        assert received.payload.checksum == kv_sum(data)
        pair.reader.finish(received)

    await pair.all_free()
    assert len(pair.settled) == 20
    assert len(pair.reader_memory.open_handles) == 1  # mapped once


async def test_a_slab_belongs_to_the_reader_until_it_says_so(pair) -> None:
    """Also when the leg is released meanwhile: a kernel may still be reading."""
    received = await pair.read(await pair.publish("a", noise(1)))
    assert (await pair.slabs()).in_flight == 1
    pair.publisher.release("a")
    assert (await pair.slabs()).quarantined == 1
    assert np.array_equal(data_at(received.payload), noise(1))
    pair.reader.finish(received)

    async def free() -> bool:
        return (await pair.slabs()).free == NUM_SLABS

    await until(free)


async def test_a_handle_is_read_once_and_a_forged_one_never(pair) -> None:
    handle = await pair.publish("a", noise(1))
    with pytest.raises(TransferError, match="FORGED"):
        await pair.read(replace(handle, attempt="b"))
    received = await pair.read(handle)
    with pytest.raises(StaleReferenceError, match="USED"):
        await pair.read(handle)
    pair.reader.finish(received)


async def test_the_mapping_outlives_the_peer_until_nothing_reads_it(pair) -> None:
    received = await pair.read(await pair.publish("a", noise(3)))
    waiting = await pair.publish("a", noise(4))
    await pair.publisher.close()
    with pytest.raises(TransferError, match="peer lost"):
        await pair.read(waiting)
    assert pair.reader_memory.open_handles
    assert np.array_equal(data_at(received.payload), noise(3))
    pair.reader.finish(received)

    async def unmapped() -> bool:
        return not pair.reader_memory.open_handles

    await until(unmapped)
    assert (await pair.reader.audit(full=True)).slabs.free == NUM_SLABS


async def test_a_reader_that_leaves_frees_what_it_was_reading(pair) -> None:
    await pair.read(await pair.publish("a", noise(3)))
    await pair.reader.close()

    async def free() -> bool:
        return (await pair.slabs()).free == NUM_SLABS

    await until(free)
    assert pair.settled == [("a", 0)] or len(pair.settled) == 1


async def test_forget_waits_for_the_kernel_that_still_reads(pair) -> None:
    received = await pair.read(await pair.publish("a", noise(3)))
    await pair.reader.forget(pair.ref)
    assert pair.reader_memory.open_handles
    assert (await pair.slabs()).in_flight == 1
    with pytest.raises(TransferError, match="peer lost"):
        await pair.read(await pair.publish("a", noise(5)))
    pair.reader.finish(received)

    async def gone() -> bool:
        return not pair.reader_memory.open_handles and (await pair.slabs()).in_flight == 0

    await until(gone)
    again = await pair.read(await pair.publish("a", noise(6)))
    assert np.array_equal(data_at(again.payload), noise(6))
    pair.reader.finish(again)


async def test_who_cannot_be_reached_is_said(pair) -> None:
    handle = await pair.publish("a", noise(1))
    token, identity, name = pair.ref.address.blob.split(b"\n")
    for blob, words in (
        (b"\n".join((token, b"another boot", name)), "not on this host"),
        (b"\n".join((token, identity, b"nobody")), "peer lost"),
        (b"\n".join((b"00" * 16, identity, name)), "peer lost"),
        (b"x", "no ipc address"),
    ):
        ref = replace(pair.ref, address=KvAddress("ipc", "127.0.0.1", 0, blob))
        with pytest.raises(TransferError, match=words):
            await pair.reader.read(ref, handle, deadline_s=300.0)
    pair.reader_memory.broken = True
    with pytest.raises(TransferError, match="no link between the two"):
        await pair.read(handle)


def test_the_self_test_runs_the_protocol() -> None:
    memory = HostMemory()
    found = run_ipc_self_test(
        lambda worker_id, life: IpcTransport(worker_id, life, host="127.0.0.1", memory=memory),
        memory,
        RingSpec(1, 1 << 20),
    )
    assert found.path == "ipc:host"
    assert not memory.open_handles


def test_the_self_test_reports_the_cost_of_a_warm_message(monkeypatch) -> None:
    """The first read connects, and on a GPU compiles: 5 to 360 ms, by which no range was ever worth sending early."""
    clock = FakeClock()
    reads = 0

    class Slow(IpcTransport):
        def read(self, *args: object) -> None:
            nonlocal reads
            reads += 1
            clock.advance(5.0 if reads == 1 else 0.001)
            super().read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(self_test, "time", SimpleNamespace(monotonic=clock.now))
    monkeypatch.setattr(self_test, "hop_s", lambda: 0.0)
    memory = HostMemory()
    found = run_ipc_self_test(
        lambda worker_id, life: Slow(worker_id, life, host="127.0.0.1", memory=memory), memory, RingSpec(1, 1 << 20)
    )
    assert reads > 1
    assert found.message_s == pytest.approx(0.001)


async def test_ipc_without_gpus_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="needs a KV pool on cuda"):
        TransferConfig(transport="ipc")
    with pytest.raises(ConfigError):
        build_transfer(
            TransferConfig(transport="ipc", device="cuda"),
            worker_id="p0",
            incarnation="x",
            publishes=True,
            layout_hash=1,
            loop=asyncio.get_running_loop(),
        )
