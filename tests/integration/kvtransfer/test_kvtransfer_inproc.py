"""Two Transfers of one process with real transfer threads: the doors as prefill and decode use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import xxhash

from diptych.common.clock import MonotonicClock
from diptych.common.errors import ConfigError, InternalError, StaleReferenceError, TransferError
from diptych.engine.messages import EngineStats, RangePacked, SlabGrant
from diptych.kvtransfer.api import PeerRef, Transfer
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.kvtransfer.wrappers.ciphers import CIPHERS
from diptych.kvtransfer.wrappers.faults import FaultSpec
from diptych.worker.metrics import WorkerMetrics
from diptych_tests import waiting

DEADLINE_S = waiting.DEADLINE_S


class Desk:
    """A prefill and a decode Transfer, and the step thread's grants."""

    def __init__(self, faults: FaultSpec | None = None, verify_checksum: bool = True, **options: object) -> None:
        loop = asyncio.get_running_loop()
        base = {"transport": "inproc", "slab_bytes": 8192, "num_slabs": 3, "lease_s": 10 * DEADLINE_S, **options}

        def build(worker_id: str, role: dict[str, bool], **more: object) -> Transfer:
            config = TransferConfig(**base, **more)  # type: ignore[arg-type]
            return build_transfer(
                config, worker_id=worker_id, incarnation="i", layout_hash=7, loop=loop, encryption_key=bytes(32), **role
            )

        self.p = build("p0", {"publishes": True})
        self.d = build("d0", {"reads": True}, faults=faults or FaultSpec(), verify_checksum=verify_checksum)
        self.ref = PeerRef("p0", "i", self.p.address)
        self.grants: asyncio.Queue[SlabGrant] = asyncio.Queue()
        self.settled: list[tuple[str, int]] = []
        self.p.start(
            lambda grants: [loop.call_soon_threadsafe(self.grants.put_nowait, g) for g in grants] and None,
            lambda attempt, slab: self.settled.append((attempt, slab)),
        )

    async def publish(self, fill: int = 1, size: int = 5000, attempt: str = "att") -> SlabHandle:
        grant = await asyncio.wait_for(self.grants.get(), DEADLINE_S)
        grant.payload[:size] = bytes([fill]) * size
        digest = xxhash.xxh3_64_intdigest(grant.payload[:size])
        return self.p.publish("d0", RangePacked(attempt, grant.slab, grant.generation, 0, 16, size, digest))

    async def all_free(self) -> None:
        async def free() -> bool:
            audits = [await side.audit(full=True) for side in (self.p, self.d)]
            assert not any(audit.violations for audit in audits)
            return all(audit.slabs.free == audit.slabs.total for audit in audits)

        await waiting.until(free, "slabs come back")

    async def in_flight(self) -> None:
        """Until a read has been sent."""

        async def sent() -> bool:
            return (await self.d.audit()).slabs.in_flight == 1

        await waiting.until(sent, "a read is in flight")


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    yield made
    await made.all_free()
    await made.d.close()
    await made.p.close()


async def test_many_slabs_at_once_wait_for_their_turn(desk):
    async def one(fill: int) -> None:
        received = await desk.d.read(desk.ref, await desk.publish(fill), deadline_s=DEADLINE_S)
        assert bytes(received.payload) == bytes([fill]) * 5000
        desk.d.finish(received)

    await asyncio.gather(*(one(fill) for fill in range(40)))
    await desk.all_free()
    assert len(desk.settled) == 40


async def test_a_request_whose_lease_ends_is_counted_in_the_metrics():
    desk = Desk(lease_s=0.05)
    metrics = WorkerMetrics("prefill", stats=EngineStats, clock=MonotonicClock())
    metrics.begin(desk.p, asyncio.get_running_loop())
    name = "diptych_kv_expired_requests_total"
    try:
        assert await asyncio.to_thread(metrics.registry.get_sample_value, name) == 0
        await desk.publish(1)
        await desk.publish(2)  # of the same request, whether or not the first lease has ended by now
        await desk.all_free()  # nobody reads them
        assert await asyncio.to_thread(metrics.registry.get_sample_value, name) == 1
    finally:
        await desk.d.close()
        await desk.p.close()


async def test_finish_twice_is_once(desk):
    received = await desk.d.read(desk.ref, await desk.publish(), deadline_s=DEADLINE_S)
    desk.d.finish(received)
    again = await desk.d.read(desk.ref, await desk.publish(2), deadline_s=DEADLINE_S)
    desk.d.finish(received)
    assert bytes(again.payload) == b"\2" * 5000
    assert (await desk.d.audit()).slabs.settled == 1
    desk.d.finish(again)


async def test_a_cancelled_read_leaves_nothing(desk):
    desk.d._transport.hold("receive")
    task = asyncio.create_task(desk.d.read(desk.ref, await desk.publish(), deadline_s=DEADLINE_S))
    await desk.in_flight()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await desk.d.audit()).slabs.quarantined == 1
    desk.d._transport.release("receive")


