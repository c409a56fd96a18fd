"""NIXL between two real processes, behind the same doors as UCX; and what differs: nobody says that an idle peer is gone."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from diptych.common.errors import ConfigError, StaleReferenceError, TransferError
from diptych.kvtransfer.api import Transfer
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.wrappers.ciphers import CIPHERS
from diptych_tests import waiting
from diptych_tests.publisher import SIZE, Publisher, all_back, comes_to_rest, in_flight, until_free

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed"),
]
DEADLINE_S = waiting.DEADLINE_S


CONTAINER = ("unshare", "--pid", "--ipc", "--fork", "--mount-proc")
"""Hides a process's memory from its neighbours, as two containers do."""


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    child = await Publisher.start(transport="nixl")
    yield child
    await child.stop()


@pytest.fixture
async def reader() -> AsyncIterator[Transfer]:
    config = TransferConfig(transport="nixl", num_slabs=8)
    transfer = build_transfer(
        config, worker_id="d0", incarnation="x", reads=True, layout_hash=7, loop=asyncio.get_running_loop()
    )
    yield transfer
    await transfer.close()


async def test_fifty_slabs_arrive_intact_and_every_slab_comes_back(publisher, reader) -> None:
    for seed in range(50):
        size = SIZE if seed % 5 else 1 + seed * 7
        received = await reader.read(publisher.ref, await publisher.publish("a", seed, size), deadline_s=DEADLINE_S)
        expected = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        assert np.array_equal(np.frombuffer(received.payload, np.uint8), expected)
        reader.finish(received)
    await until_free(reader)
    await all_back(publisher)
    assert publisher.path == "nixl:shm"
    if "ucxx._lib.libucxx" not in sys.modules:
        assert reader.path == received.path == "nixl:shm"


def alone() -> None:
    if "ucxx._lib.libucxx" in sys.modules:
        pytest.skip("UCXX's UCX was loaded before, and keeps NIXL's module for shared memory out of this process")


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and util-linux")
@pytest.mark.parametrize("required", ["", "nixl:shm"])
async def test_two_containers_that_drop_to_tcp_say_so(required, caplog) -> None:
    """Shared memory within each passes both self-tests; between them there is none."""
    alone()
    child = await Publisher.start(transport="nixl", inside=CONTAINER)
    config = TransferConfig(transport="nixl", num_slabs=8, require_transport=required)
    loop = asyncio.get_running_loop()
    transfer = build_transfer(config, worker_id="d0", incarnation="x", reads=True, layout_hash=7, loop=loop)
    try:
        assert child.path == transfer.path == "nixl:shm"
        asked = transfer.read(child.ref, await child.publish("a", 1), deadline_s=DEADLINE_S)
        if required:
            with pytest.raises(TransferError, match="comes on nixl:tcp, nixl:shm is required"):
                await asked
        else:
            received = await asked
            assert received.path == "nixl:tcp"
            assert "comes on nixl:tcp, the self-test found nixl:shm" in caplog.text
            transfer.finish(received)
        await until_free(transfer)
    finally:
        await transfer.close()
        await child.stop()


async def test_a_path_that_is_not_there_is_refused_at_the_start() -> None:
    alone()
    config = TransferConfig(transport="nixl", num_slabs=2, require_transport="nixl:rdma")
    loop = asyncio.get_running_loop()
    with pytest.raises(ConfigError, match="the self-test found nixl:shm"):
        build_transfer(config, worker_id="d0", incarnation="x", reads=True, layout_hash=7, loop=loop)


async def test_a_handle_is_read_once_and_a_forged_one_never(publisher, reader) -> None:
    handle = await publisher.publish("a", 1)
    with pytest.raises(TransferError, match="FORGED"):
        await reader.read(publisher.ref, replace(handle, attempt="b"), deadline_s=DEADLINE_S)
    received = await reader.read(publisher.ref, handle, deadline_s=DEADLINE_S)
    with pytest.raises(StaleReferenceError, match="USED"):
        await reader.read(publisher.ref, handle, deadline_s=DEADLINE_S)
    reader.finish(received)
    await until_free(reader)


