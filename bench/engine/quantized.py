"""Decode with quantized weights on the compiled CPU kernels beside float32, in one process.

    python -m diptych.bench.engine.quantized [--rounds 5] [--batches 1 8 32]

The same model is loaded with each kind of weights: `fp32`, values that bfloat16 does not hold (each is moved by a
thousandth); `bf16`, rounded to bfloat16 and computed with in float32; `int8` and `int4`, rounded to the nearest code, with
a head of bfloat16 values. All sides get the same prompts, sample greedily and take turns, each round in another
order. Ratios are medians over the rounds, of tokens/s beside `fp32`'s of the same round, and of tokens in a second of CPU time,
prompts included: what other work on the machine takes away does not count there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych.bench.engine.vs_transformers import BLOCK_SIZE, DEFAULT_MODEL, Generate, our_side, ragged_prompts
from diptych.bench.result import RESULTS, spread, surroundings, write
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.quantize.methods import packed_groups
from diptych.engine.quantize.rounding import int4_nearest, int8_rows
from diptych.engine.quantize.settings import QuantizeSettings

BASE = "fp32"
KINDS = (BASE, "bf16", "int8", "int4")
GROUP = 64
"""Of int4: it divides the sizes of the default model."""
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_MOVED = 1 + 2**-10


@dataclass(frozen=True, slots=True)
class Point:
    """rounds: tokens/s after all first tokens. cpu_ms: of a new token over the whole run. ratio, cpu_ratio: to fp32, medians of
    the rounds'."""

    kind: str
    batch: int
    threads: int
    rounds: list[float]
    cpu_ms: list[float]
    ratio: float
    cpu_ratio: float


def stored(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """What a checkpoint has of a weight in bfloat16 values, by the ends of names."""
    if kind == "int8":
        rows = int8_rows(weight.float())
        return {"weight": rows.codes, "weight_scale": rows.scales}
    groups = int4_nearest(weight.float(), GROUP, symmetric=True, dtype=weight.dtype)
    return packed_groups(groups, symmetric=True)


def write_kind(kind: str, model: Path, folder: Path) -> Path:
    """A folder of the model with weights of this kind."""
    folder.mkdir()
    config, tensors = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    if kind == BASE:
        tensors = {name: tensor.float() * _MOVED for name, tensor in tensors.items()}
    elif kind in ("int8", "int4"):
        config["quantization_config"] = QuantizeSettings(kind).config(GROUP)
        for layer in [name.removesuffix(".weight") for name in tensors if name.split(".")[-2] in _LINEARS]:
            made = stored(tensors.pop(f"{layer}.weight"), kind)
            tensors |= {f"{layer}.{end}": tensor.contiguous() for end, tensor in made.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(
    sides: dict[str, Generate], prompts: list[list[int]], new_tokens: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """By kind, of each round: tokens/s, and CPU milliseconds of a new token."""
    rates: dict[str, list[tuple[float, float]]] = {kind: [] for kind in sides}
    order = list(sides)
    for _ in range(rounds):
        for kind in order:
            before = time.process_time()
            rate = sides[kind](prompts, [new_tokens] * len(prompts)).decode_rate()
            spent_ms = (time.process_time() - before) * 1e3
            rates[kind].append((rate, spent_ms / (len(prompts) * new_tokens)))
        order = order[1:] + order[:1]
    return rates


def run(args: argparse.Namespace, save: Callable[[list[Point]], None]) -> None:
    model, points = Path(args.model), list[Point]()
    if not (model / "config.json").exists():
        raise ConfigError("model", str(model), "no model there; `make model` fetches the default one")
    num_blocks = max(args.batches) * -(-(args.longest_prompt + args.new_tokens + 1) // BLOCK_SIZE) + 8
    with tempfile.TemporaryDirectory() as made:
        runners = {
            kind: TorchModelRunner.load(
                write_kind(kind, model, Path(made) / kind), num_blocks=num_blocks, block_size=BLOCK_SIZE,
                num_threads=args.threads[0], backend="native",
            )
            for kind in KINDS
        }  # fmt: skip
        sides = {kind: our_side(runner) for kind, runner in runners.items()}
        vocab_size = runners[BASE].vocab_size
        for threads in args.threads:
            torch.set_num_threads(threads)
            for batch in args.batches:
                prompts = ragged_prompts(batch, args.shortest_prompt, args.longest_prompt, vocab_size)
                rates = measure(sides, prompts, args.new_tokens, args.rounds)
                base, base_ms = zip(*rates[BASE], strict=True)
                for kind, found in rates.items():
                    own, own_ms = (list(values) for values in zip(*found, strict=True))
                    ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
                    cpu_ratio = statistics.median(b / a for a, b in zip(own_ms, base_ms, strict=True))
                    points.append(Point(kind, batch, threads, own, own_ms, ratio, cpu_ratio))
                    values = spread(own)
                    span = f"{values['median']:7.1f} tokens/s ({values['min']:.1f} - {values['max']:.1f})"
                    ratios = f"{ratio:.2f} of {BASE}, {cpu_ratio:.2f} by CPU time"
                    print(f"{threads} threads, batch {batch:2}, {kind}: {span}, {ratios}", flush=True)
                save(points)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(cache_dir() / "models" / DEFAULT_MODEL), help="a local folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--shortest-prompt", type=int, default=16)
    parser.add_argument("--longest-prompt", type=int, default=64)
    parser.add_argument("--out", help="JSON file; default: a new one in bench/results")
    args = parser.parse_args(argv)
    if min([args.rounds, *args.threads, *args.batches]) < 1 or args.new_tokens < 2:
        parser.error("rounds, threads and batches must be at least 1, new tokens at least 2")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    path = Path(args.out or RESULTS / f"engine-quantized-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    settings = {k: v for k, v in vars(args).items() if k not in ("model", "out")} | {"model": Path(args.model).name}
    facts = surroundings()

    def save(points: list[Point]) -> None:
        record = {
            "command": "python -m diptych.bench.engine.quantized",
            "machine": facts,
            "settings": settings,
            "points": [asdict(point) for point in points],
        }
        write(path, record)

    run(args, save)


if __name__ == "__main__":
    main()
