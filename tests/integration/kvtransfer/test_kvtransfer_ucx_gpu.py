"""The ucx-gpu transport over memory that stands in for a GPU's: UCX over TCP, real threads and processes. With a GPU: see
tests/kernels/test_ucx_gpu.py.

    python -P test_kvtransfer_ucx_gpu.py HOST SLAB_BYTES

is the self-test's other process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import logging
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diptych.common.errors import ConfigError, StaleReferenceError, TransferError
from diptych.engine.messages import DeviceRange, RangePacked
from diptych.kernels.kv_sum import kv_sum
from diptych.kvtransfer import gpu_path
from diptych.kvtransfer.api import PeerRef
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.gpu_path import DIRECT, STAGED
from diptych.kvtransfer.gpu_ring import GpuRing
from diptych.kvtransfer.layout import RingSpec, SlabQuotas
from diptych.kvtransfer.thread import TransferThread
from diptych.kvtransfer.transports import ucx_gpu
from diptych.kvtransfer.transports.ucx_gpu import UcxGpuTransport
from diptych.kvtransfer.ucx_gpu_probe import run_ucx_gpu_self_test, serve

# Not imported here: UCXX's UCX would keep NIXL's out of the process that collects the tests of both.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed")

SLAB, NUM_SLABS = 65536, 4


class HostMemory:
    """DeviceMemory in arrays of this process."""

    path = "host"

    def __init__(self) -> None:
        self._arrays: dict[int, np.ndarray] = {}

    def allocate(self, size_bytes: int) -> tuple[int, bytes]:
        array = np.zeros(size_bytes, np.uint8)
        self._arrays[array.ctypes.data] = array
        return array.ctypes.data, b"mine"

    def open(self, handle: bytes) -> int:
        raise AssertionError("nobody maps anything")

    close = open

    def free(self, address: int) -> None:
        del self._arrays[address]

    def probe(self, address: int, size_bytes: int) -> float:
        return 0.0

    def bind(self) -> None:
        return

    def view(self, address: int, size_bytes: int) -> Any:
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def fetch(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)


class OverTcp(UcxGpuTransport):
    default_tls = "tcp,self"


def ring_in(memory: HostMemory, spec: RingSpec) -> GpuRing:
    return GpuRing(spec, *memory.allocate(spec.total_bytes))


class Pair:
    def __init__(self, *, require: str = "") -> None:
        loop = asyncio.get_running_loop()
        self.memory, self.reader_memory = HostMemory(), HostMemory()
        config = TransferConfig(transport="inproc", slab_bytes=SLAB, num_slabs=NUM_SLABS)
        common: dict[str, Any] = {"layout_hash": 7, "num_layers": 1, "bytes_per_s": 1e9, "loop": loop}
        self.publisher = TransferThread(
            OverTcp("p0", "life", host="127.0.0.1", memory=self.memory),
            config, worker_id="p0", incarnation="life", quotas=SlabQuotas(NUM_SLABS, 0),
            ring=ring_in(self.memory, RingSpec(NUM_SLABS, SLAB)), **common,
        )  # fmt: skip
        self.reads = OverTcp("d0", "x", host="127.0.0.1", memory=self.reader_memory, require_path=require)
        self.reader = TransferThread(
            self.reads,
            config, worker_id="d0", incarnation="x", quotas=SlabQuotas(0, NUM_SLABS),
            ring=ring_in(self.reader_memory, RingSpec(NUM_SLABS, SLAB)), **common,
        )  # fmt: skip
        self.ref = PeerRef("p0", "life", self.publisher.address)
        self.grants: asyncio.Queue[Any] = asyncio.Queue()
        self.publisher.start(
            lambda grants: loop.call_soon_threadsafe(lambda: [self.grants.put_nowait(g) for g in grants]),
            lambda attempt, slab: None,
        )

    async def publish(self, attempt: str, data: np.ndarray) -> Any:
        grant = await asyncio.wait_for(self.grants.get(), 60)
        ctypes.memmove(grant.payload.address, data.ctypes.data, data.nbytes)
        packed = RangePacked(attempt, grant.slab, grant.generation, 0, 1, data.nbytes, kv_sum(data))
        return self.publisher.publish("d0", packed)

    async def read(self, handle: Any) -> Any:
        return await self.reader.read(self.ref, handle, deadline_s=300.0)

    async def all_free(self) -> None:
        from diptych_tests import waiting  # not found in the other process, which this file is, too

        async def free() -> bool:
            audits = [await side.audit(full=True) for side in (self.publisher, self.reader)]
            assert not any(audit.violations for audit in audits)
            return all(audit.slabs.free == NUM_SLABS for audit in audits)

        await waiting.until(free)

    async def close(self) -> None:
        await self.reader.close()
        await self.publisher.close()


@pytest.fixture
async def pair():
    pair = Pair()
    yield pair
    await pair.close()


def noise(seed: int, size: int = 4096) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def data_at(payload: Any) -> np.ndarray:
    assert isinstance(payload, DeviceRange)
    return np.frombuffer(ctypes.string_at(payload.address, payload.nbytes), np.uint8)


async def test_payloads_arrive_in_memory_of_ours_and_all_slabs_come_back(pair) -> None:
    for seed in range(20):
        data = noise(seed, 8 * (1 + 400 * seed))
        received = await pair.read(await pair.publish("a", data))
        assert np.array_equal(data_at(received.payload), data)
        assert received.payload.checksum == kv_sum(data)
        pair.reader.finish(received)
    await pair.all_free()


async def test_a_handle_is_read_once_and_a_forged_one_never(pair) -> None:
    handle = await pair.publish("a", noise(1))
    with pytest.raises(TransferError, match="FORGED"):
        await pair.read(replace(handle, attempt="b"))
    received = await pair.read(handle)
    with pytest.raises(StaleReferenceError):
        await pair.read(handle)
    pair.reader.finish(received)
    await pair.all_free()


async def test_who_was_forgotten_is_met_anew(pair, monkeypatch) -> None:
    monkeypatch.setattr(ucx_gpu, "TELLING_BYTES", 1000)
    for seed in (1, 2):
        pair.reader.finish(await pair.read(await pair.publish("a", noise(seed))))
    assert pair.reads.path_to("p0@life")
    await pair.reader.forget(pair.ref)
    data = noise(3)
    handle, found = await pair.publish("a", data), []

    async def read() -> bool:
        with contextlib.suppress(TransferError):  # until the news of the loss have gone round
            found.append(await pair.read(handle))
        return bool(found)

    from diptych_tests import waiting

    await waiting.until(read)
    (received,) = found
    assert np.array_equal(data_at(received.payload), data)
    assert not pair.reads.path_to("p0@life")
    pair.reader.finish(received)
    await pair.all_free()


@pytest.mark.parametrize(("slow", "path"), [(0.0, DIRECT), (1e18, STAGED)])
async def test_the_second_large_payload_determines_the_path(pair, monkeypatch, caplog, slow, path) -> None:
    monkeypatch.setattr(gpu_path, "SLOW_BYTES_PER_S", slow)
    monkeypatch.setattr(ucx_gpu, "TELLING_BYTES", 1000)
    with caplog.at_level(logging.INFO):
        for seed, reported in ((1, ""), (2, path), (3, path)):
            pair.reader.finish(await pair.read(await pair.publish("a", noise(seed))))
            assert pair.reads.path_to("p0@life") == reported
    said = [r for r in caplog.records if f"{path} brings" in r.getMessage()]
    assert [r.levelname for r in said] == ["INFO" if path == DIRECT else "WARNING"]


async def test_a_peer_on_another_path_than_the_required_one_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(gpu_path, "SLOW_BYTES_PER_S", 1e18)
    monkeypatch.setattr(ucx_gpu, "TELLING_BYTES", 1000)
    pair = Pair(require=DIRECT)
    pair.reader.finish(await pair.read(await pair.publish("a", noise(1))))
    with pytest.raises(TransferError, match="ucx-gpu:direct is required"):
        await pair.read(await pair.publish("a", noise(2)))
    await pair.close()


def test_the_self_test_reads_out_of_another_process_and_says_what_it_finds(caplog) -> None:
    memory = HostMemory()
    found = run_ucx_gpu_self_test(
        lambda worker_id, life: OverTcp(worker_id, life, host="127.0.0.1", memory=memory),
        memory,
        "127.0.0.1",
        SLAB,
        command=[sys.executable, "-P", __file__, "127.0.0.1", str(SLAB)],
    )
    assert found.path == STAGED  # TCP within this machine
    assert found.bytes_per_s > 0
    assert found.message_s > 0
    assert any("no direct path" in record.getMessage() for record in caplog.records)
    assert not memory._arrays


def test_a_self_test_whose_other_process_fails_says_so() -> None:
    memory = HostMemory()
    with pytest.raises(TransferError, match="before it gave its address"):
        run_ucx_gpu_self_test(
            lambda worker_id, life: OverTcp(worker_id, life, host="127.0.0.1", memory=memory),
            memory, "127.0.0.1", SLAB, command=[sys.executable, "-c", "pass"],
        )  # fmt: skip
    assert not memory._arrays


async def test_without_gpus_it_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="needs a KV pool on cuda"):
        TransferConfig(transport="ucx-gpu")
    config = TransferConfig(transport="ucx-gpu", device="cuda")
    loop = asyncio.get_running_loop()
    with pytest.raises(ConfigError):
        build_transfer(config, worker_id="p0", incarnation="x", publishes=True, layout_hash=1, loop=loop)


if __name__ == "__main__":
    spec = RingSpec(1, int(sys.argv[2]))
    there = HostMemory()
    serve(OverTcp("self-test-p", "0", host=sys.argv[1], memory=there), ring_in(there, spec), there)
