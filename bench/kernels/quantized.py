"""Products of Llama-3.1-8B's layers with weights of 4 and 8 bits, each with whoever reads its result: kinds and shapes of kernels
beside the present one, bf16 and the time that the bytes take. Then whole steps of a few layers with the fastest shapes.

    python -m diptych.bench.kernels.quantized --out bench/results/gpu-int4.json [--seconds 140]

Every kind is checked against float64 before it is timed. Calls are captured into one graph over more copies of the weight than
the L2 holds. Readers: an RMS norm, which adds up splits, behind qkv, o and down; the activation behind gate and up, where it is
not part of the product. Kernels are compiled by several processes first. Parts: few rows in 4 bits, steps, prompts, 8 bits;
what does not fit the time is left out, and said so.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import linear

from diptych.bench.kernels.timing import graph_time_s, machine, read_bandwidth
from diptych.common import child
from diptych.kernels.reference_quant import int4_weight_ref, quantize_rows_ref, w8a8_ref
from diptych.kernels.triton_int4 import PackedInt4, choose_int4, dequantize_int4, int4_matmul, pack_int4
from diptych.kernels.triton_int4_words import (
    Int4Words,
    WordsShape,
    choose_words,
    dequantize_int4_words,
    int4_words_matmul,
    pack_int4_words,
)
from diptych.kernels.triton_matmul import choose_shape, small_matmul
from diptych.kernels.triton_norm import gate_mul, rms_norm
from diptych.kernels.triton_quantize import FP8, QuantizedRows, quantize_rows
from diptych.kernels.triton_w8a8 import W8A8Shape, choose_w8a8, w8a8_matmul

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
GROUP_SIZE = 128
OUT_OF_L2_BYTES = 200 << 20
BF16 = torch.bfloat16
DEVICE = "cuda"
TOLERANCE = 8e-3
"""Of a result in bf16; of sums in fp32 from rounded weights as well."""
Rows = list[dict[str, Any]]

S = WordsShape
FEW = (
    S(16, 64, 4, 4), S(16, 64, 4, 6), S(16, 64, 4, 4, unroll=2), S(16, 64, 4, 3, unroll=2), S(16, 64, 4, 4, ahead=4),
    S(16, 64, 4, 4, ahead=0), S(16, 64, 4, 4, tma=True), S(16, 128, 4, 4), S(16, 128, 4, 4, max_registers=128),
    S(16, 128, 4, 3, unroll=2), S(16, 128, 4, 5), S(16, 128, 4, 4, tma=True), S(16, 128, 8, 4), S(16, 128, 8, 6),
    S(16, 128, 8, 3, unroll=2), S(16, 256, 8, 3),
)  # fmt: skip
"""Up to 16 rows; block_m is raised for more."""
FEWEST = (
    S(8, 64, 2, 4, unroll=2), S(8, 64, 2, 4), S(8, 64, 4, 4), S(8, 128, 4, 4), S(8, 128, 4, 3, unroll=2), S(8, 128, 2, 3),
    S(8, 32, 2, 4),
)  # fmt: skip
"""Up to 8 rows."""
MANY = (
    S(128, 128, 8, 3, rounded=True), S(256, 128, 8, 2, rounded=True), S(128, 256, 8, 3, rounded=True),
    S(64, 128, 8, 4, rounded=True), S(128, 128, 8, 3, rounded=True, tma=True), S(128, 128, 8, 2, rounded=True, tma=True),
    S(256, 128, 8, 3, rounded=True, tma=True), S(128, 256, 8, 3, rounded=True, tma=True),
    S(128, 128, 4, 2, rounded=True, tma=True), S(64, 128, 8, 4, rounded=True, tma=True), S(128, 128, 8, 3),
)  # fmt: skip
SPLITS = {"qkv": (1, 2, 4, 8), "o": (2, 4, 8), "gate_up": (2, 4), "down": (2, 4, 7)}
W = W8A8Shape
FP8_GATE_UP = (
    W(16, 128, 256, 8, 3, swap=True), W(16, 128, 128, 8, 6, swap=True), W(16, 64, 128, 4, 6, swap=True),
    W(16, 64, 128, 4, 4, swap=True), W(16, 64, 256, 4, 3, swap=True), W(16, 64, 128, 8, 6, swap=True),
    W(16, 128, 128, 4, 4, swap=True), W(16, 128, 256, 8, 3, swap=True, tma=True), W(16, 64, 256, 4, 4, swap=True, tma=True),
    W(16, 64, 128, 4, 6, swap=True, tma=True), W(16, 128, 128, 4, 4, swap=True, tma=True),
    W(16, 128, 256, 8, 3, swap=True, ahead=512), W(16, 64, 128, 4, 6, swap=True, ahead=512),
    W(16, 64, 256, 4, 3, swap=True, ahead=512),
)  # fmt: skip
FP8_OTHERS = (
    W(16, 64, 128, 4, 8, swap=True), W(16, 64, 128, 4, 6, swap=True), W(16, 64, 256, 4, 4, swap=True),
    W(16, 64, 256, 4, 3, swap=True), W(16, 128, 128, 8, 6, swap=True), W(16, 128, 128, 4, 6, swap=True),
    W(16, 128, 256, 8, 3, swap=True), W(16, 64, 512, 4, 3, swap=True), W(16, 64, 256, 4, 4, swap=True, tma=True),
    W(16, 64, 128, 4, 8, swap=True, tma=True), W(16, 128, 256, 8, 3, swap=True, tma=True),
    W(16, 64, 128, 4, 8, swap=True, ahead=512), W(16, 64, 256, 4, 4, swap=True, ahead=512),
)  # fmt: skip
R = 128
"""Registers of a thread, at most."""
SEARCHED: dict[str, dict[int, tuple[WordsShape, ...]]] = {
    "gate_up": {
        1: (
            S(8, 64, 2, 6), S(8, 64, 2, 4, ahead=4), S(8, 64, 2, 4, ahead=8), S(8, 64, 2, 4, unroll=2), S(8, 128, 4, 4),
            S(8, 128, 4, 6, ahead=4), S(8, 64, 2, 8), S(8, 64, 2, 4, ahead=0),
        ),
        16: (
            S(16, 128, 4, 6, max_registers=R), S(16, 128, 4, 5, max_registers=R, ahead=4), S(16, 64, 4, 6),
            S(16, 64, 4, 8), S(16, 128, 4, 6, tma=True), S(16, 128, 4, 4, max_registers=R, ahead=8),
            S(16, 64, 4, 6, ahead=4), S(16, 128, 4, 4, max_registers=144),
        ),
    },
    "down": {
        1: (
            S(8, 64, 2, 6, splits=4), S(8, 64, 2, 8, splits=4), S(8, 64, 2, 6, splits=4, unroll=2), S(8, 64, 2, 6, splits=8),
            S(8, 64, 2, 4, splits=8, unroll=2), S(8, 64, 2, 4, splits=4, unroll=2, ahead=6),
            S(8, 64, 2, 4, splits=4, unroll=2, ahead=0), S(8, 64, 4, 6, splits=4), S(8, 32, 2, 6, splits=4),
        ),
        16: (
            S(16, 64, 4, 8, splits=4), S(16, 64, 4, 6, splits=8), S(16, 64, 4, 6, splits=4, ahead=6),
            S(16, 64, 4, 6, splits=4, ahead=0), S(16, 64, 4, 10, splits=4), S(16, 128, 4, 6, splits=8, max_registers=R),
            S(16, 128, 4, 6, splits=7), S(16, 64, 4, 6, splits=6),
        ),
    },
    "qkv": {
        1: (
            S(8, 64, 2, 4, splits=2, unroll=2), S(8, 64, 2, 6, splits=4), S(8, 64, 2, 4, splits=4, unroll=2, ahead=4),
            S(8, 64, 2, 4, splits=4, unroll=2, ahead=8), S(8, 64, 2, 6, splits=2), S(8, 64, 4, 4, splits=4),
            S(8, 64, 2, 4, splits=8),
        ),
        16: (
            S(16, 64, 4, 8, splits=4), S(16, 64, 4, 6, splits=2), S(16, 64, 4, 6, splits=4, ahead=4),
            S(16, 64, 4, 6, splits=4, ahead=8), S(16, 64, 4, 8, splits=2), S(16, 128, 4, 6, splits=4, max_registers=R),
            S(16, 64, 4, 6, splits=8),
        ),
    },
    "o": {
        1: (
            S(8, 64, 2, 6, splits=4), S(8, 64, 2, 4, splits=4, unroll=2, ahead=4), S(8, 64, 2, 4, splits=4, unroll=2, ahead=8),
            S(8, 64, 2, 4, splits=8), S(8, 128, 4, 4, splits=4), S(8, 64, 4, 4, splits=4),
        ),
        16: (
            S(16, 64, 4, 8, splits=4), S(16, 64, 4, 6, splits=2), S(16, 64, 4, 6, splits=4, ahead=4),
            S(16, 64, 4, 6, splits=4, ahead=8), S(16, 64, 4, 8, splits=2), S(16, 64, 4, 4, splits=8),
        ),
    },
}  # fmt: skip
"""In steps of 1 and 16 rows."""
SEARCHED8: dict[str, tuple[W8A8Shape, ...]] = {
    "gate_up": (
        W(16, 64, 256, 4, 3, swap=True), W(16, 128, 256, 8, 3, swap=True, ahead=512),
        W(16, 64, 256, 4, 3, swap=True, ahead=512), W(16, 128, 256, 8, 3, swap=True, tma=True),
        W(16, 128, 256, 8, 3, swap=True, ahead=1024),
    ),
    "down": (
        W(16, 64, 128, 4, 8, swap=True, splits=2, ahead=512), W(16, 64, 128, 4, 8, swap=True, splits=2, ahead=1024),
        W(16, 64, 128, 4, 12, swap=True, splits=2), W(16, 64, 128, 4, 12, swap=True, splits=2, ahead=512),
        W(16, 64, 256, 4, 6, swap=True, splits=2, ahead=512), W(16, 64, 128, 4, 8, swap=True, splits=4, ahead=512),
    ),
    "qkv": (
        W(16, 64, 128, 4, 8, swap=True, ahead=512), W(16, 64, 128, 4, 8, swap=True, ahead=1024),
        W(16, 64, 128, 4, 12, swap=True, ahead=512), W(16, 64, 128, 4, 8, swap=True, splits=2, ahead=512),
        W(16, 64, 128, 4, 12, swap=True, ahead=1024),
    ),
    "o": (
        W(16, 64, 128, 4, 8, swap=True, splits=2, ahead=512), W(16, 64, 128, 4, 8, swap=True, splits=2, ahead=1024),
        W(16, 64, 128, 4, 12, swap=True, splits=2, ahead=512), W(16, 64, 128, 4, 12, swap=True, splits=2, ahead=1024),
    ),
}  # fmt: skip
FP8_SPLITS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Raw:
    """A weight as checkpoints have it; see pack_int4."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def packed(self) -> PackedInt4:
        return pack_int4(self.codes, self.scales, self.zeros, GROUP_SIZE)

    def words(self) -> Int4Words:
        return pack_int4_words(self.codes, self.scales, self.zeros, GROUP_SIZE)

    def dense(self) -> Tensor:
        return int4_weight_ref(self.codes, self.scales, self.zeros, GROUP_SIZE)