async def test_stopped_publisher_deadline_quarantine_and_return(publisher, reader) -> None:
    reader.finish(await reader.read(publisher.ref, await publisher.publish("a", 0), deadline_s=DEADLINE_S))
    handle = await publisher.publish("a", 1)
    await publisher.freeze()
    with pytest.raises(TransferError, match="deadline"):
        await reader.read(publisher.ref, handle, deadline_s=0.5)
    assert (await reader.audit(full=True)).slabs.quarantined == 1
    publisher.process.send_signal(signal.SIGCONT)
    await until_free(reader)
    reader.finish(await reader.read(publisher.ref, await publisher.publish("a", 2), deadline_s=DEADLINE_S))


async def test_forget_is_the_proof_of_death_of_a_killed_publisher(publisher, reader) -> None:
    """A read that prefill did not answer yet has touched nothing: it ends when the endpoint is closed."""
    reader.finish(await reader.read(publisher.ref, await publisher.publish("a", 9), deadline_s=DEADLINE_S))
    handles = [await publisher.publish("a", seed) for seed in range(4)]
    await publisher.freeze()
    reads = [asyncio.create_task(reader.read(publisher.ref, handle, deadline_s=10 * DEADLINE_S)) for handle in handles]
    await in_flight(reader, 4)
    publisher.process.kill()
    await publisher.ended()
    await reader.forget(publisher.ref)
    results = await asyncio.gather(*reads, return_exceptions=True)
    assert all(isinstance(result, TransferError) and "peer lost" in str(result) for result in results), results
    await until_free(reader)


async def test_a_publisher_that_started_again_is_a_new_peer(reader) -> None:
    old = await Publisher.start("life1", transport="nixl")
    handle = await old.publish("a", 1)
    reader.finish(await reader.read(old.ref, await old.publish("a", 2), deadline_s=DEADLINE_S))
    old.process.kill()
    await old.ended()
    new = await Publisher.start("life2", transport="nixl")
    try:
        with pytest.raises(StaleReferenceError):
            await reader.read(new.ref, handle, deadline_s=DEADLINE_S)
        reader.finish(await reader.read(new.ref, await new.publish("a", 3), deadline_s=DEADLINE_S))
        await until_free(reader)
    finally:
        await new.stop()


async def test_idle_sleeps_between_looks(publisher, reader) -> None:
    reader.finish(await reader.read(publisher.ref, await publisher.publish("a", 1), deadline_s=DEADLINE_S))
    await comes_to_rest(reader, turns_a_second=60)  # a look every 50 ms; one that spins takes tens of thousands


def build(**options: object) -> str:
    loop = asyncio.new_event_loop()
    try:
        transfer = build_transfer(
            TransferConfig(**options), worker_id="d0", incarnation="x", reads=True, layout_hash=7, loop=loop
        )  # type: ignore[arg-type]
        path = transfer.path
        loop.run_until_complete(transfer.close())
        return path
    finally:
        loop.close()


def test_auto_takes_the_best_and_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(transport="auto").startswith("nixl:")
    assert "auto took nixl:" in caplog.text
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    caplog.clear()
    assert build(transport="auto").startswith("ucx:")
    assert "auto took ucx:" in caplog.text
    assert "NIXL cannot be loaded" in caplog.text


def test_a_required_transport_refuses_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(ConfigError, match="the self-test found ucx:"):
        build(transport="auto", require_transport="nixl:any")
    with pytest.raises(ConfigError, match="NIXL cannot be loaded"):
        build(transport="nixl")


@pytest.mark.parametrize("cipher", CIPHERS)
async def test_encrypted_slabs_are_read_out_of_the_other_process(cipher: str) -> None:
    publisher = await Publisher.start(transport="nixl", kv_encryption=cipher)
    config = TransferConfig(transport="nixl", num_slabs=8, kv_encryption=cipher)
    reader = build_transfer(
        config, worker_id="d0", incarnation="x", reads=True, layout_hash=7, loop=asyncio.get_running_loop(),
        encryption_key=bytes(32),
    )  # fmt: skip
    try:
        for seed in range(10):
            received = await reader.read(publisher.ref, await publisher.publish("a", seed), deadline_s=DEADLINE_S)
            expected = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
            assert np.array_equal(np.frombuffer(received.payload, np.uint8), expected)
            reader.finish(received)
        with pytest.raises(StaleReferenceError):
            await reader.read(publisher.ref, received.handle, deadline_s=DEADLINE_S)
        await until_free(reader)
        await all_back(publisher)
    finally:
        await reader.close()
        await publisher.stop()
