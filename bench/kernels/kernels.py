"""The kernels alone at Llama-3.1-8B's shapes, compared with the card's bandwidth and matmul rate in the same run.

python -m diptych.bench.kernels.kernels --out bench/results/kernels.json [--tune]
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diptych.bench.kernels.cases import LLAMA_8B, PagedCase, chunk_rows, paged_case
from diptych.bench.kernels.timing import graph_time_s, machine, matmul_peak, read_bandwidth
from diptych.kernels import kv_pack
from diptych.kernels.kv_codes import SlotCodec
from diptych.kernels.triton_decode import PROGRAMS, PROGRAMS_OF_PAIRS, choose_splits, paged_decode
from diptych.kernels.triton_norm import ACTIVATIONS, gate_mul, rms_norm
from diptych.kernels.triton_pack import pack_blocks, unpack_blocks
from diptych.kernels.triton_prefill import paged_prefill, prefill_tiles
from diptych.kernels.triton_rope import rope_write
from diptych.kernels.triton_sample import sample_rows

HIDDEN, FFN, VOCAB = 4096, 14336, 128_256
LAYERS_IN_L2_BYTES = 256 << 20
DECODE_SHAPES = ((32, 4, 4), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 2))
"""tile, warps, stages"""
PREFILL_SHAPES = ((128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 32, 4, 3), (64, 64, 4, 3))
"""rows, tile, warps, stages"""
BF16 = torch.bfloat16
Rows = list[dict[str, Any]]


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _case(lens: list[int]) -> PagedCase:
    """Enough layers that no call finds its KV in the L2."""
    bytes_a_layer = sum(lens) * 2 * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim * 2
    layers = max(2, min(32, -(-LAYERS_IN_L2_BYTES // bytes_a_layer)))
    case = paged_case(LLAMA_8B, lens, num_layers=layers, layer=0, dtype=BF16, device="cuda", poison=False)
    case.pool.normal_()
    return case


def bench_decode(bandwidth: float, *, tune: bool) -> Rows:
    rows: Rows = []
    programs = PROGRAMS * torch.cuda.get_device_properties(0).multi_processor_count
    for batch, context in ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (32, 8192), (1, 32768)):
        case = _case([context] * batch)
        q = _normal(batch, LLAMA_8B.num_q_heads, LLAMA_8B.head_dim)
        size = batch * context * 2 * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim * 2
        base = choose_splits(batch, LLAMA_8B.num_kv_heads, programs)
        variants: list[tuple[int | None, int, int, int]] = [(None, 2, 3, base)]
        if tune:
            splits = sorted({base, max(1, base // 2), min(32, base * 2)})
            variants += [(*shape, split) for shape, split in itertools.product(DECODE_SHAPES, splits)]
        for tile, warps, stages, split in variants:
            calls = [
                partial(
                    paged_decode, q, case.pool[:, layer], case.tables, case.rows, case.lens, scale=0.088,
                    splits=split, tile=tile, num_warps=warps, num_stages=stages,
                )
                for layer in range(case.pool.shape[1])
            ]  # fmt: skip
            try:
                seconds = graph_time_s(calls)
            except Exception as error:  # a variant that does not fit the card's shared memory
                if not tune:
                    raise
                print(f"decode {batch} x {context} {tile, warps, stages, split}: {type(error).__name__}")
                continue
            rows.append(
                {"op": "decode", "batch": batch, "context": context, "tile": tile, "warps": warps, "stages": stages,
                 "splits": split, "us": seconds * 1e6, "of_ceiling": size / seconds / bandwidth}
            )  # fmt: skip
    return rows


def bench_decode_of_codes(bandwidth: float) -> Rows:
    """Decode attention over bf16 KV and over quantized KV, one layer at a time; bytes: of the KV, scales included."""
    rows: Rows = []
    count = torch.cuda.get_device_properties(0).multi_processor_count
    for batch, context in ((64, 8192), (16, 8192), (64, 1024)):
        case = _case([context] * batch)
        q = _normal(batch, LLAMA_8B.num_q_heads, LLAMA_8B.head_dim)
        split = choose_splits(batch, LLAMA_8B.num_kv_heads, PROGRAMS * count)
        split_codes = choose_splits(batch, LLAMA_8B.num_kv_heads, PROGRAMS_OF_PAIRS * count)
        where = (case.tables, case.rows, case.lens)
        layers = range(case.pool.shape[1])
        plain = [partial(paged_decode, q, case.pool[:, layer], *where, scale=0.088, splits=split) for layer in layers]
        base = graph_time_s(plain)
        elements = batch * context * 2 * LLAMA_8B.num_kv_heads
        told: dict[str, Any] = {"op": "decode of KV", "batch": batch, "context": context}
        ceiling = elements * LLAMA_8B.head_dim * 2 / base / bandwidth
        rows.append(told | {"kv": "bfloat16", "splits": split, "us": base * 1e6, "of_ceiling": ceiling})
        heads, dim = LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
            codec = SlotCodec(heads, dim, dtype, heads * (dim + 4))
            slots = torch.empty((*case.pool.shape[:4], codec.slot_bytes), dtype=torch.uint8, device="cuda")
            for block in range(0, len(slots), 1024):
                some = case.pool[block : block + 1024]
                slots[block : block + 1024] = codec.encode(some.flatten(0, 3)).view(*some.shape[:4], -1)
            calls = [
                partial(
                    paged_decode, q, codec.codes_of(slots[:, layer]), *where, scales=codec.scales_of(slots[:, layer]),
                    scale=0.088, splits=split_codes,
                )
                for layer in layers
            ]  # fmt: skip
            seconds = graph_time_s(calls)
            rows.append(
                told
                | {"kv": str(dtype).removeprefix("torch."), "splits": split_codes, "us": seconds * 1e6,
                   "faster": round(base / seconds, 3), "of_ceiling": elements * (dim + 4) / seconds / bandwidth}
            )  # fmt: skip
    return rows


def bench_prefill(peak: float, *, tune: bool) -> Rows:
    rows: Rows = []
    for count, context in ((2048, 0), (8192, 0), (2048, 6144)):
        case = _case([count + context])
        q = _normal(count, LLAMA_8B.num_q_heads, LLAMA_8B.head_dim)
        chunks, starts = chunk_rows(case, [count])
        flops = 4 * LLAMA_8B.num_q_heads * LLAMA_8B.head_dim * (count * context + count * (count + 1) // 2)
        variants: list[tuple[int, int | None, int | None, int | None]] = [(128, None, None, None)]
        if tune:
            variants += list(PREFILL_SHAPES)
        for size, tile, warps, stages in variants:
            work = prefill_tiles([count], starts, LLAMA_8B.group, size)
            tiles = torch.tensor(work, dtype=torch.int32, device="cuda").view(-1, 2)
            call = partial(
                paged_prefill, q, case.kv, case.tables, chunks, tiles, scale=0.088, rows=size, tile=tile,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
            try:
                seconds = graph_time_s([call] * 4)
            except Exception as error:
                if not tune:
                    raise
                print(f"prefill {count} {size, tile, warps, stages}: {type(error).__name__}")
                continue
            rows.append(
                {"op": "prefill", "tokens": count, "context": context, "rows": size, "tile": tile, "warps": warps,
                 "stages": stages, "us": seconds * 1e6, "of_ceiling": flops / seconds / peak}
            )  # fmt: skip
        if context == 0:
            heads = (LLAMA_8B.num_q_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.num_kv_heads)
            dense = [_normal(1, n, count, LLAMA_8B.head_dim) for n in heads]
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                with sdpa_kernel(backend):
                    seconds = graph_time_s([partial(_causal, *dense)] * 4)
                rows.append(
                    {"op": f"sdpa {backend.name}", "tokens": count, "context": 0, "us": seconds * 1e6,
                     "of_ceiling": flops / seconds / peak}
                )  # fmt: skip
    return rows


def bench_fused(bandwidth: float) -> Rows:
    """Elementwise kernels: bytes read and written over the read bandwidth. Small batches measure latency, not bytes."""
    rows: Rows = []
    heads, kv_heads, dim = LLAMA_8B.num_q_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim
    width = (heads + 2 * kv_heads) * dim
    kv = _case([8192]).pool[:, 0]
    cos, sin = (torch.rand(8192, dim // 2, device="cuda") for _ in range(2))
    for count in (1, 64, 256, 2048):
        x, residual, weight = _normal(count, HIDDEN), _normal(count, HIDDEN), _normal(HIDDEN)
        gate_up, qkv, logits = _normal(count, 2 * FFN), _normal(count, width), _normal(min(count, 256), VOCAB)
        at = torch.arange(count, device="cuda", dtype=torch.int32)
        rope = partial(rope_write, qkv, kv, cos, sin, at, at, num_q_heads=heads)
        ops: list[tuple[str, Callable[[], object], int]] = [
            ("rms_norm + residual", partial(rms_norm, x, weight, 1e-5, residual), 4 * count * HIDDEN * 2),
            *((f"{a} * up", partial(gate_mul, gate_up, a), 3 * count * FFN * 2) for a in ACTIVATIONS),
            ("rope + KV write", rope, 2 * count * width * 2),
            ("sample greedy", partial(sample_rows, logits), logits.numel() * 2),
        ]
        for name, call, size in ops:
            seconds = graph_time_s([call] * 20)
            rows.append({"op": name, "rows": count, "us": seconds * 1e6, "of_ceiling": size / seconds / bandwidth})
    return rows


def bench_pack(bandwidth: float) -> Rows:
    """2,048 tokens of all 32 layers, 256 MiB; and 128 tokens, one 16 MiB slab. Bytes: read and written."""
    rows: Rows = []
    pool = _normal(512, 32, 2, 16, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim)
    data = kv_pack.pool_bytes(pool)
    order = torch.randperm(512, device="cuda").to(torch.int32)
    for tokens in (128, 2048):
        slab = torch.empty(tokens * 64 * 2048, dtype=torch.uint8, device="cuda")
        for name, op in (("pack", pack_blocks), ("unpack", unpack_blocks)):
            calls = [partial(op, data, order[i * 128 : i * 128 + tokens // 16], tokens, slab) for i in range(4)]
            seconds = graph_time_s(calls)
            size = 2 * slab.numel()
            rows.append({"op": name, "tokens": tokens, "us": seconds * 1e6, "of_ceiling": size / seconds / bandwidth})
    return rows


def bench_linear(bandwidth: float) -> Rows:
    """cuBLAS at the model's projections: bytes of the weight over the read bandwidth."""
    rows: Rows = []
    shapes = {"qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
    for name, (outputs, inputs) in shapes.items():
        copies = max(2, -(-LAYERS_IN_L2_BYTES // (outputs * inputs * 2)))
        weights = [_normal(outputs, inputs) for _ in range(copies)]
        for count in (1, 8, 64, 256):
            x = _normal(count, inputs)
            seconds = graph_time_s([partial(torch.nn.functional.linear, x, w) for w in weights])
            size = outputs * inputs * 2
            rows.append(
                {"op": f"cublas {name}", "rows": count, "us": seconds * 1e6, "of_ceiling": size / seconds / bandwidth}
            )
    return rows


def _line(row: dict[str, Any]) -> str:
    facts = " ".join(f"{k}={v}" for k, v in row.items() if k not in ("op", "us", "of_ceiling") and v is not None)
    return f"{row['op']:<24}{facts:<62}{row['us']:>10.1f} us {row['of_ceiling']:>7.1%}"


def _best(rows: Rows) -> Rows:
    """The default and the three fastest variants of each shape."""
    shapes: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        tokens = row.get("tokens", row.get("rows"))
        key = (row["op"], row.get("batch"), tokens, row.get("context"))
        shapes.setdefault(key, []).append(row)
    return [r for group in shapes.values() for r in [*group[:1], *sorted(group[1:], key=lambda r: r["us"])[:3]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--tune", action="store_true", help="time many launch shapes of the attention kernels")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth, peak = read_bandwidth(), matmul_peak()
    facts = {**machine(), "read_tb_s": bandwidth / 1e12, "matmul_tflop_s": peak / 1e12}
    print(facts, flush=True)
    rows = bench_fused(bandwidth) + bench_pack(bandwidth) + bench_linear(bandwidth)
    rows += bench_prefill(peak, tune=args.tune) + bench_decode(bandwidth, tune=args.tune)
    rows += bench_decode_of_codes(bandwidth)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    print("\n".join(_line(row) for row in _best(rows)))


if __name__ == "__main__":
    main()
