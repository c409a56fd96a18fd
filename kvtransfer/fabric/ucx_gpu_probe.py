"""Self-test of GPU memory over UCX: another process, since within one UCX takes another path than between two.

    python -m diptych.kvtransfer.fabric.ucx_gpu_probe HOST SLAB_BYTES DEVICE

is that process: it prints its address in one line, and answers reads of its one slab until its input ends.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import diptych
from diptych.common import child as children
from diptych.common.errors import TransferError
from diptych.kvtransfer.api import KvAddress, PeerRef
from diptych.kvtransfer.fabric.registry import TransportSite, transports
from diptych.kvtransfer.fabric.self_test import HOPS, SelfTest, hop_s
from diptych.kvtransfer.fabric.transport import ReceiveDone, RequestArrived, Transport
from diptych.kvtransfer.gpu.memory import DeviceMemory, GpuMemory
from diptych.kvtransfer.gpu.path import DIRECT, path_of
from diptych.kvtransfer.gpu.ring import GpuRing
from diptych.kvtransfer.slabs.handle import SlabHandle, encode
from diptych.kvtransfer.slabs.layout import RingSpec, payload_capacity, write_frame

log = logging.getLogger(__name__)
_DEADLINE_S = 60.0
"""The other process starts CUDA and UCX."""
_IDLE_S = 120.0
_ROUNDS = 6
_SMALL_BYTES = 4096
_PATTERN = bytes(range(1, 252))
_ADDRESS = b"ADDRESS "
_TRANSPORT = "ucx-gpu"
_NAME, _LIFE = "self-test-p", "0"


def run_ucx_gpu_self_test(
    make: Callable[[str, str], Transport],
    memory: DeviceMemory,
    host: str,
    slab_bytes: int,
    command: Sequence[str] | None = None,
) -> SelfTest:
    """Read slabs out of another process's memory on this GPU. That shows whether UCX has a direct path, and the cost of a
    message. A peer's own path is found from its payloads (ucx_gpu.py).

    Args:
        command: of the other process; None: this module on our device.
    Raises: TransferError.
    """
    words = list(command or (sys.executable, "-P", "-m", __name__, host, str(slab_bytes), str(_device_index())))
    spec = RingSpec(1, slab_bytes)
    address, handle = memory.allocate(spec.total_bytes)
    child = children.start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())
    try:
        sink = make("self-test-d", "0")
        try:
            sink.register(ring := GpuRing(spec, address, handle))
            peer = PeerRef(_NAME, _LIFE, KvAddress(_TRANSPORT, host, 0, _say(child)))
            rate, message_s = _measure(sink, ring, peer, memory)
        finally:
            sink.close()
    finally:
        assert child.stdin is not None
        child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5.0)
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
        memory.free(address)
    path = path_of(rate)
    if path != DIRECT:
        log.warning(
            "kv transfer: UCX moves GPU memory through the host (%s, %.2f GB/s): no direct path between two processes here",
            path,
            rate / 1e9,
        )
    return SelfTest(path, rate, message_s + HOPS * hop_s())


def _device_index() -> int:
    import torch

    return torch.cuda.current_device()


def _environment() -> dict[str, str]:
    root = str(Path(diptych.__file__).resolve().parents[1])  # the folder that holds the package
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _say(child: subprocess.Popen[bytes]) -> bytes:
    """Its address. Raises: TransferError."""
    assert child.stdout is not None
    limit, output = time.monotonic() + _DEADLINE_S, b""
    poll = select.poll()  # select() refuses descriptors from 1,024 on
    poll.register(child.stdout, select.POLLIN)
    while (left := limit - time.monotonic()) > 0.0:
        more = os.read(child.stdout.fileno(), 1 << 16) if poll.poll(1e3 * left) else b""
        output += more
        for line in output.splitlines(keepends=True):  # libraries print, too
            if line.startswith(_ADDRESS) and line.endswith(b"\n"):
                return base64.b64decode(line.removeprefix(_ADDRESS))
        if not more:
            break
    raise TransferError("self-test of ucx-gpu: the other process ended, or hung, before it gave its address")


def _measure(sink: Transport, ring: GpuRing, peer: PeerRef, memory: DeviceMemory) -> tuple[float, float]:
    """Returns: bytes/s of a slab, seconds of a small message. Raises: TransferError."""
    key = sink.connect(peer)
    large = payload_capacity(ring.spec.slab_bytes)
    took: dict[int, list[float]] = {large: [], min(_SMALL_BYTES, large): []}
    limit = time.monotonic() + _DEADLINE_S
    read_id = 0
    for size in took:
        for _ in range(_ROUNDS):
            read_id += 1
            memory.write(ring.payload(0).address, b"\0" * size)
            asked, start = _asked(size), time.monotonic()
            sink.read(key, read_id, encode(asked), ring.message(0, size))
            while not (done := [e for e in sink.progress() if isinstance(e, ReceiveDone)]):
                if time.monotonic() > limit:
                    raise TransferError(f"self-test of ucx-gpu: nothing arrived within {_DEADLINE_S} s")
            took[size].append(time.monotonic() - start)
            if done[0].error:
                raise TransferError(f"self-test of ucx-gpu: {done[0].error}")
            payload = ring.received(0, asked, verify=False)
            if memory.fetch(payload.address, size) != _expected(size):
                raise TransferError("self-test of ucx-gpu: the bytes differ")
    seconds = [statistics.median(some[1:]) for some in took.values()]
    return large / seconds[0], seconds[-1]


def _asked(size: int) -> SlabHandle:
    return SlabHandle(_NAME, _LIFE, "self-test", 0, 1, 0, 1, 0, 1, 0, size, 0, 0)


def _expected(size: int) -> bytes:
    return (_PATTERN * (size // len(_PATTERN) + 1))[:size]


def serve(source: Transport, ring: GpuRing, memory: DeviceMemory) -> None:
    """Answer reads of slab 0 until our input ends."""
    from diptych.kvtransfer.slabs import handle as handles

    memory.write(ring.payload(0).address, _expected(payload_capacity(ring.spec.slab_bytes)))
    source.register(ring)
    sys.stdout.write(f"{_ADDRESS.decode()}{base64.b64encode(source.address.blob).decode()}\n")
    sys.stdout.flush()
    limit = time.monotonic() + _IDLE_S
    ends = select.poll()
    ends.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while time.monotonic() < limit and not ends.poll(0):
        for event in source.progress():
            if isinstance(event, RequestArrived):
                asked = handles.decode(event.body)
                write_frame(ring.slab(0), asked)
                source.answer(event.conn, event.read_id, ring.message(0, asked.size_bytes))
    source.close()


def main() -> None:
    host, slab_bytes, device = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = GpuMemory(device, lambda address, size_bytes: 0.0)
    spec = RingSpec(1, slab_bytes)
    ring = GpuRing(spec, *memory.allocate(spec.total_bytes))
    transport = transports()[_TRANSPORT].make(_NAME, _LIFE, TransportSite(host, spec, memory))
    serve(transport, ring, memory)


if __name__ == "__main__":
    main()
