"""Two real processes over real UCX on loopback: this one reads, a child publishes; and what happens when it dies."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.common.errors import DiptychError, StaleReferenceError, TransferError
from diptych.kvtransfer.api import KvAddress, PeerRef, SlabCounts, Transfer
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.handle import SlabHandle, decode

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
SCRIPT = Path(__file__).with_name("kvtransfer_publisher.py")
SIZE = 3 << 20
ALREADY_SET = {name for name in os.environ if name.startswith("UCX_")}
# What NIXL's side sets for good, where it has run in this process: how loud UCX is, never which path it takes.
LOUDNESS = {"UCX_WARN_UNUSED_ENV_VARS", "UCX_LOG_LEVEL"}


def all_stopped(pid: int) -> bool:
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


class Publisher:
    def __init__(self, process: asyncio.subprocess.Process, hello: dict[str, object], ref: tuple[str, str]) -> None:
        self.process = process
        self.path = hello["path"]
        address = KvAddress("ucx", str(hello["host"]), 0, bytes.fromhex(str(hello["blob"])))
        self.ref = PeerRef(*ref, address)

    @classmethod
    async def start(
        cls, incarnation: str = "life1", worker_id: str = "p0", inside: tuple[str, ...] = (), **options: object
    ) -> Publisher:
        """`inside`: a command that runs its arguments somewhere else, for example in another namespace."""
        arguments = json.dumps([worker_id, incarnation, {"transport": "ucx", "num_slabs": 8, **options}])
        process = await asyncio.create_subprocess_exec(
            *inside, sys.executable, str(SCRIPT), arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        hello = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        return cls(process, hello, (worker_id, incarnation))

    async def ask(self, line: str) -> dict[str, object]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line.encode() + b"\n")
        answer: dict[str, object] = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 10))
        return answer

    async def publish(self, attempt: str, seed: int, size: int = SIZE) -> SlabHandle:
        return decode(bytes.fromhex(str((await self.ask(f"publish {attempt} {size} {seed}"))["handle"])))

    async def counts(self) -> SlabCounts:
        answer = await self.ask("audit")
        assert not answer["violations"]
        return SlabCounts(**answer["slabs"])  # type: ignore[arg-type]

    async def freeze(self) -> None:
        """SIGSTOP, and wait until every thread of it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(5):
            while not all_stopped(self.process.pid):  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), 10)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
                raise


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    child = await Publisher.start()
    yield child
    await child.stop()


@pytest.fixture
async def reader() -> AsyncIterator[Transfer]:
    config = TransferConfig(transport="ucx", num_slabs=8, require_transport="ucx:tcp")
    transfer = build_transfer(
        config, worker_id="d0", incarnation="x", role="decode", layout_hash=7, loop=asyncio.get_running_loop()
    )
    yield transfer
    await transfer.close()


async def until_free(transfer: Transfer, within_s: float) -> None:
    limit = time.monotonic() + within_s
    while (audit := await transfer.audit(full=True)).slabs.free != audit.slabs.total:
        assert not audit.violations
        assert time.monotonic() < limit, f"slabs did not come back: {audit.slabs}"
        await asyncio.sleep(0.02)
    assert not audit.violations


async def test_what_ucxx_chooses_is_not_inherited_by_children(reader: Transfer) -> None:
    """NIXL's UCX in a child would take another path with it."""
    left = {name for name in os.environ if name.startswith("UCX_")}
    assert "ucxx" in sys.modules
    assert left <= ALREADY_SET | LOUDNESS
    assert 0.0 < reader.message_s < 0.5


async def test_fifty_slabs_arrive_intact_and_every_slab_comes_back(publisher: Publisher, reader: Transfer) -> None:
    for seed in range(50):
        size = SIZE if seed % 5 else 1 + seed * 7
        received = await reader.read(publisher.ref, await publisher.publish("a", seed, size), deadline_s=10)
        expected = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        assert np.array_equal(np.frombuffer(received.payload, np.uint8), expected)
        reader.finish(received)
    await until_free(reader, 2)
    await asyncio.sleep(0.1)
    assert (await publisher.counts()).free == 8
    assert publisher.path == "ucx:tcp"


async def test_a_handle_is_read_once_and_a_forged_one_never(publisher: Publisher, reader: Transfer) -> None:
    handle = await publisher.publish("a", 1)
    with pytest.raises(TransferError, match="FORGED"):
        await reader.read(publisher.ref, replace(handle, attempt="b"), deadline_s=10)
    received = await reader.read(publisher.ref, handle, deadline_s=10)
    with pytest.raises(StaleReferenceError, match="USED"):
        await reader.read(publisher.ref, handle, deadline_s=10)
    reader.finish(received)
    await until_free(reader, 2)


@pytest.mark.parametrize("connected", [True, False])
async def test_killed_publisher_fails_all_its_reads_at_once(
    publisher: Publisher, reader: Transfer, connected: bool
) -> None:
    if connected:
        reader.finish(await reader.read(publisher.ref, await publisher.publish("a", 9), deadline_s=10))
    handles = [await publisher.publish("a", seed) for seed in range(4)]
    await publisher.freeze()  # so that the kill comes in the middle of the reads
    reads = [asyncio.create_task(reader.read(publisher.ref, handle, deadline_s=30)) for handle in handles]
    await asyncio.sleep(0.3)
    start = time.monotonic()
    publisher.process.kill()
    results = await asyncio.gather(*reads, return_exceptions=True)
    assert time.monotonic() - start < 3
    assert all(isinstance(result, TransferError) and "peer lost" in str(result) for result in results), results
    await until_free(reader, 2)


