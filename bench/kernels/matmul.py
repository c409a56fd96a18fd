"""Linear layers of few rows at Llama-3.1-8B's shapes: our kernel with several tile shapes and cuBLAS, in the same run.

python -m diptych.bench.kernels.matmul --out bench/results/matmul.json
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from diptych.bench.kernels.timing import graph_time_s, machine, read_bandwidth
from diptych.kernels.triton_matmul import MatmulShape, small_matmul
from diptych.kernels.triton_norm import gate_mul

SHAPES = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28_672, 4096, True),
    "down": (4096, 14_336, False),
    "lm_head": (128_256, 4096, False),
}
CUTS = [
    MatmulShape(*cut)
    for cut in (
        (16, 128, 2, 6), (16, 256, 2, 4), (16, 256, 4, 4), (16, 512, 4, 3), (16, 512, 8, 4), (32, 128, 4, 6),
        (32, 256, 4, 4), (32, 256, 8, 4), (32, 512, 8, 3), (64, 128, 4, 4), (64, 128, 8, 4), (64, 256, 8, 3),
    )
]  # fmt: skip
OUT_OF_L2_BYTES = 256 << 20


def _cublas(x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    out = linear(x, weight)
    return gate_mul(out) if silu else out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64])
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    facts: dict[str, Any] = {**machine(), "read_tb_s": bandwidth / 1e12}
    rows: list[dict[str, Any]] = []
    print(facts, flush=True)
    for name, (outputs, inputs, silu) in SHAPES.items():
        size = outputs * inputs * 2
        weights = [
            torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16).mul_(inputs**-0.5)
            for _ in range(max(2, -(-OUT_OF_L2_BYTES // size)))
        ]
        for count in args.rows:
            x = torch.randn(count, inputs, device="cuda", dtype=torch.bfloat16)
            found: list[tuple[float, str]] = []
            seconds = graph_time_s([partial(_cublas, x, w, silu) for w in weights])
            found.append((seconds, "cublas"))
            for cut in CUTS:
                if count > 16 and cut.block_n * cut.block_k > 8192:
                    continue
                try:
                    seconds = graph_time_s([partial(small_matmul, x, w, silu=silu, shape=cut) for w in weights])
                except Exception as error:  # a tile shape that does not fit the card's shared memory
                    print(f"{name} {count} {cut}: {type(error).__name__}")
                    torch.cuda.synchronize()
                    continue
                found.append((seconds, f"{cut.block_n}x{cut.block_k} w{cut.num_warps} s{cut.num_stages}"))
            rows += [
                {"op": name, "rows": count, "kernel": kernel, "us": t * 1e6, "of_ceiling": size / t / bandwidth}
                for t, kernel in found
            ]
            best = "  ".join(f"{kernel} {t * 1e6:.1f}" for t, kernel in [found[0], *sorted(found[1:])[:4]])
            print(f"{name:<8}{count:>4}  floor {size / bandwidth * 1e6:>6.1f}  {best}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
