"""The runner's steps on one GPU at Llama-3.1-8B's shape with random weights, compared with the card's limits.

    python -m diptych.bench.gpu.step --out bench/results/gpu-step.json

decode    one step of `batch` sequences at `context` tokens each: laid out, sent, replayed as a CUDA graph, sampled,
          ids read back. wall: between returns of execute(); device: the graph alone. Floor: (weights + KV bytes) / read
          bandwidth.
prefill   one chunk of `tokens`, launched kernel by kernel. Floor: FLOPs of the linear layers and of attention / cuBLAS's
          peak.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from diptych.bench.kernels.timing import machine, matmul_peak, read_bandwidth
from diptych.common.sampling import SamplingParams
from diptych.engine.exec.backends.registry import plan_for
from diptych.engine.exec.cuda import decoder
from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.exec.loading import PlacedModel, load_weights
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.models.description import ModelDescription
from diptych.engine.exec.models.registry import describe
from diptych.engine.messages import ScheduledSeq

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SEEDED = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.95, seed=3)
Rows = list[dict[str, Any]]


class RandomTensors:
    """Implements engine.exec.loading.WholeModel: every tensor is random bf16 on the GPU, scaled so that activations stay near
    one; norms are ones."""

    def take(
        self, name: str, shape: tuple[int, ...], *, as_stored: bool = False, where: tuple[slice, ...] = ()
    ) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device="cuda", dtype=torch.bfloat16)
        scale = 1.0 if "embed" in name else shape[1] ** -0.5
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None

    def file_of(self, name: str) -> str:
        return name

    def drop(self, suffixes: Iterable[str]) -> None:
        pass

    def finish(self) -> None:
        pass


def random_weights(description: ModelDescription) -> PlacedModel:
    """bf16 on the GPU."""
    kv = kv_format_of(description, block_size=BLOCK_SIZE, dtype="bfloat16")
    return load_weights(RandomTensors(), plan_for(description, kv, device_type="cuda", dtype=torch.bfloat16))


def _seqs(runner: TorchModelRunner, batch: int, context: int, params: SamplingParams) -> list[ScheduledSeq]:
    """`batch` sequences whose last token is at position context - 1; blocks are assigned at random."""
    blocks = -(-(context + 64) // BLOCK_SIZE)
    order = torch.randperm(runner.num_blocks)[: batch * blocks].view(batch, blocks).tolist()
    return [
        ScheduledSeq(f"bench-{batch}-{context}-{i}", [i + 1], context - 1, (table,), True, params, 0)
        for i, table in enumerate(order)
    ]


def _steps(runner: TorchModelRunner, seqs: Sequence[ScheduledSeq], count: int) -> list[float]:
    """Wall seconds of `count` steps; every step's token is the next one's input."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        result = runner.execute(seqs)
        for seq, row in zip(seqs, result.token_ids, strict=True):
            if not row:
                raise AssertionError("a step without a token")
            seq.start, seq.token_ids = seq.start + 1, list(row)
        times.append(time.perf_counter() - begin)
    return times


def bench_decode(runner: TorchModelRunner, bandwidth: float, shapes: Sequence[tuple[int, int]]) -> Rows:
    rows: Rows = []
    model = runner.description
    for batch, context in shapes:
        for name, params in (("greedy", GREEDY), ("top_p", SEEDED)):
            if name == "top_p" and batch != 64:
                continue
            seqs = _seqs(runner, batch, context, params)
            _steps(runner, seqs, 8)
            wall = statistics.median(_steps(runner, seqs, 24))
            weights = 2 * (model.layer_weights + model.head_weights)
            floor = (weights + batch * context * runner.kv_bytes_per_token) / bandwidth
            device = graph_seconds(runner, seqs)
            rows.append(
                {"step": "decode", "batch": batch, "context": context, "sampling": name, "wall_ms": wall * 1e3,
                 "device_ms": device * 1e3, "floor_ms": floor * 1e3, "of_floor": wall / floor,
                 "host_share": 1 - device / wall}
            )  # fmt: skip
    return rows


def graph_seconds(runner: TorchModelRunner, seqs: Sequence[ScheduledSeq], repeats: int = 16) -> float:
    """Median device seconds of one step's replay, by CUDA events."""
    fused = runner._fused
    assert fused is not None
    times: list[float] = []
    with torch.inference_mode():
        for _ in range(repeats):
            batch = fused.build(seqs)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            fused.execute(seqs, batch, None)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def bench_prefill(runner: TorchModelRunner, peak: float, lengths: Sequence[int]) -> Rows:
    rows: Rows = []
    model = runner.description
    for length in lengths:
        [seq] = _seqs(runner, 1, length, GREEDY)
        seq.start, seq.token_ids = 0, [(i * 7919) % model.vocab_size for i in range(length)]
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            runner.execute([seq])
            times.append(time.perf_counter() - begin)
        wall = statistics.median(times[2:])
        attention = 2 * sum(b.attention.q_size for b in model.blocks) * length * (length + 1)
        flops = 2 * model.layer_weights * length + attention + 2 * model.head_weights
        rows.append(
            {"step": "prefill", "tokens": length, "wall_ms": wall * 1e3, "floor_ms": flops / peak * 1e3,
             "of_floor": wall * peak / flops, "tokens_per_s": length / wall}
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ours", help="projections that may take our kernel: gate_up,o; none: -")
    parser.add_argument("--quick", action="store_true", help="decode at batch 1, 8 and 64 only")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.ours is not None:
        decoder.PROJECTIONS = tuple(args.ours.strip("-").split(",")) if args.ours.strip("-") else ()
    bandwidth, peak = read_bandwidth(), matmul_peak()
    facts: dict[str, Any] = {**machine(), "read_tb_s": bandwidth / 1e12, "matmul_tflop_s": peak / 1e12}
    facts["ours"] = decoder.PROJECTIONS
    weights = random_weights(describe({**LLAMA_8B, "num_hidden_layers": args.layers}))
    begin = time.perf_counter()
    num_blocks = 19_500  # 41 GB: 256 sequences of 1,088 tokens, and some
    runner = TorchModelRunner(
        weights, eos_token_ids=(), num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=16_384
    )
    facts["warm_up_s"] = time.perf_counter() - begin
    runner.pool.tensor.normal_()
    print(facts, flush=True)
    shapes = [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (32, 8192), (1, 8192)]
    rows = bench_decode(runner, bandwidth, shapes[: 3 if args.quick else None])
    rows += [] if args.quick else bench_prefill(runner, peak, (512, 2048, 8192))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