async def test_one_peer_killed_another_stopped_only_the_dead_ones_reads_end(
    publisher: Publisher, reader: Transfer
) -> None:
    other = await Publisher.start(worker_id="p1")
    try:
        slow_handle, lost_handle = await other.publish("a", 1), await publisher.publish("a", 2)
        for child in (other, publisher):
            reader.finish(await reader.read(child.ref, await child.publish("a", 9), deadline_s=10))
            await child.freeze()
        slow = asyncio.create_task(reader.read(other.ref, slow_handle, deadline_s=30))
        lost = asyncio.create_task(reader.read(publisher.ref, lost_handle, deadline_s=30))
        await asyncio.sleep(0.2)
        publisher.process.kill()
        with pytest.raises(TransferError, match="peer lost"):
            await asyncio.wait_for(lost, 3)
        await asyncio.sleep(0.2)
        assert not slow.done()
        other.process.send_signal(signal.SIGCONT)
        received = await asyncio.wait_for(slow, 10)
        assert np.array_equal(
            np.frombuffer(received.payload, np.uint8), np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
        )
        reader.finish(received)
    finally:
        await other.stop()


async def test_stopped_publisher_deadline_quarantine_and_return(publisher: Publisher, reader: Transfer) -> None:
    first = await reader.read(publisher.ref, await publisher.publish("a", 0), deadline_s=10)
    reader.finish(first)
    handle = await publisher.publish("a", 1)
    await publisher.freeze()
    start = time.monotonic()
    with pytest.raises(TransferError, match="deadline"):
        await reader.read(publisher.ref, handle, deadline_s=0.5)
    assert time.monotonic() - start < 1.5
    assert (await reader.audit(full=True)).slabs.quarantined == 1
    publisher.process.send_signal(signal.SIGCONT)
    await until_free(reader, 5)
    received = await reader.read(publisher.ref, await publisher.publish("a", 2), deadline_s=10)
    reader.finish(received)


async def test_forget_closes_the_endpoint_to_a_stopped_publisher(publisher: Publisher, reader: Transfer) -> None:
    handle = await publisher.publish("a", 1)
    await publisher.freeze()
    with pytest.raises(TransferError, match="deadline"):
        await reader.read(publisher.ref, handle, deadline_s=0.3)
    await reader.forget(publisher.ref)
    await until_free(reader, 2)
    publisher.process.send_signal(signal.SIGCONT)
    received = await reader.read(publisher.ref, await publisher.publish("b", 2), deadline_s=10)
    reader.finish(received)


async def test_a_publisher_that_started_again_is_a_new_peer(reader: Transfer) -> None:
    old = await Publisher.start("life1")
    handle = await old.publish("a", 1)
    reader.finish(await reader.read(old.ref, await old.publish("a", 2), deadline_s=10))
    old.process.kill()
    await old.process.wait()
    new = await Publisher.start("life2")
    try:
        with pytest.raises(StaleReferenceError):
            await reader.read(new.ref, handle, deadline_s=5)
        received = await reader.read(new.ref, await new.publish("a", 3), deadline_s=10)
        reader.finish(received)
        await until_free(reader, 2)
    finally:
        await new.stop()


async def test_lease_ends_with_no_new_work_arriving() -> None:
    publisher = await Publisher.start(lease_s=1.0)
    try:
        await publisher.publish("a", 1)
        assert (await publisher.counts()).packed == 1
        await asyncio.sleep(1.5)
        assert (await publisher.counts()).free == 8
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
            with socket.create_connection((host, port), timeout=2) as sock:
                sock.sendall(garbage)
    received = await reader.read(publisher.ref, await publisher.publish("a", 5), deadline_s=10)
    reader.finish(received)
    assert (await publisher.counts()).total == 8


async def test_unreachable_address_fails_fast(publisher: Publisher, reader: Transfer) -> None:
    handle = await publisher.publish("a", 1)
    publisher.process.kill()
    await publisher.process.wait()
    with pytest.raises(DiptychError, match="peer lost"):
        await reader.read(publisher.ref, handle, deadline_s=10)
    await until_free(reader, 2)


async def turns_in_a_second(reader: Any) -> int:
    """How often the transfer thread comes round while nothing happens."""
    turns, turn = [], reader.turn
    reader.turn = lambda: turns.append(None) or turn()
    try:
        await asyncio.sleep(1)
    finally:
        reader.turn = turn
    return len(turns)


async def test_idle_sleeps_on_the_transports_events(publisher: Publisher, reader: Transfer) -> None:
    reader.finish(await reader.read(publisher.ref, await publisher.publish("a", 1), deadline_s=10))
    await asyncio.sleep(0.2)
    assert (
        await turns_in_a_second(reader) <= 100
    )  # the sweep's ticks and UCX's keepalive; spinning takes tens of thousands
