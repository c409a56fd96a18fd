"""`diptych bench kv`: the transfer alone, slab by slab, on the path between two workers of this host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from diptych.bench.result import surroundings, write
from diptych.common.errors import ConfigError, TransferError
from diptych.kvtransfer.fabric.registry import TransportSite, candidates, check
from diptych.kvtransfer.fabric.self_test import run_self_test
from diptych.kvtransfer.fabric.transport import Transport
from diptych.kvtransfer.slabs.layout import RingSpec

SLAB_KIB = (64, 256, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class KvPoint:
    """`share`: of this machine's memory copy rate in the same run."""

    transport: str
    path: str
    slab_bytes: int
    gb_per_s: float
    memcpy_gb_per_s: float

    @property
    def share(self) -> float:
        return self.gb_per_s / self.memcpy_gb_per_s if self.memcpy_gb_per_s else 0.0


def memcpy_rate(size_bytes: int = 256 << 20, rounds: int = 4) -> float:
    """Bytes a second of the fastest copy of one buffer, larger than the caches, into another."""
    source, into = np.ones(size_bytes, dtype=np.uint8), np.zeros(size_bytes, dtype=np.uint8)
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        np.copyto(into, source)
        best = min(best, time.perf_counter() - began)
    return size_bytes / best


def run_kv(transports: Sequence[str], slab_kib: Sequence[int], repeats: int, out: Path) -> int:
    """Raises: ConfigError for a transport that is missing or does not work."""
    points: list[KvPoint] = []
    ceiling = memcpy_rate() / 1e9
    print(f"{'transport':<12}{'path':<14}{'slab KiB':>10}{'GB/s':>8}{'memcpy':>8}{'share':>8}")
    for name in transports:
        for kib in slab_kib:
            size = kib * 1024
            make = _factory(name, size)
            try:
                found = max((run_self_test(make, size) for _ in range(repeats)), key=lambda test: test.bytes_per_s)
            except TransferError as error:
                raise ConfigError("transport", name, str(error)) from None
            point = KvPoint(name, found.path, size, found.bytes_per_s / 1e9, ceiling)
            points.append(point)
            print(
                f"{name:<12}{point.path:<14}{kib:>10}{point.gb_per_s:>8.2f}{point.memcpy_gb_per_s:>8.2f}{point.share:>8.0%}"
            )
    write(out / "kv.json", {"environment": surroundings(), "points": [asdict(point) for point in points]})
    return 0


def _factory(name: str, slab_bytes: int) -> Callable[[str, str], Transport]:
    """Raises: ConfigError when there is no such transport in host memory."""
    check(name, "cpu")
    site = TransportSite("127.0.0.1", RingSpec(1, slab_bytes))
    make = candidates(name, "cpu")[0].make
    return lambda worker_id, incarnation: make(worker_id, incarnation, site)