async def test_a_deadline_holds_while_the_answer_is_held(desk):
    desk.d._transport.hold("receive")
    with pytest.raises(TransferError, match="deadline"):
        await desk.d.read(desk.ref, await desk.publish(), deadline_s=0.1)
    desk.d._transport.release("receive")


async def test_publish_of_what_is_not_granted(desk):
    handle = await desk.publish()
    with pytest.raises(StaleReferenceError):
        desk.p.publish("d0", RangePacked("att", handle.slab, handle.generation, 0, 16, 100, 5))
    grant = await desk.grants.get()
    with pytest.raises(TransferError, match="fit"):
        desk.p.publish("d0", RangePacked("att", grant.slab, grant.generation, 0, 16, 8192, 5))
    desk.p.return_grant(grant.slab)
    desk.p.return_grant(grant.slab)
    desk.p.release("att")
    desk.p.release("att")
    with pytest.raises(StaleReferenceError):
        await desk.d.read(desk.ref, handle, deadline_s=DEADLINE_S)


async def test_each_role_has_its_own_methods(desk):
    with pytest.raises(InternalError):
        desk.d.release("att")
    with pytest.raises(InternalError):
        await desk.p.read(desk.ref, None, deadline_s=1)


async def test_close_fails_what_waits_and_is_idempotent():
    desk = Desk()
    desk.d._transport.hold("receive")
    task = asyncio.create_task(desk.d.read(desk.ref, await desk.publish(), deadline_s=DEADLINE_S))
    await desk.in_flight()
    await desk.d.close()
    await desk.d.close()
    with pytest.raises(TransferError, match="clos"):
        await task
    with pytest.raises(TransferError, match="closed"):
        await desk.d.read(desk.ref, await desk.publish(), deadline_s=DEADLINE_S)
    await desk.p.close()


@pytest.mark.parametrize("verify", [True, False])
async def test_corruption_from_start_up_is_caught_unless_the_check_is_off(verify):
    desk = Desk(faults=FaultSpec(corrupt_every=1), verify_checksum=verify)
    handle = await desk.publish()
    if verify:
        with pytest.raises(TransferError, match="checksum"):
            await desk.d.read(desk.ref, handle, deadline_s=DEADLINE_S)
    else:
        received = await desk.d.read(desk.ref, handle, deadline_s=DEADLINE_S)
        assert sum(byte != 1 for byte in received.payload) == 1
        desk.d.finish(received)
    await desk.all_free()
    await desk.d.close()
    await desk.p.close()


async def test_a_bug_on_the_thread_shows_in_the_audit_and_does_not_end_it():
    desk = Desk()
    desk.d._post(lambda now: 1 // 0)
    assert "ZeroDivisionError" in str((await desk.d.audit()).violations)
    received = await desk.d.read(desk.ref, await desk.publish(), deadline_s=DEADLINE_S)
    desk.d.finish(received)
    await desk.d.close()
    await desk.p.close()


@pytest.mark.parametrize("cipher", CIPHERS)
async def test_encrypted_slabs_arrive_and_one_that_was_changed_is_a_typed_error(cipher):
    """The fault is beneath the encryption, as on a wire."""
    desk = Desk(FaultSpec(corrupt_every=3), kv_encryption=cipher)
    try:
        for fill in (1, 2):
            received = await desk.d.read(desk.ref, await desk.publish(fill), deadline_s=DEADLINE_S)
            assert bytes(received.payload) == bytes([fill]) * 5000
            desk.d.finish(received)
        with pytest.raises(TransferError, match=f"damaged: its {cipher} tag does not fit"):
            await desk.d.read(desk.ref, await desk.publish(3), deadline_s=DEADLINE_S)
        handle = await desk.publish(4)
        with pytest.raises(TransferError, match="FORGED"):
            await desk.d.read(desk.ref, replace(handle, num_tokens=32), deadline_s=DEADLINE_S)
        desk.p.release("att")
        await desk.all_free()
    finally:
        await desk.d.close()
        await desk.p.close()


async def test_one_that_does_not_encrypt_gets_nothing_from_one_that_does():
    """The handshake refuses such a pair; this is what the wire does without it."""
    desk = Desk(kv_encryption=CIPHERS[0])
    other = Desk()
    try:
        handle = await desk.publish()
        with pytest.raises(TransferError, match="MALFORMED"):
            await other.d.read(desk.ref, handle, deadline_s=DEADLINE_S)
        desk.p.release("att")
        await desk.all_free()
    finally:
        for side in (desk.d, desk.p, other.d, other.p):
            await side.close()


async def test_it_needs_the_cluster_secret():
    with pytest.raises(ConfigError, match="secret_file"):
        build_transfer(
            TransferConfig(transport="inproc", kv_encryption=CIPHERS[0]),
            worker_id="d0", incarnation="i", reads=True, layout_hash=7, loop=asyncio.get_running_loop(),
        )  # fmt: skip
