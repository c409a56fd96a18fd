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
import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diptych.common.errors import ConfigError, StaleReferenceError, TransferError
from diptych.kernels.kv_sum import kv_sum
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.fabric.ucx_gpu_probe import run_ucx_gpu_self_test, serve
from diptych.kvtransfer.gpu import path as gpu_path
from diptych.kvtransfer.gpu.path import DIRECT, STAGED
from diptych.kvtransfer.gpu.ring import GpuRing
from diptych.kvtransfer.slabs.layout import RingSpec
from diptych.kvtransfer.transports import ucx_gpu
from diptych.kvtransfer.transports.ucx_gpu import UcxGpuTransport
from diptych_tests import waiting
from diptych_tests.device_pair import DevicePair, data_at, noise

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


def make_pair(require: str = "") -> DevicePair:
    spec = RingSpec(NUM_SLABS, SLAB)
    memory, reader_memory = HostMemory(), HostMemory()
    reads = OverTcp("d0", "x", host="127.0.0.1", memory=reader_memory, require_path=require)
    publishes = OverTcp("p0", "life", host="127.0.0.1", memory=memory)
    return DevicePair(publishes, ring_in(memory, spec), reads, ring_in(reader_memory, spec))


@pytest.fixture
async def pair():
    pair = make_pair()
    yield pair
    await pair.close()


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
    pair = make_pair(DIRECT)
    pair.reader.finish(await pair.read(await pair.publish("a", noise(1))))
    with pytest.raises(TransferError, match="ucx-gpu:direct is required"):
        await pair.read(await pair.publish("a", noise(2)))
    await pair.close()


def test_the_self_test_reads_out_of_another_process_and_says_what_it_finds(caplog, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
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
