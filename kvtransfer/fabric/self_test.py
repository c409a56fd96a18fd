"""Start-up self-test: move slabs from the transport to itself, and measure path and rate."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from diptych.common.errors import TransferError
from diptych.kvtransfer.api import PeerRef
from diptych.kvtransfer.fabric.transport import ReceiveDone, RequestArrived, SendDone, Transport, TransportEvent
from diptych.kvtransfer.gpu.memory import SharedMemory
from diptych.kvtransfer.gpu.ring import GpuRing
from diptych.kvtransfer.slabs.handle import SlabHandle, encode
from diptych.kvtransfer.slabs.layout import Ring, RingSpec, write_frame

_ROUNDS = 6
_DEADLINE_S = 10.0
_PROBE_BYTES = 1024
_PINGS = 21
HOPS = 8
"""How often a range is handed from a thread or a process to another on its way: step thread of prefill, its event loop, that of
decode, transfer thread, event loop, step thread, event loop, and the acknowledgement."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    path: str
    bytes_per_s: float
    """Over the last rounds; the first, which connects, does not count."""
    message_s: float = 0.0
    """What one more message costs both workers together: a read of next to nothing, and what it is handed on by."""


def run_ipc_self_test(make: Callable[[str, str], Transport], memory: SharedMemory, spec: RingSpec) -> SelfTest:
    """The control messages between two transports of this process, and the kernel that reads payloads on our own GPU: CUDA
    opens no handle in the process that made it. The link to a peer is measured when it is met.

    Raises: TransferError.
    """
    address, handle = memory.allocate(spec.total_bytes)
    try:
        source, sink = make("self-test-p", "0"), make("self-test-d", "0")
        try:
            ring, into = GpuRing(spec, address, handle), GpuRing(spec)
            source.register(ring)
            sink.register(into)
            key = sink.connect(PeerRef("self-test-p", "0", source.address))
            asked = SlabHandle("self-test-p", "0", "self-test", 0, 1, 0, 1, 0, 1, 0, _PROBE_BYTES, 0, 0)
            write_frame(ring.slab(0), asked)
            limit = time.monotonic() + _DEADLINE_S
            took: list[float] = []
            rate = 0.0
            for read_id in range(1, _ROUNDS + 1):
                asked_at = time.monotonic()
                sink.read(key, read_id, encode(asked), into.message(0, _PROBE_BYTES))
                noted = False
                while not noted:
                    if time.monotonic() > limit:
                        raise TransferError(f"self-test of {sink.path}: nothing arrived within {_DEADLINE_S} s")
                    for event in (*source.progress(), *sink.progress()):
                        if isinstance(event, RequestArrived):
                            source.answer(event.conn, event.read_id, ring.message(0, _PROBE_BYTES))
                        elif isinstance(event, ReceiveDone):
                            if event.error:
                                raise TransferError(f"self-test of {sink.path}: {event.error}")
                            probed_at = time.monotonic()
                            there = into.received(0, asked, verify=False).address
                            rate = rate or memory.probe(there, spec.total_bytes)
                            asked_at += time.monotonic() - probed_at
                            sink.notify(key, encode(asked))
                        noted = noted or isinstance(event, SendDone)
                took.append(time.monotonic() - asked_at)
            # The first connects, and compiles what reads.
            return SelfTest(sink.path, rate, statistics.median(took[1:]) + HOPS * hop_s())
        finally:
            sink.close()
            source.close()
    finally:
        memory.free(address)


def run_self_test(make: Callable[[str, str], Transport], slab_bytes: int) -> SelfTest:
    """Two transports of this process talk over the same path as two workers of this host would.

    Args:
        make: (worker_id, incarnation) -> a new transport; both are closed before this returns.
    Raises: TransferError: nothing arrived in time, or not what was sent.
    """
    source = make("self-test-p", "0")
    sink = make("self-test-d", "0")
    try:
        return _measure(source, sink, slab_bytes)
    finally:
        sink.close()
        source.close()


def _measure(source: Transport, sink: Transport, slab_bytes: int) -> SelfTest:
    out, into = Ring(RingSpec(1, slab_bytes)), Ring(RingSpec(1, slab_bytes))
    source.register(out)
    sink.register(into)
    out.array[:] = np.arange(slab_bytes, dtype=np.uint32).view(np.uint8)[:slab_bytes]
    limit = time.monotonic() + _DEADLINE_S
    key = sink.connect(PeerRef("self-test-p", "0", source.address))
    rates: list[float] = []
    small: list[float] = []
    sizes = [slab_bytes] * _ROUNDS + [min(_PROBE_BYTES, slab_bytes)] * _ROUNDS
    for read_id, size in enumerate(sizes, 1):
        into.array[:] = 0
        start = time.monotonic()
        sink.read(key, read_id, b"self-test", into.array[:size])
        wanted: set[type] = {ReceiveDone, SendDone}
        while wanted:
            if time.monotonic() > limit:
                raise TransferError(f"self-test of {sink.path}: nothing arrived within {_DEADLINE_S} s")
            for event in source.progress():
                if isinstance(event, RequestArrived):
                    source.answer(event.conn, event.read_id, out.array[:size])
                _tick_off(event, wanted, sink.path)
            for event in sink.progress():
                _tick_off(event, wanted, sink.path)
        elapsed = time.monotonic() - start
        if read_id <= _ROUNDS:
            rates.append(slab_bytes / elapsed)
        else:
            small.append(elapsed)
        if not np.array_equal(out.array[:size], into.array[:size]):
            raise TransferError(f"self-test of {sink.path}: the bytes differ")
    return SelfTest(sink.path, statistics.median(rates[1:]), statistics.median(small) + HOPS * hop_s())


def hop_s() -> float:
    """What handing something to another thread of this process takes, by a ping and a pong."""
    here: SimpleQueue[None] = SimpleQueue()
    there: SimpleQueue[None] = SimpleQueue()

    def echo() -> None:
        for _ in range(_PINGS):
            there.get(timeout=_DEADLINE_S)
            here.put(None)

    thread = threading.Thread(target=echo, name="self-test-echo", daemon=True)
    thread.start()
    took = []
    for _ in range(_PINGS):
        start = time.monotonic()
        there.put(None)
        here.get(timeout=_DEADLINE_S)
        took.append((time.monotonic() - start) / 2)
    thread.join(_DEADLINE_S)
    return statistics.median(took)


def _tick_off(event: TransportEvent, wanted: set[type], path: str) -> None:
    if (isinstance(event, ReceiveDone) and event.error) or (isinstance(event, SendDone) and not event.ok):
        raise TransferError(f"self-test of {path}: {event}")
    wanted.discard(type(event))
