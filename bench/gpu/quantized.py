"""Steps of Llama-3.1-8B's shape with quantized weights, beside the same in bf16, in turns on one GPU.

    python -m diptych.bench.gpu.quantized --out bench/results/gpu-quantized.json

Weights are random, rounded to the nearest code; the head stays in bf16, as checkpoints leave it. decode: the graph alone, by
CUDA events. prefill: a whole step of one prompt, wall time. Every round takes each method once.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diptych.bench.gpu.step import BLOCK_SIZE, GREEDY, LLAMA_8B, _seqs, graph_seconds, random_weights
from diptych.bench.kernels.timing import machine, read_bandwidth
from diptych.engine.exec.cuda.quantized import keep_quantized
from diptych.engine.exec.linear import DenseLinear
from diptych.engine.exec.loading import PlacedModel
from diptych.engine.exec.methods.base import LinearWeights, LoadedLinear
from diptych.engine.exec.methods.quantized import BLOCK, Fp8Weights, Int4Weights, Int8Weights
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.models.registry import describe
from diptych.engine.quantize.rounding import int4_nearest
from diptych.kernels.reference_quant import quantize_rows_ref

GROUP_SIZE = 128


def int8(weight: Tensor) -> Int8Weights:
    return Int8Weights(*quantize_rows_ref(weight, torch.int8), None)


def fp8(weight: Tensor) -> Fp8Weights:
    return Fp8Weights(*quantize_rows_ref(weight, torch.float8_e4m3fn), None, None)


def fp8_blocks(weight: Tensor) -> Fp8Weights:
    (outputs, inputs), size = weight.shape, BLOCK[0]
    tiles = weight.float().view(outputs // size, size, inputs // size, size)
    scales = tiles.abs().amax((1, 3)) / 448.0
    codes = (tiles / scales[:, None, :, None]).clamp(-448, 448).view(outputs, inputs)
    return Fp8Weights(codes.to(torch.float8_e4m3fn), scales, BLOCK, None)


def int4(weight: Tensor) -> Int4Weights:
    groups = int4_nearest(weight.float(), GROUP_SIZE, symmetric=True, dtype=weight.dtype)
    pairs = groups.codes[:, ::2] | groups.codes[:, 1::2] << 4
    return Int4Weights(pairs, groups.scales, groups.zeros, GROUP_SIZE, None, None)


METHODS: dict[str, Callable[[Tensor], LinearWeights]] = {
    "fp8": fp8,
    "fp8-blocks": fp8_blocks,
    "int8": int8,
    "int4": int4,
}


def quantized_model(placed: PlacedModel, method: str) -> PlacedModel:
    """The same weights, those of the layers' linears quantized."""

    def changed(layer: LoadedLinear) -> LoadedLinear:
        assert isinstance(layer, DenseLinear)
        kept = keep_quantized(METHODS[method](layer.weight))
        assert kept is not None
        return kept

    blocks = [
        dataclasses.replace(
            block,
            qkv=changed(block.qkv),
            o=changed(block.o),
            gate_up=changed(block.gate_up),
            down=changed(block.down),
        )
        for block in placed.weights.blocks
    ]
    return dataclasses.replace(placed, weights=dataclasses.replace(placed.weights, blocks=blocks))


def logits_of(runner: TorchModelRunner, length: int) -> Tensor:
    """Of the last of `length` tokens."""
    fused = runner._fused
    assert fused is not None
    [seq] = _seqs(runner, 1, length, GREEDY)
    seq.start, seq.token_ids = 0, [(i * 7919) % runner.description.vocab_size for i in range(length)]
    with torch.inference_mode():
        out = fused.execute([seq], fused.build([seq]), None)
    assert out is not None
    return out.float().clone()


def prefill_seconds(runner: TorchModelRunner, length: int) -> float:
    fused = runner._fused
    assert fused is not None
    [seq] = _seqs(runner, 1, length, GREEDY)
    seq.start, seq.token_ids = 0, [(i * 7919) % runner.description.vocab_size for i in range(length)]
    with torch.inference_mode():
        batch = fused.build([seq])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fused.execute([seq], batch, None)
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    facts: dict[str, Any] = {**machine(), "read_tb_s": read_bandwidth() / 1e12, "layers": args.layers}
    print(facts, flush=True)
    plain = random_weights(describe({**LLAMA_8B, "num_hidden_layers": args.layers}))
    runners: dict[str, TorchModelRunner] = {}
    blocks = max(args.batches) * (1024 // BLOCK_SIZE + 5) + max(args.prompts) // BLOCK_SIZE
    rows: list[dict[str, Any]] = []
    for name in ("bf16", *args.methods):
        placed = plain if name == "bf16" else quantized_model(plain, name)
        runners[name] = TorchModelRunner(
            placed, eos_token_ids=(), num_blocks=blocks, block_size=BLOCK_SIZE, max_model_len=16_384
        )
        runners[name].pool.tensor.normal_()
        facts[f"weights_gb_{name}"] = sum(x.num_bytes for b in placed.weights.blocks for x in b.linears) / 1e9
        gc.collect()
        torch.cuda.empty_cache()
        print(name, "ready", flush=True)
    expected = logits_of(runners["bf16"], 300)
    for name, runner in runners.items():
        got = logits_of(runner, 300)
        error = float((got - expected).norm() / expected.norm())
        print(f"{name}: logits of 300 tokens, {error:.4f} of bf16's away", flush=True)
        rows.append({"method": name, "logits_relative_error": error})
    for batch in args.batches:
        rows += _in_turns(
            runners,
            lambda runner, batch=batch: graph_seconds(runner, _seqs(runner, batch, 1024, GREEDY), repeats=12),
            {"step": "decode", "batch": batch, "context": 1024},
            args.rounds,
        )
    for length in args.prompts:
        rows += _in_turns(
            runners, lambda runner, length=length: prefill_seconds(runner, length), {"step": "prefill", "tokens": length},
            args.rounds + 2,
        )  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


def _in_turns(
    runners: dict[str, TorchModelRunner], measured: Callable[..., float], what: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds + 1):
        for name, runner in runners.items():
            times[name].append(measured(runner))
    return _rows({name: some[1:] for name, some in times.items()}, what)


def _rows(times: dict[str, Sequence[float]] | dict[str, list[float]], what: dict[str, Any]) -> list[dict[str, Any]]:
    base = statistics.median(times["bf16"])
    rows = []
    for name, some in times.items():
        ms = statistics.median(some) * 1e3
        rows.append(
            {**what, "method": name, "ms": ms, "ms_of_rounds": [t * 1e3 for t in some], "faster": base * 1e3 / ms}
        )
        print(f"{what} {name:<12} {ms:9.3f} ms  {rows[-1]['faster']:.2f}x", flush=True)
    return rows


if __name__ == "__main__":
    main()
