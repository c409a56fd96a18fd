"""Our engine in float32 and in bfloat16 on the compiled CPU kernels, in one process, in turns.

    python -P -m diptych.bench dtypes [--threads 1] [--rounds 5] [--out FILE]

    decode, batch N   ragged prompts; tokens/s after every request has its first token
    prefill N         one prompt of N tokens, up to its first token

Both dtypes get the same prompts; which comes first changes every round, so that load on the machine affects both. Medians,
with the least and the greatest round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from diptych.bench.engine.vs_transformers import (
    BLOCK_SIZE,
    DEFAULT_MODEL,
    Generate,
    Scenario,
    our_side,
    ragged_prompts,
)
from diptych.bench.result import surroundings, write
from diptych.common.paths import cache_dir
from diptych.engine.exec.model_runner import TorchModelRunner

DTYPES = ("float32", "bfloat16")
SHORTEST, LONGEST = 16, 256


@dataclass(frozen=True, slots=True)
class Row:
    """rates: tokens/s of each round, by dtype. same_ids: requests with the same ids in both dtypes, of the last round."""

    scenario: str
    rates: dict[str, list[float]]
    same_ids: int
    requests: int

    @property
    def ratio(self) -> float:
        """Of the rounds, bfloat16 to float32: their median."""
        pairs = zip(self.rates["float32"], self.rates["bfloat16"], strict=True)
        return statistics.median(half / whole for whole, half in pairs)

    def line(self) -> str:
        cells = [
            f"{statistics.median(rates):8.1f} ({min(rates):.1f} - {max(rates):.1f})"
            for rates in (self.rates[name] for name in DTYPES)
        ]
        return f"{self.scenario:18s} {'   '.join(cells)}   {self.ratio:.2f}   same ids {self.same_ids}/{self.requests}"


def measure(sides: dict[str, Generate], scenario: Scenario, rounds: int) -> Row:
    rates: dict[str, list[float]] = {name: [] for name in sides}
    ids: dict[str, list[list[int]]] = {}
    for number in range(rounds):
        for name in sides if number % 2 == 0 else reversed(sides):
            outcome = sides[name](scenario.prompts, scenario.outputs)
            rates[name].append(scenario.rate(outcome))
            ids[name] = outcome.ids
    same = sum(a == b for a, b in zip(*ids.values(), strict=True))
    return Row(scenario.name, rates, same, len(scenario.prompts))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(cache_dir() / "models" / DEFAULT_MODEL), help="a local folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    longest = max([LONGEST + args.new_tokens, *args.prefill]) + 1
    num_blocks = max([1, *args.batches]) * -(-longest // BLOCK_SIZE) + 8
    runners = {
        name: TorchModelRunner.load(
            Path(args.model), dtype=name, num_blocks=num_blocks, num_threads=args.threads, backend="native"
        )
        for name in DTYPES
    }
    vocab_size = runners["float32"].vocab_size
    sides = {name: our_side(runner) for name, runner in runners.items()}
    for side in sides.values():
        side(ragged_prompts(2, 8, 16, vocab_size), [2, 2])
    scenarios = [
        Scenario(
            "decode",
            f"decode, batch {count}",
            ragged_prompts(count, SHORTEST, LONGEST, vocab_size),
            [args.new_tokens] * count,
        )
        for count in args.batches
    ] + [
        Scenario("prefill", f"prefill {size}", ragged_prompts(1, size, size, vocab_size), [1]) for size in args.prefill
    ]
    rows = []
    for scenario in scenarios:
        rows.append(measure(sides, scenario, args.rounds))
        print(rows[-1].line(), flush=True)
    if args.out is not None:
        record = {
            "command": "python -P -m diptych.bench dtypes",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": surroundings(),
            "torch": torch.__version__,
            "model": Path(args.model).name,
            "threads": args.threads,
            "rows": [asdict(row) | {"ratio": round(row.ratio, 3)} for row in rows],
        }
        write(args.out, record)


if __name__ == "__main__":
    main()
