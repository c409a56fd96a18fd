"""Which cut of the small matmul is the fastest for each projection, inside a decode step: graphs of a few layers, one change at
a time, the best one kept.

    python -m diptych.engine.exec.bench.bench_gpu_projections --out bench/results/gpu-projections.json

Alone a kernel is timed with an empty GPU before and after it; in a step the next one's weights are fetched meanwhile. Every
candidate is first compared with cuBLAS on the same inputs. Kernels are compiled beforehand by several processes.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from diptych.engine.exec.bench.bench_gpu_step import BLOCK_SIZE, GREEDY, LLAMA_8B, _seqs, random_weights
from diptych.engine.exec.cuda import decoder
from diptych.engine.exec.cuda.backend import CudaBackend
from diptych.engine.exec.kv_pool import KvPool
from diptych.engine.exec.model_config import parse_config
from diptych.kernels.bench.timing import machine, read_bandwidth
from diptych.kernels.triton_matmul import MatmulShape, small_matmul
from diptych.kernels.triton_norm import gate_mul

SIZES = {"gate_up": (14_336, 4096), "down": (4096, 14_336), "o": (4096, 4096), "qkv": (6144, 4096)}
Cut = tuple[int, int, int, int, int]
FEW: dict[str, list[Cut]] = {
    "gate_up": [(64, 128, 4, 4, 1), (64, 128, 4, 3, 1), (64, 64, 4, 6, 1), (32, 128, 4, 4, 1), (32, 256, 4, 3, 1),
                (128, 64, 8, 4, 1), (16, 256, 4, 4, 1)],
    "down": [(32, 128, 4, 4, 4), (32, 256, 4, 3, 4), (64, 128, 4, 4, 4), (64, 128, 4, 4, 7), (32, 256, 4, 3, 7),
             (32, 128, 4, 6, 2), (64, 64, 4, 6, 8), (16, 512, 4, 3, 2)],
    "o": [(32, 128, 4, 4, 4), (32, 256, 4, 3, 4), (64, 128, 4, 4, 4), (64, 128, 4, 4, 8), (32, 128, 4, 6, 2),
          (64, 64, 4, 6, 4), (16, 512, 4, 2, 2)],
    "qkv": [(32, 128, 4, 4, 2), (32, 256, 4, 3, 2), (64, 128, 4, 4, 4), (64, 128, 4, 4, 2), (32, 128, 4, 4, 4),
            (64, 64, 4, 6, 4), (16, 512, 4, 2, 2)],
}  # fmt: skip
MANY: dict[str, list[Cut]] = {
    "gate_up": [(64, 128, 4, 4, 1), (64, 64, 4, 4, 1), (128, 64, 8, 4, 1), (32, 128, 4, 3, 1), (64, 64, 8, 4, 1)],
    "down": [(64, 128, 4, 3, 4), (128, 128, 8, 3, 4), (128, 64, 4, 4, 8), (128, 64, 8, 4, 4), (64, 64, 4, 6, 4),
             (64, 128, 4, 4, 2)],
    "o": [(64, 128, 4, 3, 4), (128, 128, 8, 3, 4), (128, 64, 4, 4, 8), (64, 64, 4, 6, 4), (64, 128, 4, 4, 2)],
    "qkv": [(64, 64, 4, 4, 4), (64, 128, 4, 3, 2), (128, 128, 8, 3, 2), (128, 64, 4, 4, 4), (32, 128, 4, 4, 1)],
}  # fmt: skip


def candidates(name: str, rows: int) -> list[MatmulShape]:
    cuts = (FEW if rows <= 16 else MANY)[name]
    return [MatmulShape(n, k, warps, stages, splits) for n, k, warps, stages, splits in cuts]


def _inputs(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    columns, size = SIZES[name]
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16, generator=generator)
    both = 2 * columns if name == "gate_up" else columns
    weight = torch.randn(both, size, device="cuda", dtype=torch.bfloat16, generator=generator).mul_(size**-0.5)
    return x, weight


def _compile(job: tuple[str, int, MatmulShape]) -> str:
    """Compile and check one candidate. Returns: why it cannot be used; empty: it is right."""
    name, rows, shape = job
    x, weight = _inputs(name, rows)
    silu = name == "gate_up"
    expected = gate_mul(linear(x, weight)) if silu else linear(x, weight)
    try:
        got = small_matmul(x, weight, silu=silu, shape=shape)
        got = got.sum(0) if got.dim() == 3 else got
        error = float((got.float() - expected.float()).norm() / expected.float().norm())
    except Exception as problem:  # a cut that does not fit the card's shared memory
        return f"{type(problem).__name__}: {problem}"[:200]
    return "" if error < 1e-2 else f"wrong by {error:.3g}"


class Step:
    """A decode step of a few layers, captured again for every choice of cuts."""

    def __init__(self, layers: int, batch: int, context: int) -> None:
        config = parse_config({**LLAMA_8B, "num_hidden_layers": layers})
        self.num_blocks = batch * (-(-(context + 64) // BLOCK_SIZE)) + 8
        self._config, self._batch, self._context = config, batch, context
        self._weights = random_weights(config)
        self._pool = KvPool(self.num_blocks, layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim,
                            dtype=torch.bfloat16, device=torch.device("cuda"))  # fmt: skip
        self._seqs: Any = _seqs(self, batch, context, GREEDY)  # type: ignore[arg-type]

    def seconds(self, shapes: dict[str, MatmulShape]) -> float:
        def shape_of(self: object, name: str, layer: object, x: torch.Tensor) -> MatmulShape | None:
            return shapes.get(name) if x.shape[0] <= 64 else None

        kept = decoder.CudaDecoder._shape
        decoder.CudaDecoder._shape = shape_of  # type: ignore[method-assign]
        try:
            with torch.inference_mode():
                backend = CudaBackend(
                    self._config, self._weights, self._pool, max_model_len=self._context + 64, graph_sizes=[self._batch]
                )
                self._pool.tensor.normal_()
                batch = backend.build(self._seqs)
                times = []
                for _ in range(60):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    backend.execute(self._seqs, batch, None)
                    end.record()
                    end.synchronize()
                    times.append(begin.elapsed_time(end) / 1e3)
        finally:
            decoder.CudaDecoder._shape = kept  # type: ignore[method-assign]
        return float(statistics.median(times[10:]))


def search(
    step: Step, rows: int, shape_is_right: Callable[[str, MatmulShape], bool], until: float
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def measure(shapes: dict[str, MatmulShape], changed: str) -> float:
        seconds = step.seconds(shapes)
        words = {name: str(shape)[len("MatmulShape") :] for name, shape in shapes.items()}
        found.append({"rows": rows, "changed": changed, "us": seconds * 1e6, "cuts": words})
        print(f"{rows:>4} {changed:<9} {seconds * 1e6:9.1f}  {words.get(changed, '')}", flush=True)
        return seconds

    best: dict[str, MatmulShape] = {}
    record = measure(best, "cuBLAS")
    for name in SIZES:
        for shape in filter(partial(shape_is_right, name), candidates(name, rows)):
            if time.perf_counter() > until:
                return found
            if (seconds := measure({**best, name: shape}, name)) < record:
                record, kept = seconds, shape
                best = {**best, name: kept}
    measure(best, "all")
    measure({}, "cuBLAS")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=200.0, help="no new measurement after this")
    args = parser.parse_args()
    begun = time.perf_counter()
    jobs = [
        (name, rows, shape)
        for rows in sorted({1 if rows <= 16 else 64 for rows in args.rows})
        for name in SIZES
        for shape in candidates(name, rows)
    ]
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        verdicts = dict(zip(jobs, pool.map(_compile, jobs, chunksize=1), strict=True))
    for job, why in verdicts.items():
        if why:
            print(job, why)
    print(f"compiled and checked {len(jobs)} after {time.perf_counter() - begun:.0f} s", flush=True)
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    facts: dict[str, Any] = {**machine(), "read_tb_s": bandwidth / 1e12, "layers": args.layers, "context": args.context}
    print(facts, flush=True)
    out: list[dict[str, Any]] = []
    refused = [{"name": n, "rows": r, "cut": str(s), "why": why} for (n, r, s), why in verdicts.items() if why]
    for index, rows in enumerate(args.rows):
        until = begun + args.seconds * (index + 1) / len(args.rows)
        least = 1 if rows <= 16 else 64

        def is_right(name: str, shape: MatmulShape, least: int = least) -> bool:
            return not verdicts[name, least, shape]

        out += search(Step(args.layers, rows, args.context), rows, is_right, until)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": facts, "rows": out, "refused": refused}, indent=1) + "\n")


if __name__ == "__main__":
    main()
