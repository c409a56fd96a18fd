"""Around the hand-off: health follows the engine, the lease and the cache events, the Worker service."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.cli.worker_roles import services_of
from diptych.common.block_identity import block_keys
from diptych.common.clock import MonotonicClock
from diptych.common.errors import ConfigError
from diptych.common.store.memory import MemoryStore
from diptych.engine.runner import OutOfDeviceMemory
from diptych.rpc.channels import open_channel
from diptych.rpc.stubs import WorkerStub
from diptych.rpc.v1 import worker_pb2
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health_becomes(address: str, wanted: int) -> None:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "diptych.rpc.v1.Decode"):
            request = health_pb2.HealthCheckRequest(service=service)

            async def wanted_status(request: object = request) -> bool:
                return (await stub.Check(request)).status == wanted

            await waiting.until(wanted_status)


async def test_health_is_lost_while_a_step_stalls_and_comes_back(pd: ModuleType) -> None:
    stuck, release = threading.Event(), threading.Event()

    def stall(seqs: object) -> None:
        if stuck.is_set():
            release.wait(300)

    model = lambda: pd.fake_model(before_execute=stall)  # noqa: E731
    config = {"stall_bound_s": 0.2}
    async with (
        pd.cluster(num_prefill=0, decode=model, decode_config=config) as alone,
        pd.FakeRouter(alone.decode.address) as router,
    ):
        await health_becomes(alone.decode.address, SERVING)
        stuck.set()
        answer = router.submit(alone.submit_message(attempt="a", prompt=[1, 2, 3]))
        await health_becomes(alone.decode.address, NOT_SERVING)
        assert alone.decode.record().state == "stalled"
        stuck.clear()
        release.set()
        await router.ended("a")
        assert answer.finished is not None
        await health_becomes(alone.decode.address, SERVING)


async def test_a_start_without_memory_for_a_first_step_names_the_setting_and_leaves_nothing(pd: ModuleType) -> None:
    """As when another process takes memory of the GPU between the sizing of the pool and the warm-up."""

    def no_room(seqs: object) -> None:
        raise OutOfDeviceMemory("tried to allocate 4 GiB")

    config = pd.worker_config("decode", "decode-0", gpu_memory_utilization=0.5)
    model = pd.fake_model(before_execute=no_room)
    worker = WorkerRuntime(config, model, make_transfer=make_transfer, make_services=services_of)
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization=0.5: a first step failed: the GPU's memory is used up"
    ):
        await worker.start()
    await worker.close()  # as `serve` does
    assert not worker.engine._thread._thread.is_alive()


async def test_lease_events_and_dump_agree(pd: ModuleType) -> None:
    store = MemoryStore(MonotonicClock())
    model = pd.fake_model()
    config = pd.worker_config("decode", "decode-0", heartbeat_s=0.05, lease_s=600.0)
    worker = WorkerRuntime(config, model, make_transfer=make_transfer, make_services=services_of, store=store)
    await worker.start()
    try:
        alone = pd.Cluster(worker, [])
        prompt = list(range(1, 41))
        async with pd.FakeRouter(worker.address) as router:
            answer = await router.run(alone.submit_message(attempt="a", prompt=prompt, max_tokens=2))
        keys = block_keys(model.identity, [*prompt, *answer.token_ids])
        events = []

        async def stored() -> bool:
            found = (await store.read_events({"decode-0": "0"}, block_s=0.0)).get("decode-0", [])
            events[:] = [event for _, event in found]
            return any(event.kind == "stored" for event in events)

        await waiting.until(stored)
        assert (events[0].kind, events[0].sequence) == ("cleared", 0)
        assert [event.sequence for event in events[1:]] == list(range(1, len(events)))
        assert [key for event in events for key in event.keys] == keys[:2]
        (record,) = await store.list_workers()
        assert (record.role, record.state, record.address) == ("decode", "ready", worker.address)
        assert record.compat["block_identity_golden"] == model.compat.block_identity_golden.hex()
        assert record.event_epoch == events[0].epoch
        async with pd.worker_channel(worker.address) as channel:
            parts = [
                part async for part in WorkerStub(channel).DumpBlocks(worker_pb2.DumpBlocksRequest(), timeout=300.0)
            ]
        device = [tier for part in parts for tier in part.tiers if tier.tier == "device"]
        assert b"".join(tier.block_keys for tier in device) == b"".join(keys[:2])
        assert (parts[0].epoch, device[0].sequence) == (events[-1].epoch, events[-1].sequence)
        info = await pd.get_info(worker)
        assert (info.worker_id, info.incarnation, info.transport_path) == ("decode-0", worker.incarnation, "inproc")
    finally:
        await worker.close()
    assert await store.list_workers() == []
