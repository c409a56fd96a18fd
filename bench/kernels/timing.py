"""Timing on a GPU: launches captured into one CUDA graph, so that launch gaps do not count; limits of the card."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch
import triton
import triton.language as tl
from torch import Tensor


def graph_time_s(calls: Sequence[Callable[[], object]], *, repeats: int = 20) -> float:
    """Median seconds of one call, over `repeats` replays of a graph of all calls. Use several calls over more data than
    the L2 holds."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


@triton.jit
def _read_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
    total = tl.zeros([BLOCK], tl.int32)
    for step in tl.range(STEPS):
        total += tl.load(x_ptr + base + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def read_bandwidth(size_bytes: int = 4 << 30) -> float:
    """Bytes per second of a kernel that only reads."""
    x = torch.randint(-100, 100, (size_bytes // 4,), dtype=torch.int32, device="cuda")
    block, steps = 4096, 16
    programs = x.numel() // (block * steps)
    out = torch.empty(programs, dtype=torch.int32, device="cuda")

    def call() -> Tensor:
        _read_kernel[(programs,)](x, out, x.numel(), BLOCK=block, STEPS=steps, num_warps=8)
        return out

    return size_bytes / graph_time_s([call])


def matmul_peak(size: int = 8192) -> float:
    """FLOP/s of cuBLAS in bf16 on random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / graph_time_s([lambda: a @ b] * 4, repeats=8)


def machine() -> dict[str, object]:
    return {
        "card": torch.cuda.get_device_name(),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
