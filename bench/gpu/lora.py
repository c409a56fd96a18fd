"""Steps of Llama-3.1-8B's shape with eight adapters, beside the same without, in turns on one GPU. Takes under two minutes.

    python -P -m diptych.bench gpu-lora --out bench/results/gpu-lora.json

Weights and adapters are random, in bf16; adapters change every linear layer.

bare     a model without slots for adapters
base     a model with slots; no row has an adapter
one      all rows have the same adapter
eight    row i has adapter i % 8; a prompt's rows have one
half     as eight, every other row (or prompt) without an adapter

decode: the graph alone, by CUDA events, at 1,024 tokens. prefill: whole steps of prompts of 512 tokens (graphs) and of 2,048,
and of eight prompts of 256. `of_bare`: throughput beside `bare`; the goal for `eight` is 0.8.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diptych.bench.gpu.step import BLOCK_SIZE, GREEDY, LLAMA_8B, RandomTensors, _seqs, graph_seconds
from diptych.bench.kernels.timing import machine, read_bandwidth
from diptych.engine.exec.backends.registry import plan_for
from diptych.engine.exec.cuda.adapted import AdaptedLinear
from diptych.engine.exec.kv_pool import kv_format_of
from diptych.engine.exec.loading import PlacedModel, load_weights
from diptych.engine.exec.lora import LayerAdapter, LoraModel, LoraSizes, LoraSlots
from diptych.engine.exec.methods.base import LoadedLinear
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.exec.models.registry import describe
from diptych.engine.messages import ScheduledSeq

ADAPTERS = 8
Slots = Callable[[int], int]
MIXTURES: dict[str, Slots] = {
    "base": lambda i: -1,
    "one": lambda i: 0,
    "eight": lambda i: i % ADAPTERS,
    "half": lambda i: i % ADAPTERS if i % 2 else -1,
}


def fill(lora: LoraModel, rank: int) -> None:
    """Every slot, with random adapters that change a layer's results by about a tenth."""
    for layer, slots in lora._layers:
        assert isinstance(slots, LoraSlots), "a GPU's"
        for slot in range(slots.num_slots):
            a = torch.randn((len(layer.parts), rank, slots.a.shape[3]), device="cuda") * slots.a.shape[3] ** -0.5
            b = torch.randn((slots.b.shape[1], rank), device="cuda") * 0.1 * rank**-0.5
            slots.install(slot, LayerAdapter(a.to(slots.a.dtype), b.to(slots.b.dtype), (rank,) * len(layer.parts)))


def without_slots(placed: PlacedModel) -> PlacedModel:
    """The same weights."""

    def bare(layer: LoadedLinear) -> LoadedLinear:
        assert isinstance(layer, AdaptedLinear)
        return layer.base

    blocks = [
        dataclasses.replace(
            block, qkv=bare(block.qkv), o=bare(block.o), gate_up=bare(block.gate_up), down=bare(block.down)
        )
        for block in placed.weights.blocks
    ]
    return dataclasses.replace(placed, weights=dataclasses.replace(placed.weights, blocks=blocks, lora=None))


def prompts(runner: TorchModelRunner, count: int, length: int) -> list[ScheduledSeq]:
    seqs = _seqs(runner, count, length, GREEDY)
    for i, seq in enumerate(seqs):
        seq.start, seq.token_ids = 0, [(i + k * 7919) % runner.description.vocab_size for k in range(length)]
    return seqs


