"""Our engine (production scheduler and torch runner, offline) against transformers' generate, in one process.

    python -m diptych.engine.exec.bench.bench_vs_transformers [--quick]

Both sides get the same ragged prompts at once and draw greedily without EOS. Decode is what comes after the moment when every
request has its first token; prefill is the time up to the first token. Runs alternate, and the side that goes first
changes every round, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from diptych.common.block_identity import IdentityHeader
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.bench.report import Row, machine, make_row, table
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.messages import EngineRequest
from diptych.engine.offline import OfflineEngine

BLOCK_SIZE = 16
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Outcome:
    """ids: new ids of each request. times: when each request's tokens came, seconds from the start."""

    ids: list[list[int]]
    times: list[list[float]]

    def prefill_s(self) -> float:
        return max(times[0] for times in self.times)

    def decode_rate(self) -> float:
        """Tokens per second after every request has its first token."""
        begin, end = self.prefill_s(), max(times[-1] for times in self.times)
        return sum(at > begin for times in self.times for at in times) / (end - begin)


Generate = Callable[[Sequence[list[int]], int], Outcome]
"""(prompts, new tokens each) -> Outcome."""


def ragged_prompts(count: int, shortest: int, longest: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Lengths spread evenly from shortest to longest, in random order; the same ids every time."""
    rng = random.Random(seed)
    lengths = [longest - (longest - shortest) * i // max(1, count - 1) for i in range(count)]
    rng.shuffle(lengths)
    return [[rng.randrange(100, vocab_size) for _ in range(n)] for n in lengths]


def our_side(runner: TorchModelRunner) -> Generate:
    # No prefix cache: every round computes the same prompts again. No step time: throughput is what is compared.
    config = EngineConfig(
        num_blocks=runner.num_blocks, block_size=BLOCK_SIZE, max_step_time_s=None, enable_prefix_caching=False
    )
    identity = IdentityHeader(bytes(32), "bench", "bench", runner.kv_dtype, BLOCK_SIZE)

    def generate(prompts: Sequence[list[int]], new_tokens: int) -> Outcome:
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        requests = [EngineRequest(f"bench-{i}", tuple(p), sampling) for i, p in enumerate(prompts)]
        engine = OfflineEngine(runner, config, identity)
        begin = engine.clock.now()
        results = engine.generate(requests)
        for result in results:
            if result.error is not None:
                raise result.error
        return Outcome([r.token_ids for r in results], [[at - begin for at in r.token_times] for r in results])

    return generate


def their_side(folder: Path) -> Generate:
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: Sequence[list[int]], new_tokens: int) -> Outcome:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        stamps: list[float] = []

        def stamp(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            stamps.append(time.perf_counter() - begin)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([stamp]),
            )
        return Outcome([row[longest:].tolist() for row in out], [stamps] * len(prompts))

    return generate


def _alternate(
    ours: Generate, theirs: Generate, prompts: Sequence[list[int]], new_tokens: int, rounds: int
) -> tuple[list[float], list[float], int]:
    """Tokens/s of each round on both sides (decode, or prefill where one token is asked for), and how many requests drew
    the same ids on both (last round)."""
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    outcomes: dict[str, Outcome] = {}
    num_prompt_tokens = sum(map(len, prompts))
    for number in range(rounds):
        sides = [("ours", ours), ("theirs", theirs)]
        for name, side in sides if number % 2 == 0 else reversed(sides):
            outcome = outcomes[name] = side(prompts, new_tokens)
            rates[name].append(outcome.decode_rate() if new_tokens > 1 else num_prompt_tokens / outcome.prefill_s())
    same = sum(a == b for a, b in zip(outcomes["ours"].ids, outcomes["theirs"].ids, strict=True))
    return rates["ours"], rates["theirs"], same


def run(args: argparse.Namespace) -> list[Row]:
    folder = Path(args.model)
    if not (folder / "config.json").exists():
        raise ConfigError("model", str(folder), "no model there; `make model` fetches the default one")
    longest = max([args.longest_prompt + args.new_tokens, *args.prefill]) + 1
    num_blocks = max(max(args.batches, default=1), 1) * -(-longest // BLOCK_SIZE) + 8
    runner = TorchModelRunner.load(folder, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=args.threads[0])
    ours, theirs = our_side(runner), their_side(folder)
    rows: list[Row] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        warm = ragged_prompts(2, 8, 16, runner.vocab_size)
        ours(warm, 2), theirs(warm, 2)
        for batch in args.batches:
            prompts = ragged_prompts(batch, args.shortest_prompt, args.longest_prompt, runner.vocab_size)
            a, b, same = _alternate(ours, theirs, prompts, args.new_tokens, args.rounds)
            rows.append(make_row(f"decode, batch {batch}", threads, a, b, same_ids=same, requests=batch))
            print(table(rows[-1:]).splitlines()[1], flush=True)
        for length in args.prefill:
            prompts = ragged_prompts(1, length, length, runner.vocab_size)
            a, b, same = _alternate(ours, theirs, prompts, 1, args.rounds)
            rows.append(make_row(f"prefill {length}", threads, a, b, same_ids=same, requests=1))
            print(table(rows[-1:]).splitlines()[1], flush=True)
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(cache_dir() / "models" / DEFAULT_MODEL), help="a local folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="alternations of each scenario")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--shortest-prompt", type=int, default=16)
    parser.add_argument("--longest-prompt", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="one thread, one round, small sizes")
    parser.add_argument("--out", default="bench/results", help="folder of the JSON file")
    args = parser.parse_args(argv)
    if args.quick:
        args.threads, args.rounds, args.batches, args.prefill, args.new_tokens = [1], 1, [1, 8], [256], 12
    if (
        args.rounds < 1
        or args.new_tokens < 2
        or min(args.threads) < 1
        or min([*args.batches, *args.prefill], default=1) < 1
    ):
        parser.error("rounds, threads, batches and lengths must be at least 1, new tokens at least 2")
    if not 1 <= args.shortest_prompt <= args.longest_prompt:
        parser.error("prompts: 1 <= shortest <= longest")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    now = datetime.now(UTC)
    facts = machine()
    rows = run(args)
    settings = {k: v for k, v in vars(args).items() if k not in ("model", "out")}
    settings["model"] = Path(args.model).name
    print(f"\n{facts}\n{settings}\n{now:%Y-%m-%d %H:%M} UTC\n\n{table(rows)}")
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vs-transformers-{now:%Y%m%d-%H%M%S}.json"
    record = {"date": now.isoformat(), "machine": facts, "settings": settings, "rows": [asdict(r) for r in rows]}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
