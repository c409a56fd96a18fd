"""Prefill and decode on two hosts (two network namespaces): partitioned, healed, and addresses of the wrong host.

The partition drops every packet and breaks no connection; reads in flight complete, if ever, into unused
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from diptych.cli.worker_roles import services_of
from diptych.common.errors import DiptychError, TransferError, WorkerLostError
from diptych.kvtransfer.build import build_transfer
from diptych.kvtransfer.config import TransferConfig
from diptych.rpc.v1 import router_pb2
from diptych.worker.process import make_transfer
from diptych.worker.runtime import WorkerRuntime
from diptych_tests import waiting
from diptych_tests.pd import PROMPT, undisturbed
from diptych_tests.prefill import Prefill
from diptych_tests.publisher import Publisher, until_free

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.netns,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
FAIL = router_pb2.FAILURE_POLICY_FAIL
SILENCE_S, SLAB_LEASE_S = 2.0, 5.0
HEALED_S = 120.0
"""Deadline of what takes seconds on an idle machine."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class OtherHost:
    """A network namespace behind a pair of virtual interfaces."""

    def __init__(self, number: int) -> None:
        self.name = f"dpt{number:x}"
        self.here, self.there = f"10.{number >> 8}.{number & 255}.1", f"10.{number >> 8}.{number & 255}.2"
        ip("netns", "add", self.name)
        ip("link", "add", f"{self.name}a", "type", "veth", "peer", "name", f"{self.name}b", "netns", self.name)
        ip("addr", "add", f"{self.here}/24", "dev", f"{self.name}a")
        ip("link", "set", f"{self.name}a", "up")
        for words in (
            ("addr", "add", f"{self.there}/24", "dev", f"{self.name}b"),
            ("link", "set", f"{self.name}b", "up"),
        ):
            ip("-n", self.name, *words)
        ip("-n", self.name, "link", "set", "lo", "up")

    def cut(self) -> None:
        ip("-n", self.name, "link", "set", f"{self.name}b", "down")

    def heal(self) -> None:
        ip("-n", self.name, "link", "set", f"{self.name}b", "up")

    def close(self) -> None:
        ip("netns", "del", self.name)


@pytest.fixture(scope="module")
def host() -> Iterator[OtherHost]:
    """One for all tests: UCX reads the routes once per process, so an interface must exist before its first use."""
    try:
        other = OtherHost(100 * 256 + os.getpid() % 250)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield other
    other.close()


@asynccontextmanager
async def pair(pd: ModuleType, host: OtherHost, **prefill: object) -> AsyncIterator[tuple[Any, Any]]:
    """Prefill over there, decode here."""
    bounds = {"leg_silence_s": SILENCE_S, "slab_lease_s": SLAB_LEASE_S}
    inside = ("ip", "netns", "exec", host.name)
    async with AsyncExitStack() as stack:
        child = await Prefill.start("prefill-0", inside=inside, host=host.there, **bounds, **prefill)
        stack.push_async_callback(child.stop)
        config = pd.worker_config("decode", "decode-0", transport="ucx", host=host.here, **bounds)
        decode = WorkerRuntime(config, pd.fake_model(), make_transfer=make_transfer, make_services=services_of)
        await decode.start()
        stack.push_async_callback(decode.close)
        yield pd.Cluster(decode, []), child