def in_turns(
    runners: dict[str, TorchModelRunner],
    make: Callable[[TorchModelRunner], list[ScheduledSeq]],
    what: dict[str, Any],
    rounds: int,
) -> list[dict[str, Any]]:
    """Every round takes each mixture once; the first is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ("bare", *MIXTURES)}
    for _ in range(rounds + 1):
        for name, some in times.items():
            runner = runners["bare" if name == "bare" else "slots"]
            seqs = make(runner)
            for i, seq in enumerate(seqs):
                seq.adapter = -1 if name == "bare" else MIXTURES[name](i)
            some.append(graph_seconds(runner, seqs, repeats=8))
    bare = statistics.median(times["bare"][1:])
    rows = []
    for name, some in times.items():
        taken = statistics.median(some[1:])
        rows.append(
            {**what, "mixture": name, "ms": taken * 1e3, "ms_of_rounds": [t * 1e3 for t in some[1:]], "of_bare": bare / taken}
        )  # fmt: skip
        print(f"{what} {name:<6} {taken * 1e3:9.3f} ms  {bare / taken:.3f} of bare", flush=True)
    return rows


def check(runner: TorchModelRunner) -> dict[str, float]:
    """Logits of a row with adapter 0, whatever is beside it; and what the adapter changes. Relative errors."""
    fused = runner._fused
    assert fused is not None

    def logits(slots: Sequence[int]) -> torch.Tensor:
        seqs = prompts(runner, len(slots), 48)
        for seq, slot in zip(seqs, slots, strict=True):
            seq.adapter, seq.token_ids = slot, seqs[0].token_ids
        with torch.inference_mode():
            out = fused.execute(seqs, fused.build(seqs), None)
        assert out is not None
        return out[0].float().clone()

    alone, mixed, base = logits([0]), logits([0, 3, -1]), logits([-1])
    found = {
        "in_company": float((alone - mixed).norm() / alone.norm()),
        "without_adapter": float((alone - base).norm() / alone.norm()),
    }
    print("logits of a row with an adapter, relative differences:", found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-invariant", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    sizes = LoraSizes(ADAPTERS, args.rank)
    description = describe({**LLAMA_8B, "num_hidden_layers": args.layers})
    kv = kv_format_of(description, block_size=BLOCK_SIZE, dtype="bfloat16")
    plan = plan_for(
        description, kv, device_type="cuda", dtype=torch.bfloat16, wanted="triton", batch_invariant=args.batch_invariant,
        loras=sizes,
    )  # fmt: skip
    placed = load_weights(RandomTensors(), plan, loras=sizes)
    lora = placed.weights.lora
    assert lora is not None
    with torch.inference_mode():
        fill(lora, args.rank)
    facts: dict[str, Any] = {
        **machine(), "read_tb_s": read_bandwidth() / 1e12, "layers": args.layers, "rank": args.rank, "adapters": ADAPTERS,
        "batch_invariant": args.batch_invariant, "slots_gb": lora.num_bytes / 1e9,
    }  # fmt: skip
    print(facts, flush=True)
    blocks = max(*args.batches, 8) * (1024 // BLOCK_SIZE + 5) + 4096 // BLOCK_SIZE
    runners: dict[str, TorchModelRunner] = {}
    for name, model in (("slots", placed), ("bare", without_slots(placed))):
        start = time.monotonic()
        runners[name] = TorchModelRunner(
            model, eos_token_ids=(), num_blocks=blocks, block_size=BLOCK_SIZE, max_model_len=4096,
            graph_sizes=sorted(args.batches), chunk_graphs=((0, 512),),
        )  # fmt: skip
        facts[f"ready_s_{name}"] = time.monotonic() - start
        runners[name].pool.tensor.normal_()
        print(name, f"ready in {facts[f'ready_s_{name}']:.1f} s", flush=True)
    facts["logits"] = check(runners["slots"])
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        what = {"step": "decode", "batch": batch, "context": 1024}
        rows += in_turns(runners, lambda runner, n=batch: _seqs(runner, n, 1024, GREEDY), what, args.rounds)  # type: ignore[misc]
    for count, length in ((1, 512), (1, 2048), (8, 256)):
        what = {"step": "prefill", "prompts": count, "tokens": length}
        rows += in_turns(runners, lambda runner, n=count, m=length: prompts(runner, n, m), what, args.rounds)  # type: ignore[misc]
    facts["seconds"] = time.monotonic() - began
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