def raw_int4(outputs: int, inputs: int) -> Raw:
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
    scales = ((torch.rand(outputs, inputs // GROUP_SIZE, device=DEVICE) * 0.5 + 0.5) * inputs**-0.5 / 4).to(BF16)
    return Raw(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8))


class Reader:
    """Whoever reads a product's result."""

    def __init__(self, name: str, rows: int) -> None:
        self.gate_up = name == "gate_up"
        width = SHAPES[name][0]
        self._weight = torch.ones(width, device=DEVICE, dtype=BF16)
        self._residual = torch.zeros(rows, width, device=DEVICE, dtype=BF16)

    def __call__(self, out: Tensor, *, fused: bool = False) -> Tensor:
        if not self.gate_up:
            return rms_norm(out, self._weight, 1e-5, self._residual)
        return out if fused else gate_mul(out, "silu", BF16)


def error(got: Tensor, expected: Tensor) -> float:
    whole = got.double() if got.dim() == 2 else got.double().sum(0)
    return float((whole - expected).norm() / expected.norm())


def copies(size_bytes: int) -> int:
    return max(2, -(-OUT_OF_L2_BYTES // size_bytes))


def name_of(shape: WordsShape | W8A8Shape) -> str:
    parts = [f"{shape.block_m}x{shape.block_n}"]
    if isinstance(shape, W8A8Shape):
        parts[0] += f"x{shape.block_k}"
    parts += [f"w{shape.num_warps}", f"s{shape.num_stages}"]
    parts += [f"split{shape.splits}"] if shape.splits > 1 else []
    parts += ["tma"] if shape.tma else []
    if isinstance(shape, W8A8Shape):
        parts += [f"ahead{shape.ahead}"] if shape.ahead else []
    if isinstance(shape, WordsShape):
        parts += [f"unroll{shape.unroll}"] if shape.unroll > 1 else []
        parts += ["rounded"] if shape.rounded else []
        parts += [f"ahead{shape.ahead}"] if shape.ahead != 2 else []
        parts += [f"registers{shape.max_registers}"] if shape.max_registers else []
    return " ".join(parts)


def candidates(name: str, rows: int) -> list[tuple[WordsShape, bool]]:
    """Shapes of few rows, and whether the activation is part of the product."""
    block = max(16, 1 << (rows - 1).bit_length())
    bases = [replace(shape, block_m=block) for shape in FEW] + (list(FEWEST) if rows <= 8 else [])
    found = [(shape, True) for shape in bases] if name == "gate_up" else []
    plain = [replace(shape, splits=splits) for shape in bases for splits in SPLITS[name]]
    return found + [(shape, False) for shape in plain if name != "gate_up" or (shape.ahead == 2)]


# ---- compiling ----


BROKEN: set[tuple[Any, ...]] = set()
"""Launches after which a process could not go on."""


def compile_some(jobs: Sequence[tuple[Any, ...]]) -> None:
    """Launches that differ in what is compiled, once each. Prints what failed, and which job ended this."""
    failed, last = [], None
    for i, job in enumerate(jobs):
        try:
            _launch_once(*job)
            torch.cuda.synchronize()
        except Exception as caught:  # a shape that does not fit the card: said again where it is timed
            failed.append(f"{job[1:]}: {type(caught).__name__} {str(caught)[:80]}")
            if "CUDA" in str(caught):
                last = i
                break
    print(json.dumps({"failed": failed, "last": last}), flush=True)


def _launch_once(kind: str, *what: Any) -> None:
    if kind == "words":
        shape, silu, rows = what
        words = torch.zeros(32, 512, GROUP_SIZE // 4, dtype=torch.int16, device=DEVICE)
        weight = Int4Words(words, torch.zeros(32, 512, device=DEVICE), None, 8, GROUP_SIZE, True, BF16)
        int4_words_matmul(torch.zeros(rows, 4096, dtype=BF16, device=DEVICE), weight, silu=silu, shape=shape)
    elif kind == "fp8":
        shape, silu, rows = what
        x = quantize_rows(torch.zeros(rows, 4096, dtype=BF16, device=DEVICE), FP8)
        codes = torch.zeros(1024, 4096, device=DEVICE).to(torch.float8_e4m3fn)
        w8a8_matmul(x, codes, torch.zeros(1024, device=DEVICE), silu=silu, shape=shape)
    elif kind == "reader":
        name, splits = what
        shape = (16, SHAPES[name][0]) if splits == 1 else (splits, 16, SHAPES[name][0])
        Reader(name, 16)(torch.zeros(shape, dtype=BF16 if splits == 1 else torch.float32, device=DEVICE))
    elif kind == "steps":
        with redirect_stdout(io.StringIO()):
            whole_steps(Steps(1, what[0]), {}, {}, [])
    elif kind == "bytes":
        name, rows = what
        outputs, inputs = SHAPES[name]
        groups = inputs // GROUP_SIZE
        packed = PackedInt4(
            torch.zeros(groups, outputs, GROUP_SIZE // 2, dtype=torch.uint8, device=DEVICE),
            torch.zeros(groups, outputs, dtype=torch.int32, device=DEVICE), None, GROUP_SIZE, BF16,
        )  # fmt: skip
        present(name, torch.zeros(rows, inputs, dtype=BF16, device=DEVICE), packed)


def _broken(kind: str, shape: WordsShape | W8A8Shape, silu: bool) -> bool:
    least = replace(shape, splits=min(shape.splits, 2))
    return any(job[0] == kind and job[1] in (shape, least) and job[2] == silu for job in BROKEN)


def shares(jobs: Sequence[tuple[Any, ...]], processes: int) -> list[list[tuple[Any, ...]]]:
    """Of jobs, for each process."""
    alone = [job for job in jobs if job[0] == "steps"]
    others = [job for job in jobs if job[0] != "steps"]
    return [alone, *(others[i::processes] for i in range(processes))]


def compile_all(jobs: list[tuple[Any, ...]], processes: int) -> None:
    begin = time.perf_counter()
    command = [sys.executable, "-P", "-m", "diptych.bench.kernels.quantized", *sys.argv[1:], "--share"]
    given = shares(jobs, processes)
    children = [child.start([*command, str(i)], stdout=subprocess.PIPE) for i in range(len(given))]
    failed: list[str] = []
    for share, process in zip(given, children, strict=True):
        said = process.communicate()[0].decode().strip().splitlines()
        if process.returncode or not said:
            failed.append(f"a process ended with {process.returncode}")
            continue
        found = json.loads(said[-1])
        failed += found["failed"]
        if found["last"] is not None:
            BROKEN.add(share[found["last"]])
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - begin:.0f} s; not: {failed}", flush=True)


def compile_jobs(few: Sequence[int], many: Sequence[int], stepped: tuple[int, ...]) -> list[tuple[Any, ...]]:
    jobs: dict[tuple[Any, ...], None] = {("steps", stepped): None} if stepped else {}
    for name in SHAPES:
        jobs |= {("reader", name, splits): None for splits in {1, 4, *SPLITS[name]}}
        for rows in few:
            jobs[("bytes", name, rows)] = None
            for shape, silu in candidates(name, rows):
                jobs[("words", replace(shape, splits=min(shape.splits, 2)), silu, rows if rows > 8 else 8)] = None
    for rows in (1, 9, 17, 33, 65, 129, 513):
        for silu in (False, True):
            jobs[("words", choose_words(rows, 4096, 32, silu=silu, splits=None), silu, rows)] = None
    for op in SEARCHED if stepped else ():
        for rows, some in SEARCHED[op].items():
            jobs |= {("words", replace(s, splits=min(s.splits, 2)), op == "gate_up", rows): None for s in some}
        jobs |= {("fp8", replace(s, splits=min(s.splits, 2)), op == "gate_up", 16): None for s in SEARCHED8[op]}
    for silu in (False, True):
        ends = {rows for rows in many if rows in (many[0], many[-1])}
        jobs |= {("words", shape, silu, rows): None for shape in MANY for rows in ends}
        split = [replace(shape, splits=2) for shape in MANY if shape.tma and not silu]
        jobs |= {("words", shape, silu, rows): None for shape in split for rows in ends}
        jobs |= {("fp8", shape, silu, 16): None for shape in (FP8_GATE_UP if silu else FP8_OTHERS)}
        jobs |= {("fp8", replace(shape, splits=2), silu, 16): None for shape in (() if silu else FP8_OTHERS)}
    return list(jobs)


# ---- four bits, few rows ----


def present(name: str, x: Tensor, weight: PackedInt4) -> Tensor:
    """As the decoder multiplies today."""
    if x.shape[0] > 64:
        return linear(x, dequantize_int4(weight))
    shape = choose_int4(x.shape[0], weight.outputs, weight.codes.shape[0], silu=False, splits=None)
    return int4_matmul(x, weight, shape=shape)


def plain(name: str, x: Tensor, weight: Tensor, read: Reader) -> Tensor:
    """In bf16, as the decoder multiplies today."""
    gate_up = name == "gate_up"
    columns = weight.shape[0] // 2 if gate_up else weight.shape[0]
    shape = choose_shape(x.shape[0], columns, x.shape[1], silu=gate_up) if x.shape[0] <= 64 else None
    if shape is None:
        return read(linear(x, weight))
    return read(small_matmul(x, weight, silu=gate_up, shape=shape), fused=gate_up)


class Table:
    """One product at one number of rows: prints and keeps what was timed."""

    def __init__(self, name: str, rows: int, floor_s: float, kept: Rows) -> None:
        self._what, self._floor, self._kept = {"op": name, "rows": rows}, floor_s, kept
        self._base: dict[str, float] = {}
        self._found: list[tuple[float, str]] = []

    def base(self, kind: str, seconds: float) -> None:
        self._base[kind] = seconds
        self._keep(kind, seconds)

    def add(self, kind: str, seconds: float) -> None:
        self._found.append((seconds, kind))
        self._keep(kind, seconds)

    def _keep(self, kind: str, seconds: float) -> None:
        self._kept.append({**self._what, "kind": kind, "us": seconds * 1e6})

    def show(self, most: int = 6) -> None:
        base = "  ".join(f"{kind} {t * 1e6:.1f}" for kind, t in self._base.items())
        print(f"{self._what['op']} {self._what['rows']} rows: floor {self._floor * 1e6:.1f}  {base}", flush=True)
        for seconds, kind in sorted(self._found)[:most]:
            ratios = "  ".join(f"{t / seconds:.2f} of {base}" for base, t in self._base.items())
            print(f"    {seconds * 1e6:7.1f} us  {kind:<34} {ratios}  floor {self._floor / seconds:.2f}", flush=True)


def timed(what: str, calls: Sequence[Callable[[], object]], repeats: int = 12) -> float | None:
    try:
        return graph_time_s(calls, repeats=repeats)
    except Exception as caught:  # a shape that does not fit the card's shared memory or registers
        print(f"    {what}: {type(caught).__name__}: {str(caught)[:120]}", flush=True)
        torch.cuda.synchronize()
        return None


class Weights:
    """One product's weight in every form, as many copies as the L2 does not hold."""

    def __init__(self, name: str) -> None:
        outputs, inputs = SHAPES[name]
        raw = raw_int4(outputs, inputs)
        packed, words = raw.packed(), raw.words()
        self.num_bytes = words.num_bytes
        count = copies(self.num_bytes)
        self.dense = raw.dense()
        self.packed = [replace(packed, codes=packed.codes.clone()) for _ in range(count)]
        self.words = [replace(words, codes=words.codes.clone()) for _ in range(count)]
        self.bf16 = [self.dense.to(BF16) for _ in range(copies(2 * outputs * inputs))]


def wrong(kind: str, got: Tensor, expected: Tensor) -> bool:
    found = error(got, expected)
    if found > TOLERANCE:
        print(f"    WRONG {kind}: {found:.2e} away", flush=True)
    return found > TOLERANCE


def few_rows(
    name: str,
    weights: Weights,
    counts: Sequence[int],
    bandwidth: float,
    kept: Rows,
    best: dict[tuple[str, int], WordsShape],
) -> None:
    for rows in counts:
        x = torch.randn(rows, SHAPES[name][1], device=DEVICE, dtype=BF16)
        product = x.double() @ weights.dense.T
        half = product.shape[1] // 2
        silu = torch.nn.functional.silu(product[:, :half]) * product[:, half:]
        read = Reader(name, rows)
        table = Table(name, rows, weights.num_bytes / bandwidth, kept)
        table.base("bf16", graph_time_s([partial(plain, name, x, w, read) for w in weights.bf16]))

        def today(w: PackedInt4, x: Tensor = x, read: Reader = read) -> Tensor:
            return read(present(name, x, w))

        table.base("bytes", graph_time_s([partial(today, w) for w in weights.packed]))
        least = float("inf")
        for shape, fused in candidates(name, rows):
            kind = name_of(shape) + (" silu" if fused else "")
            if _broken("words", shape, fused):
                continue

            def call(
                w: Int4Words, shape: WordsShape = shape, fused: bool = fused, x: Tensor = x, read: Reader = read
            ) -> Tensor:
                return read(int4_words_matmul(x, w, silu=fused, shape=shape), fused=fused)

            try:
                got = int4_words_matmul(x, weights.words[0], silu=fused, shape=shape)
            except Exception as caught:
                print(f"    {kind}: {type(caught).__name__}: {str(caught)[:100]}", flush=True)
                continue
            if wrong(kind, got, silu if fused else product):
                continue
            seconds = timed(kind, [partial(call, w) for w in weights.words])
            if seconds is None:
                continue
            table.add(kind, seconds)
            if seconds < least:
                least, best[name, rows] = seconds, shape
        table.show()


def same_bits(weights: Weights, name: str) -> None:
    """Of a row in any company, with the shapes of --batch-invariant."""
    x = torch.randn(300, SHAPES[name][1], device=DEVICE, dtype=BF16)
    weight = weights.words[0]
    outputs, groups = weight.outputs, weight.codes.shape[0]
    for silu, splits in ((False, 1), (False, 2), (True, 1)):
        if silu and name != "gate_up":
            continue

        def make(rows: int, silu: bool = silu, splits: int = splits) -> Tensor:
            shape = choose_words(rows, outputs, groups, silu=silu, splits=splits, invariant=True)
            return int4_words_matmul(x[:rows], weight, silu=silu, shape=shape)

        every = make(300)
        same = [rows for rows in (1, 2, 16, 17, 33, 64, 65) if torch.equal(make(rows), every[..., :rows, :])]
        print(
            f"{name} silu={silu} splits={splits}: the bits of 300 rows with {same} of 1, 2, 16, 17, 33, 64, 65",
            flush=True,
        )


# ---- four bits, prompts ----


def prompts(name: str, weights: Weights, counts: Sequence[int], kept: Rows) -> None:
    for rows in counts:
        x = torch.randn(rows, SHAPES[name][1], device=DEVICE, dtype=BF16)
        product = x.double() @ weights.dense.T if rows <= 512 else (x.float() @ weights.dense.float().T).double()
        half = product.shape[1] // 2
        silu = torch.nn.functional.silu(product[:, :half]) * product[:, half:]
        read = Reader(name, rows)
        table = Table(name, rows, 2 * rows * SHAPES[name][0] * SHAPES[name][1] / 8e14, kept)

        def widened(w: Int4Words, x: Tensor = x, read: Reader = read) -> Tensor:
            return read(linear(x, dequantize_int4_words(w)))

        def today(w: PackedInt4, x: Tensor = x, read: Reader = read) -> Tensor:
            return read(present(name, x, w))

        table.base("bf16", graph_time_s([partial(plain, name, x, w, read) for w in weights.bf16[:3]], repeats=5))
        table.base("bytes", graph_time_s([partial(today, w) for w in weights.packed[:3]], repeats=5))
        table.add("words, widened", graph_time_s([partial(widened, w) for w in weights.words[:3]], repeats=5))
        fused = name == "gate_up"
        shapes = MANY if fused else [replace(s, splits=n) for s in MANY for n in ((1, 2, 4) if s.tma else (1,))]
        for shape in shapes:
            kind = name_of(shape) + (" silu" if fused else "")
            if _broken("words", shape, fused):
                continue

            def call(
                w: Int4Words, shape: WordsShape = shape, fused: bool = fused, x: Tensor = x, read: Reader = read
            ) -> Tensor:
                return read(int4_words_matmul(x, w, silu=fused, shape=shape), fused=fused)

            try:
                got = int4_words_matmul(x, weights.words[0], silu=fused, shape=shape)
            except Exception as caught:
                print(f"    {kind}: {type(caught).__name__}: {str(caught)[:100]}", flush=True)
                continue
            if wrong(kind, got, silu if fused else product):
                continue
            seconds = timed(kind, [partial(call, w) for w in weights.words[:3]], repeats=5)
            if seconds is not None:
                table.add(kind, seconds)
        table.show(4)


# ---- eight bits ----


def eight_bits(
    name: str, counts: Sequence[int], bandwidth: float, kept: Rows, best: dict[tuple[str, int], W8A8Shape]
) -> None:
    outputs, inputs = SHAPES[name]
    gate_up = name == "gate_up"
    codes, scales = quantize_rows_ref(torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5, torch.float8_e4m3fn)
    weights = [codes.clone() for _ in range(copies(codes.nbytes))]
    for rows in counts:
        x = quantize_rows(torch.randn(rows, inputs, device=DEVICE, dtype=BF16), FP8)
        product = w8a8_ref(x.codes, x.scales, codes, scales)
        half = outputs // 2
        expected = torch.nn.functional.silu(product[:, :half]) * product[:, half:] if gate_up else product
        read = Reader(name, rows)
        table = Table(f"fp8 {name}", rows, codes.nbytes / bandwidth, kept)

        def call(w: Tensor, shape: W8A8Shape, x: QuantizedRows = x, read: Reader = read) -> Tensor:
            return read(w8a8_matmul(x, w, scales, silu=gate_up, shape=shape), fused=gate_up)

        now = choose_w8a8(rows, half if gate_up else outputs, inputs, silu=gate_up, blocks=False, splits=None)
        table.base("now", graph_time_s([partial(call, w, now) for w in weights]))
        least = float("inf")
        shapes = list(FP8_GATE_UP) if gate_up else [replace(s, splits=n) for s in FP8_OTHERS for n in FP8_SPLITS]
        for shape in shapes:
            if _broken("fp8", shape, gate_up):
                continue
            try:
                got = w8a8_matmul(x, codes, scales, silu=gate_up, shape=shape)
            except Exception as caught:
                print(f"    {name_of(shape)}: {type(caught).__name__}: {str(caught)[:100]}", flush=True)
                continue
            if wrong(name_of(shape), got, expected):
                continue
            seconds = timed(name_of(shape), [partial(call, w, shape) for w in weights])
            if seconds is None:
                continue
            table.add(name_of(shape), seconds)
            if seconds < least:
                least, best[name, rows] = seconds, shape
        table.show(5)


# ---- steps ----


Shapes = dict[tuple[str, int], WordsShape]
"""By operation and rows."""
Shapes8 = dict[tuple[str, int], W8A8Shape]


class Steps:
    """Decode steps of a few layers of Llama-3.1-8B, captured with the shapes that are asked for and replayed in turns."""

    def __init__(self, layers: int, batches: Sequence[int]) -> None:
        from diptych.bench.gpu.step import BLOCK_SIZE, GREEDY, LLAMA_8B, _seqs, random_weights
        from diptych.engine.exec.kv_pool import KvPool, kv_format_of
        from diptych.engine.exec.models.registry import describe

        self.layers, self.batches = layers, sorted(batches)
        model = describe({**LLAMA_8B, "num_hidden_layers": layers})
        self._context = 1024
        num_blocks = max(batches) * ((self._context + 64) // BLOCK_SIZE + 1) + 8
        form = kv_format_of(model, block_size=BLOCK_SIZE, dtype="bfloat16")
        self._pool = KvPool((num_blocks,), form, device=torch.device(DEVICE))
        self._models = {"bf16": random_weights(model)}
        owner: Any = SimpleNamespace(num_blocks=num_blocks)
        self._seqs = {batch: _seqs(owner, batch, self._context, GREEDY) for batch in batches}

    def backend(self, method: str, best: Shapes, best8: Shapes8, *, words: bool = True) -> Any:
        """Args: best, best8: shapes of launches; others as the decoder chooses."""
        from diptych.bench.gpu.quantized import quantized_model
        from diptych.engine.exec.cuda import quantized as kept_quantized
        from diptych.engine.exec.cuda.backend import CudaBackend

        def fastest(rows: int, outputs: int, groups: int, *, splits: int | None, **more: Any) -> WordsShape:
            for name, size in SHAPES.items():
                if splits is None and size == (outputs, groups * GROUP_SIZE) and (name, rows) in best:
                    return best[name, rows]
            return choose_words(rows, outputs, groups, splits=splits, **more)

        def fastest8(rows: int, columns: int, size: int, *, silu: bool, splits: int | None, **more: Any) -> W8A8Shape:
            for name, (outputs, inputs) in SHAPES.items():
                fits = (outputs // (1 + silu), inputs) == (columns, size) and (silu or splits is None)
                if fits and (name, rows) in best8 and silu == (name == "gate_up"):
                    return best8[name, rows]
            return choose_w8a8(rows, columns, size, silu=silu, splits=splits, **more)

        with (
            patch.object(kept_quantized, "WORDS", words),
            patch.object(kept_quantized, "choose_words", fastest),
            patch.object(kept_quantized, "choose_w8a8", fastest8),
            torch.inference_mode(),
        ):
            key = method if words or method != "int4" else "int4 bytes"
            if key not in self._models:
                self._models[key] = quantized_model(self._models["bf16"], method)
            made = CudaBackend(
                self._models[key].weights,
                self._pool,
                max_model_len=self._context + 64,
                graph_sizes=self.batches,
                chunk_graphs=(),
            )
        self._pool.tensor.normal_()
        return made

    def compare(self, backends: dict[str, Any], rounds: int) -> dict[int, dict[str, float]]:
        """Milliseconds, by rows and name."""
        found: dict[int, dict[str, float]] = {}
        with torch.inference_mode():
            for batch in self.batches:
                times: dict[str, list[float]] = {name: [] for name in backends}
                for _ in range(rounds):
                    for name, backend in backends.items():
                        built = backend.build(self._seqs[batch])
                        marks = []
                        for _ in range(12):
                            backend.execute(self._seqs[batch], built, None)
                            marks.append(torch.cuda.Event(enable_timing=True))
                            marks[-1].record()
                        marks[-1].synchronize()
                        times[name] += [a.elapsed_time(b) for a, b in itertools.pairwise(marks[1:])]
                found[batch] = {name: statistics.median(some) for name, some in times.items()}
        return found


def whole_steps(steps: Steps, best: Shapes, best8: Shapes8, kept: Rows) -> None:
    """What counts."""
    backends = {
        "bf16": steps.backend("bf16", {}, {}),
        "fp8": steps.backend("fp8", {}, {}),
        "fp8, fastest": steps.backend("fp8", {}, best8),
        "int4 bytes": steps.backend("int4", {}, {}, words=False),
        "int4": steps.backend("int4", {}, {}),
        "int4, fastest": steps.backend("int4", best, {}),
    }
    for batch, times in steps.compare(backends, 5).items():
        for name, ms in times.items():
            kept.append({"op": f"step of {steps.layers} layers", "rows": batch, "kind": name, "us": ms * 1e3})
            faster = times["bf16"] / ms
            print(f"step of {steps.layers} layers, {batch} rows  {name:<16} {ms:7.4f} ms  {faster:.3f}x", flush=True)


def search(steps: Steps, method: str, op: str, best: Shapes, best8: Shapes8, kept: Rows) -> None:
    """Shapes of one operation inside the step: the fastest for each number of rows goes into best or best8."""
    base = steps.backend(method, best, best8)
    if method == "fp8":
        pairs: list[tuple[Any, ...]] = [(shape,) * len(steps.batches) for shape in SEARCHED8[op]]
    else:
        pairs = list(itertools.zip_longest(*(SEARCHED[op][batch] for batch in steps.batches)))
    gained = dict.fromkeys(steps.batches, 0.0015)  # of the step: less is noise
    chosen: dict[int, Any] = {}
    for shapes in pairs:
        given = {(op, batch): shape for batch, shape in zip(steps.batches, shapes, strict=True) if shape is not None}
        try:
            if method == "fp8":
                other = steps.backend(method, best, {**best8, **given})
            else:
                other = steps.backend(method, {**best, **given}, best8)
        except Exception as caught:
            print(f"    {given}: {type(caught).__name__}: {str(caught)[:100]}", flush=True)
            continue
        for batch, times in steps.compare({"base": base, "other": other}, 4).items():
            if (op, batch) not in given:
                continue
            gain, shape = 1 - times["other"] / times["base"], given[op, batch]
            less = (times["base"] - times["other"]) * 1e3 / steps.layers
            kept.append(
                {"op": f"{method} {op} in a step", "rows": batch, "kind": name_of(shape), "us_a_layer_less": less}
            )
            print(f"    {method} {op} {batch:>2} rows  {less:6.2f} us a layer less  {name_of(shape)}", flush=True)
            if gain > gained[batch]:
                gained[batch], chosen[batch] = gain, shape
        del other
    for batch, shape in chosen.items():
        (best8 if method == "fp8" else best)[op, batch] = shape
        print(f"  chosen: {method} {op} {batch} rows: {name_of(shape)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--seconds", type=float, default=140, help="no part but the last begins later than this")
    parser.add_argument("--parts", nargs="+", default=["few", "fp8", "search", "steps", "bits", "prompts"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 256, 512, 2048])
    parser.add_argument("--layers", type=int, default=8, help="of the steps")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    torch.manual_seed(0)
    begin = time.perf_counter()
    rows: Rows = []
    few, many = (
        counts if part in args.parts else [] for part, counts in (("few", args.rows), ("prompts", args.prompts))
    )
    stepped = (1, 16) if {"search", "steps"} & set(args.parts) else ()
    jobs = compile_jobs(few, many, stepped)
    if args.share is not None:
        compile_some(shares(jobs, args.processes)[args.share])
        return
    compile_all(jobs, args.processes)
    bandwidth = read_bandwidth()
    facts: dict[str, Any] = {**machine(), "read_tb_s": bandwidth / 1e12}
    print(facts, flush=True)
    weights = {name: Weights(name) for name in SHAPES}
    best: dict[tuple[str, int], WordsShape] = {}
    best8: dict[tuple[str, int], W8A8Shape] = {}

    def keep() -> None:
        chosen = [{"op": name, "rows": count, **asdict(shape)} for (name, count), shape in best.items()]
        chosen += [{"op": f"fp8 {name}", "rows": count, **asdict(shape)} for (name, count), shape in best8.items()]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": facts, "rows": rows, "fastest": chosen}, indent=1) + "\n")

    parts: list[tuple[str, Callable[[], None]]] = []
    for count in few:
        for name in SHAPES:
            parts.append(
                (f"{name} of {count} rows", partial(few_rows, name, weights[name], [count], bandwidth, rows, best))
            )
    if "bits" in args.parts:
        parts += [(f"bits of {name}", partial(same_bits, weights[name], name)) for name in ("qkv", "gate_up")]
    for count in many:
        parts += [(f"{name} of {count}", partial(prompts, name, weights[name], [count], rows)) for name in SHAPES]
    if "fp8" in args.parts:
        parts += [(f"fp8 {name}", partial(eight_bits, name, [1, 16], bandwidth, rows, best8)) for name in SHAPES]
    in_steps: list[Steps] = []
    if stepped:
        parts.append(("the steps' weights", lambda: in_steps.append(Steps(args.layers, stepped))))
    if "search" in args.parts:
        for op in ("gate_up", "down", "qkv", "o"):
            for method in ("int4", "fp8"):
                parts.append(
                    (f"search {method} {op}", lambda m=method, o=op: search(in_steps[0], m, o, best, best8, rows))  # type: ignore[misc]
                )
    last = "whole steps"
    if "steps" in args.parts:
        parts.append((last, lambda: whole_steps(in_steps[0], best, best8, rows)))
    for name, part in parts:
        spent = time.perf_counter() - begin
        if spent > args.seconds and name != last:
            print(f"left out for want of time: {name}", flush=True)
            continue
        try:
            part()
        except Exception as caught:  # one part must not cost the others
            print(f"{name} failed: {type(caught).__name__}: {str(caught)[:600]}", flush=True)
        keep()
        print(f"[{time.perf_counter() - begin:.0f} s] {name}", flush=True)
    keep()


if __name__ == "__main__":
    main()