async def test_a_partition_ends_the_remote_prefill_and_heals_by_itself(pd: ModuleType, host: OtherHost) -> None:
    tokens = await undisturbed({})
    async with pair(pd, host) as (cluster, child), pd.FakeRouter(cluster.decode.address) as router:
        first = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, prefill=[child]))
        assert first.token_ids == tokens
        assert first.explanation.prefill == "prefill-0"
        assert first.explanation.transport == "ucx:tcp"
        await cluster.decode.engine.reset_cache()

        await child.hold(2)
        answer = router.submit(cluster.submit_message(attempt="b", prompt=PROMPT[::-1], prefill=[child]))
        await child.held()
        host.cut()
        await router.ended("b")
        assert answer.error is None
        assert answer.explanation.local_prefill
        assert "sent nothing" in answer.explanation.notes[0]
        failed = await router.run(
            cluster.submit_message(attempt="c", prompt=PROMPT[::-1], prefill=[child], policy=FAIL)
        )
        assert isinstance(failed.error, WorkerLostError)

        host.heal()
        await child.ask("go")
        again = None
        number = 0
        async with asyncio.timeout(HEALED_S):
            while again is None or again.explanation.local_prefill:
                number += 1
                await cluster.decode.engine.reset_cache()
                again = await router.run(cluster.submit_message(attempt=f"d{number}", prompt=PROMPT, prefill=[child]))
                assert again.token_ids == tokens, "something of before the partition landed where it must not"
        await cluster.nothing_left()


def bytes_of(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


async def test_what_lands_when_a_partition_heals_lands_in_nothing_that_is_used(host: OtherHost) -> None:
    """A read that fails in a partition leaves its slab in quarantine. All others are then filled from a worker of this host and
    held; the partition heals, the answer lands, and the others' bytes are what they were."""
    size = 3 << 20
    config = TransferConfig(transport="ucx", num_slabs=4, peer_quota=3, host=host.here, lease_s=600.0)
    reader = build_transfer(
        config, worker_id="d0", incarnation="x", reads=True, layout_hash=7, loop=asyncio.get_running_loop()
    )
    inside = ("ip", "netns", "exec", host.name)
    there = await Publisher.start("life1", "p-there", inside=inside, host=host.there, lease_s=600.0)
    near = await Publisher.start("life1", "p-here", host=host.here)
    try:
        reader.finish(await reader.read(there.ref, await there.publish("a", 0), deadline_s=HEALED_S))
        reader.finish(await reader.read(near.ref, await near.publish("b", 0), deadline_s=HEALED_S))
        handle = await there.publish("a", 1, size)
        host.cut()
        with pytest.raises(TransferError, match="deadline"):
            await reader.read(there.ref, handle, deadline_s=0.5)
        held = [
            await reader.read(near.ref, await near.publish("b", seed, size), deadline_s=HEALED_S) for seed in (2, 3, 4)
        ]
        counts = (await reader.audit(full=True)).slabs
        assert (counts.quarantined, counts.settled, counts.free) == (1, 3, 0)
        before = reader.bytes_per_s
        host.heal()

        async def landed() -> bool:
            audit = await reader.audit(full=True)
            assert not audit.violations
            return not audit.slabs.quarantined

        await waiting.until(landed, "the answer of before the partition lands", deadline_s=HEALED_S)
        assert reader.bytes_per_s == before, "what landed late counts for nothing"
        for seed, slab in zip((2, 3, 4), held, strict=True):
            assert np.array_equal(np.frombuffer(slab.payload, np.uint8), bytes_of(seed, size))
            reader.finish(slab)
        again = await reader.read(there.ref, await there.publish("a", 5, size), deadline_s=HEALED_S)
        assert np.array_equal(np.frombuffer(again.payload, np.uint8), bytes_of(5, size))
        reader.finish(again)
        await until_free(reader)
    finally:
        await there.stop()
        await near.stop()
        await reader.close()


async def test_a_loopback_address_is_refused_by_a_reader_on_another_host(pd: ModuleType, host: OtherHost) -> None:
    """The gRPC server is reachable, the KV address is not: decode reports it instead of reading from its own host."""
    async with pair(pd, host) as (cluster, child), pd.FakeRouter(cluster.decode.address) as router:
        directory = cluster.decode.role.services["decode"]._reading.peers
        check = directory._check

        def wrong(ref: Any, info: Any) -> Any:
            info.kv_address.host = "127.0.0.1"
            return check(ref, info)

        directory._check = wrong
        answer = await router.run(cluster.submit_message(attempt="a", prompt=PROMPT, prefill=[child], policy=FAIL))
        assert isinstance(answer.error, DiptychError)
        assert "loopback address 127.0.0.1" in answer.error.message
        await cluster.nothing_left()
