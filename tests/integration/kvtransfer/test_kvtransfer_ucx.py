"""Two real processes over real UCX on loopback: this one reads, a child publishes; and what happens when it dies."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from diptych.common.errors import DiptychError, StaleReferenceError, TransferError
from diptych.kvtransfer.api import Transfer
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.wrappers.ciphers import CIPHERS
from diptych_tests import waiting
from diptych_tests.machine import NEEDS_IPV6
from diptych_tests.publisher import SIZE, Publisher, all_back, comes_to_rest, in_flight, turns, until_free

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
DEADLINE_S = waiting.DEADLINE_S
ALREADY_SET = {name for name in os.environ if name.startswith("UCX_")}
# What NIXL's side sets for good, where it has run in this process: how loud UCX is, never which path it takes.
LOUDNESS = {"UCX_WARN_UNUSED_ENV_VARS", "UCX_LOG_LEVEL"}


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    child = await Publisher.start()
    yield child
    await child.stop()


@pytest.fixture
async def reader() -> AsyncIterator[Transfer]:
    config = TransferConfig(transport="ucx", num_slabs=8, require_transport="ucx:tcp")
    transfer = build_transfer(
        config, worker_id="d0", incarnation="x", reads=True, layout_hash=7, loop=asyncio.get_running_loop()
    )
    yield transfer
    await transfer.close()


async def test_what_ucxx_chooses_is_not_inherited_by_children(reader: Transfer) -> None:
    """NIXL's UCX in a child would take another path with it."""
    left = {name for name in os.environ if name.startswith("UCX_")}
    assert "ucxx" in sys.modules
    assert left <= ALREADY_SET | LOUDNESS
    assert reader.message_s > 0.0


async def test_fifty_slabs_arrive_intact_and_every_slab_comes_back(publisher: Publisher, reader: Transfer) -> None:
    for seed in range(50):
        size = SIZE if seed % 5 else 1 + seed * 7
        received = await reader.read(publisher.ref, await publisher.publish("a", seed, size), deadline_s=DEADLINE_S)
        expected = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        assert np.array_equal(np.frombuffer(received.payload, np.uint8), expected)
        reader.finish(received)
    await until_free(reader)
    await all_back(publisher)
    assert publisher.path == "ucx:tcp"


@pytest.mark.parametrize("cipher", CIPHERS)
async def test_encrypted_slabs_between_two_processes(cipher: str) -> None:
    publisher = await Publisher.start(kv_encryption=cipher)
    config = TransferConfig(transport="ucx", num_slabs=8, require_transport="ucx:tcp", kv_encryption=cipher)
    reader = build_transfer(
        config, worker_id="d0", incarnation="x", reads=True, layout_hash=7, loop=asyncio.get_running_loop(),
        encryption_key=bytes(32),
    )  # fmt: skip
    try:
        for seed in range(20):
            size = SIZE if seed % 5 else 1 + seed * 7
            received = await reader.read(publisher.ref, await publisher.publish("a", seed, size), deadline_s=DEADLINE_S)
            expected = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
            assert np.array_equal(np.frombuffer(received.payload, np.uint8), expected)
            reader.finish(received)
        with pytest.raises(StaleReferenceError):
            await reader.read(publisher.ref, received.handle, deadline_s=DEADLINE_S)
        await until_free(reader)
        await all_back(publisher)
    finally:
        await reader.close()
        await publisher.stop()


async def test_a_handle_is_read_once_and_a_forged_one_never(publisher: Publisher, reader: Transfer) -> None:
    handle = await publisher.publish("a", 1)
    with pytest.raises(TransferError, match="FORGED"):
        await reader.read(publisher.ref, replace(handle, attempt="b"), deadline_s=DEADLINE_S)
    received = await reader.read(publisher.ref, handle, deadline_s=DEADLINE_S)
    with pytest.raises(StaleReferenceError, match="USED"):
        await reader.read(publisher.ref, handle, deadline_s=DEADLINE_S)
    reader.finish(received)
    await until_free(reader)


@pytest.mark.parametrize("connected", [True, False])
async def test_killed_publisher_fails_all_its_reads_at_once(
    publisher: Publisher, reader: Transfer, connected: bool
) -> None:
    if connected:
        reader.finish(await reader.read(publisher.ref, await publisher.publish("a", 9), deadline_s=DEADLINE_S))
    handles = [await publisher.publish("a", seed) for seed in range(4)]
    await publisher.freeze()  # so that the kill comes in the middle of the reads
    reads = [asyncio.create_task(reader.read(publisher.ref, handle, deadline_s=10 * DEADLINE_S)) for handle in handles]
    await in_flight(reader, 4)
    publisher.process.kill()
    results = await asyncio.gather(
        *reads, return_exceptions=True
    )  # long before their deadlines: those have another text
    assert all(isinstance(result, TransferError) and "peer lost" in str(result) for result in results), results
    await until_free(reader)


async def test_one_peer_killed_another_stopped_only_the_dead_ones_reads_end(
    publisher: Publisher, reader: Transfer
) -> None:
    other = await Publisher.start(worker_id="p1")
    try:
        slow_handle, lost_handle = await other.publish("a", 1), await publisher.publish("a", 2)
        for child in (other, publisher):
            reader.finish(await reader.read(child.ref, await child.publish("a", 9), deadline_s=DEADLINE_S))
            await child.freeze()
        slow = asyncio.create_task(reader.read(other.ref, slow_handle, deadline_s=10 * DEADLINE_S))
        lost = asyncio.create_task(reader.read(publisher.ref, lost_handle, deadline_s=10 * DEADLINE_S))
        await in_flight(reader, 2)
        publisher.process.kill()
        with pytest.raises(TransferError, match="peer lost"):
            await lost
        await turns(reader, 5)  # what the death of one might do to the other's read it has done by now
        assert not slow.done()
        other.process.send_signal(signal.SIGCONT)
        received = await slow
        assert np.array_equal(
            np.frombuffer(received.payload, np.uint8), np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
        )
        reader.finish(received)
    finally:
        await other.stop()


