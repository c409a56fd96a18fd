"""UCX from GPU memory to GPU memory: over NVLink within a host (cuda_ipc), over RDMA between hosts where the NIC can.

    decode                                             prefill
    READ(token, connection, read_id, handle) ------->  RequestArrived
                 <------- tag_send(DATA | read_id): header and trailer, or a header that refuses
    tag_recv(PAYLOAD | read_id) into our slab
                 <------- tag_send(PAYLOAD | read_id): out of prefill's slab, both in GPU memory
    ReceiveDone: the step thread's kernel moves the slab into the request's blocks, and sums it

Everything else is UcxTransport's. Rings are allocations of their own, so that UCX registers each once, with its first message.

UCX takes a path through host memory where it finds no direct one, 400 times slower and without a word. So the self-test times
a transfer between two processes, and a peer's second large payload is timed (the first one pays for mapping its memory): below
SLOW_BYTES_PER_S the path is called `ucx-gpu:staged`, loudly, and a peer on another path than the required one is refused.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from diptych.common.errors import TransferError
from diptych.kvtransfer.fabric.registry import Make, TransportSite, TransportSpec, gpu_ring, register
from diptych.kvtransfer.fabric.self_test import SelfTest
from diptych.kvtransfer.fabric.transport import ReceiveDone, TransportEvent, Wakeup, sleep_on
from diptych.kvtransfer.fabric.ucx_gpu_probe import run_ucx_gpu_self_test
from diptych.kvtransfer.gpu.memory import DeviceMemory
from diptych.kvtransfer.gpu.path import DIRECT, path_of
from diptych.kvtransfer.gpu.ring import GpuRing
from diptych.kvtransfer.slabs.layout import HEADER_BYTES, TRAILER_BYTES, Ring, read_refusal
from diptych.kvtransfer.transports.ucx import _TAG_DATA, UcxTransport, _Endpoint, _Pending

log = logging.getLogger(__name__)

TELLING_BYTES = 4 << 20
"""A smaller payload does not show its path: it is bound by latency."""
_POLL_S = 0.00005
_TAG_PAYLOAD = 0x4452 << 48
_FRAME_BYTES = HEADER_BYTES + TRAILER_BYTES


@dataclass(slots=True)
class _Reading:
    endpoint: _Endpoint
    dest: np.ndarray
    frame: np.ndarray
    began: float = 0.0
    """When the payload was asked for; 0: its frame has not come."""


class UcxGpuTransport(UcxTransport):
    """See transport.Transport. Its ring is a GpuRing with memory of its own on both sides.

    Args:
        require_path: DIRECT or STAGED: peers on another one are dropped; empty: none are.
    """

    name = "ucx-gpu"
    default_tls = "cuda_ipc,cuda_copy,tcp,self"

    def __init__(
        self, worker_id: str, incarnation: str, *, host: str, memory: DeviceMemory, require_path: str = ""
    ) -> None:
        self._memory, self._require = memory, require_path
        self._bound = False
        self._gpu_ring: GpuRing | None = None
        self._readings: dict[int, _Reading] = {}
        self._large: dict[str, int] = {}
        """Peer -> large payloads that have come."""
        self._paths: dict[str, str] = {}
        memory.bind()
        super().__init__(worker_id, incarnation, host=host)
        self.path = DIRECT

    def register(self, ring: Ring) -> None:
        if not isinstance(ring, GpuRing):
            raise TransferError("the ucx-gpu transport needs a ring in GPU memory")
        self._gpu_ring = ring

    def path_to(self, peer: str) -> str:
        return self._paths.get(peer, "") if peer in self._book.outgoing else ""

    def read(self, peer: str, read_id: int, body: bytes, dest: np.ndarray) -> None:
        frame = np.zeros(_FRAME_BYTES, np.uint8)
        endpoint = self._book.outgoing.get(peer)
        if endpoint is not None:
            self._readings[read_id] = _Reading(endpoint, dest, frame)
        try:
            super().read(peer, read_id, body, frame)
        except TransferError:
            self._readings.pop(read_id, None)
            raise

    def answer(self, conn: str, read_id: int, message: np.ndarray | bytes) -> int:
        endpoint = self._book.reader(conn)
        if isinstance(message, bytes) or endpoint is None or not endpoint.ep.alive or self._gpu_ring is None:
            return super().answer(conn, read_id, message if isinstance(message, bytes) else b"")
        op = next(self._ids)
        frame = np.concatenate((message[:HEADER_BYTES], message[-TRAILER_BYTES:]))
        self._send(endpoint, frame, _TAG_DATA | read_id, 0)
        self._send(endpoint, self._payload(message), _TAG_PAYLOAD | read_id, op)
        return op

    def progress(self) -> list[TransportEvent]:
        if not self._bound:  # the first turn on the transfer thread
            self._memory.bind()
            self._bound = True
        return super().progress()

    def wait(self, wakeup: Wakeup, timeout_s: float, *, awaited: bool) -> None:
        # The end of a copy on the GPU wakes no thread: it is polled.
        if self._moving():
            sleep_on([], min(timeout_s, _POLL_S))
        else:
            super().wait(wakeup, timeout_s, awaited=awaited)

    def _moving(self) -> bool:
        """Payloads are on their way."""
        readings = self._readings
        return any(p.op or ((r := readings.get(p.read_id)) and r.began) for p in self._pending.values())

    def _payload(self, message: np.ndarray) -> Any:
        """Of a slab of ours."""
        assert self._gpu_ring is not None
        address = self._gpu_ring.payload(self._gpu_ring.index_of(message)).address
        return self._memory.view(address, message.nbytes - _FRAME_BYTES)

    def _received(self, pending: _Pending, error: str) -> ReceiveDone | None:
        reading = self._readings.get(pending.read_id)
        if reading is None:
            return super()._received(pending, error)
        if pending.dest is reading.frame:
            if not error and read_refusal(reading.frame.data) is None:
                return self._ask_payload(pending.read_id, reading)
            event = super()._received(pending, error)
            reading.dest[:HEADER_BYTES] = reading.frame[:HEADER_BYTES]
        else:
            event = super()._received(pending, error)
            if event is not None and not event.error:
                event = self._arrived(pending.read_id, reading)
        del self._readings[pending.read_id]
        return event

    def _ask_payload(self, read_id: int, reading: _Reading) -> ReceiveDone | None:
        reading.began = time.monotonic()
        try:
            buffer = self._array(self._payload(reading.dest))
            request = reading.endpoint.ep.tag_recv(buffer, self._ucx.UCXXTag(_TAG_PAYLOAD | read_id))
        except self._ucx.UCXError as error:
            del self._readings[read_id]
            return ReceiveDone(read_id, f"peer lost: {reading.endpoint.name}: {error}")
        self._pending[next(self._ids)] = _Pending(request, buffer, reading.endpoint, read_id=read_id, dest=reading.dest)
        return None

    def _arrived(self, read_id: int, reading: _Reading) -> ReceiveDone:
        assert self._gpu_ring is not None
        why = self._judge(reading, time.monotonic() - reading.began)
        if why:
            self.drop(reading.endpoint.name, why)
            return ReceiveDone(read_id, f"peer lost: {reading.endpoint.name}: {why}")
        reading.dest[:HEADER_BYTES] = reading.frame[:HEADER_BYTES]
        reading.dest[-TRAILER_BYTES:] = reading.frame[HEADER_BYTES:]
        index = self._gpu_ring.index_of(reading.dest)
        self._gpu_ring.arrive(index, self._gpu_ring.payload(index).address)
        return ReceiveDone(read_id)

    def _judge(self, reading: _Reading, seconds: float) -> str:
        """Find the peer's path by the time of a large payload. Returns: why it is refused; empty: it is accepted."""
        peer, size = reading.endpoint.name, reading.dest.nbytes - _FRAME_BYTES
        if size < TELLING_BYTES or self._paths.get(peer):
            return ""
        self._large[peer] = count = self._large.get(peer, 0) + 1
        if count < 2:
            return ""
        rate = size / max(seconds, 1e-9)
        self._paths[peer] = path = path_of(rate)
        report = log.info if path == DIRECT else log.warning
        report("kv transfer: %s brings %s at %.1f GB/s", path, peer, rate / 1e9)
        if self._require and path != self._require:
            return f"it comes on {path} ({rate / 1e9:.2f} GB/s), {self._require} is required"
        return ""

    def _bury(self, endpoint: _Endpoint, why: str) -> None:
        self._large.pop(endpoint.name, None)
        self._paths.pop(endpoint.name, None)
        super()._bury(endpoint, why)


def _make(worker_id: str, incarnation: str, site: TransportSite) -> UcxGpuTransport:
    assert site.memory is not None
    return UcxGpuTransport(worker_id, incarnation, host=site.host, memory=site.memory, require_path=site.require_path)


def _self_test(make: Make, site: TransportSite) -> SelfTest:
    assert site.memory is not None
    return run_ucx_gpu_self_test(make, site.memory, site.host, site.ring.slab_bytes)


register(
    TransportSpec(
        name="ucx-gpu",
        summary="UCX from GPU memory to GPU memory, within a host and, with a NIC that can, between hosts",
        make=_make,
        self_test=_self_test,
        make_ring=gpu_ring,
        device="cuda",
        gpu_slabs=lambda quotas: quotas.total,
        auto_rank=20,
        auto_min_gpus=2,
    )
)
