"""A publisher and a reader of KV in device memory, with their threads, in this process."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import numpy as np

from diptych.engine.messages import DeviceRange, RangePacked
from diptych.kernels.kv_sum import kv_sum
from diptych.kvtransfer.api import PeerRef
from diptych.kvtransfer.config import TransferConfig
from diptych.kvtransfer.fabric.transport import Transport
from diptych.kvtransfer.gpu.ring import GpuRing
from diptych.kvtransfer.slabs.layout import SlabQuotas
from diptych.kvtransfer.thread import TransferThread
from diptych_tests import waiting


class DevicePair:
    """`transport` ("p0", "life") publishes from `ring`, `reads` ("d0", "x") reads into `reader_ring`."""

    def __init__(self, transport: Transport, ring: GpuRing, reads: Transport, reader_ring: GpuRing) -> None:
        loop = asyncio.get_running_loop()
        self.transport, self.reads = transport, reads
        self.num_slabs = num_slabs = ring.spec.num_slabs
        config = TransferConfig(transport="inproc", slab_bytes=ring.spec.slab_bytes, num_slabs=num_slabs)
        common: dict[str, Any] = {"layout_hash": 7, "num_layers": 1, "bytes_per_s": 1e9, "loop": loop}
        self.publisher = TransferThread(
            transport, config, worker_id="p0", incarnation="life", quotas=SlabQuotas(num_slabs, 0), ring=ring, **common
        )
        self.reader = TransferThread(
            reads, config, worker_id="d0", incarnation="x", quotas=SlabQuotas(0, num_slabs), ring=reader_ring, **common
        )
        self.ref = PeerRef("p0", "life", self.publisher.address)
        self.grants: asyncio.Queue[Any] = asyncio.Queue()
        self.settled: list[tuple[str, int]] = []
        self.publisher.start(
            lambda grants: loop.call_soon_threadsafe(lambda: [self.grants.put_nowait(g) for g in grants]),
            lambda attempt, slab: self.settled.append((attempt, slab)),
        )

    async def publish(self, attempt: str, data: np.ndarray) -> Any:
        grant = await asyncio.wait_for(self.grants.get(), 60)
        ctypes.memmove(grant.payload.address, data.ctypes.data, data.nbytes)
        packed = RangePacked(attempt, grant.slab, grant.generation, 0, 1, data.nbytes, kv_sum(data))
        return self.publisher.publish("d0@x", packed)

    async def read(self, handle: Any) -> Any:
        return await self.reader.read(self.ref, handle, deadline_s=300.0)

    async def slabs(self) -> Any:
        audit = await self.publisher.audit(full=True)
        assert not audit.violations
        return audit.slabs

    async def all_free(self) -> None:
        async def free() -> bool:
            audits = [await side.audit(full=True) for side in (self.publisher, self.reader)]
            assert not any(audit.violations for audit in audits)
            return all(audit.slabs.free == self.num_slabs for audit in audits)

        await waiting.until(free)

    async def close(self) -> None:
        await self.reader.close()
        await self.publisher.close()


def noise(seed: int, size: int = 4096) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def data_at(payload: Any) -> np.ndarray:
    assert isinstance(payload, DeviceRange)
    return np.frombuffer(ctypes.string_at(payload.address, payload.nbytes), np.uint8)