async def test_stopped_publisher_deadline_quarantine_and_return(publisher: Publisher, reader: Transfer) -> None:
    first = await reader.read(publisher.ref, await publisher.publish("a", 0), deadline_s=DEADLINE_S)
    reader.finish(first)
    handle = await publisher.publish("a", 1)
    await publisher.freeze()
    with pytest.raises(TransferError, match="deadline"):
        await reader.read(publisher.ref, handle, deadline_s=0.5)
    assert (await reader.audit(full=True)).slabs.quarantined == 1
    publisher.process.send_signal(signal.SIGCONT)
    await until_free(reader)
    received = await reader.read(publisher.ref, await publisher.publish("a", 2), deadline_s=DEADLINE_S)
    reader.finish(received)


async def test_forget_closes_the_endpoint_to_a_stopped_publisher(publisher: Publisher, reader: Transfer) -> None:
    handle = await publisher.publish("a", 1)
    await publisher.freeze()
    with pytest.raises(TransferError, match="deadline"):
        await reader.read(publisher.ref, handle, deadline_s=0.3)
    await reader.forget(publisher.ref)
    await until_free(reader)
    publisher.process.send_signal(signal.SIGCONT)
    received = await reader.read(publisher.ref, await publisher.publish("b", 2), deadline_s=DEADLINE_S)
    reader.finish(received)


async def test_a_publisher_that_started_again_is_a_new_peer(reader: Transfer) -> None:
    old = await Publisher.start("life1")
    handle = await old.publish("a", 1)
    reader.finish(await reader.read(old.ref, await old.publish("a", 2), deadline_s=DEADLINE_S))
    old.process.kill()
    await old.ended()
    new = await Publisher.start("life2")
    try:
        with pytest.raises(StaleReferenceError):
            await reader.read(new.ref, handle, deadline_s=DEADLINE_S)
        received = await reader.read(new.ref, await new.publish("a", 3), deadline_s=DEADLINE_S)
        reader.finish(received)
        await until_free(reader)
    finally:
        await new.stop()


async def test_lease_ends_with_no_new_work_arriving(reader: Transfer) -> None:
    publisher = await Publisher.start(lease_s=0.5)
    try:
        handle = await publisher.publish("a", 1)
        await all_back(publisher)
        with pytest.raises(StaleReferenceError):
            await reader.read(publisher.ref, handle, deadline_s=DEADLINE_S)
    finally:
        await publisher.stop()


def listening_on(pid: int) -> set[tuple[str, int]]:
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            host, port = fields[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


async def test_listens_on_its_host_only_and_garbage_does_not_hurt(publisher: Publisher, reader: Transfer) -> None:
    sockets = listening_on(publisher.process.pid)
    assert sockets
    assert {host for host, _ in sockets} == {"127.0.0.1"}
    for host, port in sockets:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(4096), os.urandom(4096), b""):
            with socket.create_connection((host, port), timeout=300.0) as sock:
                sock.sendall(garbage)
    received = await reader.read(publisher.ref, await publisher.publish("a", 5), deadline_s=DEADLINE_S)
    reader.finish(received)
    assert (await publisher.counts()).total == 8


async def test_unreachable_address_fails_fast(publisher: Publisher, reader: Transfer) -> None:
    handle = await publisher.publish("a", 1)
    publisher.process.kill()
    await publisher.ended()
    with pytest.raises(DiptychError, match="peer lost"):
        await reader.read(publisher.ref, handle, deadline_s=DEADLINE_S)
    await until_free(reader)


async def test_idle_sleeps_on_the_transports_events(publisher: Publisher, reader: Transfer) -> None:
    """The sweep's ticks and UCX's keepalive; spinning takes tens of thousands."""
    reader.finish(await reader.read(publisher.ref, await publisher.publish("a", 1), deadline_s=DEADLINE_S))
    await comes_to_rest(reader, turns_a_second=100)


@NEEDS_IPV6
async def test_over_ipv6() -> None:
    """Issue 15, 4.12: only IPv4 was known; where an interface has both, UCX took that."""
    config = TransferConfig(transport="ucx", num_slabs=8, require_transport="ucx:tcp", host="::1")
    transfer = build_transfer(
        config, worker_id="d0", incarnation="x", reads=True, layout_hash=7, loop=asyncio.get_running_loop()
    )
    child = await Publisher.start(host="::1")
    try:
        handle = await child.publish("a", 3)
        received = await transfer.read(child.ref, handle, deadline_s=DEADLINE_S)
        expected = np.random.default_rng(3).integers(0, 256, SIZE, np.uint8)
        assert np.array_equal(np.frombuffer(received.payload, np.uint8), expected)
        transfer.finish(received)
        assert child.ref.address.host == "::1"
        sockets = [
            connection.laddr.ip
            for connection in psutil.Process(child.process.pid).net_connections("tcp")
            if connection.status in (psutil.CONN_ESTABLISHED, psutil.CONN_LISTEN)
        ]
        assert set(sockets) == {"::1"}, sockets
    finally:
        await child.stop()
        await transfer.close()
