"""Our engine (production scheduler and torch runner, offline) against transformers' generate, in one process.

    python -m diptych.bench.engine.vs_transformers [--quick]

Both sides get the same prompts at once and sample greedily without EOS:

    decode, batch N   ragged prompts, the same number of new tokens for all; measured after all requests have their first
                      token
    ragged, batch N   ragged prompts and outputs; output tokens over the whole run. transformers' generate has one length for
                      a batch and continues to the longest; tokens beyond a request's limit are not counted
    prefill N         one prompt of N tokens, up to its first token

Runs alternate, and the first side changes every round, so that load on the machine affects both. The machine's limits
are measured between the rounds; see floors.py. With --out FILE of an earlier run its rounds are added.
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

from diptych.bench.engine.floors import CeilingBench, Ceilings, Floor
from diptych.bench.engine.report import Row, best_of, make_row, merge, read_rows, table
from diptych.bench.result import surroundings, write
from diptych.common.block_identity import IdentityHeader
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine.config import EngineConfig
from diptych.engine.exec.model_runner import TorchModelRunner
from diptych.engine.executor import LocalExecutor
from diptych.engine.messages import EngineRequest
from diptych.engine.offline import OfflineEngine

BLOCK_SIZE = 16
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Outcome:
    """ids: new ids of each request. times: arrival of each request's tokens, seconds from the start."""

    ids: list[list[int]]
    times: list[list[float]]

    def prefill_s(self) -> float:
        return max(times[0] for times in self.times)

    def whole_rate(self) -> float:
        """Output tokens per second from the start to the last one."""
        last = max(times[len(ids) - 1] for ids, times in zip(self.ids, self.times, strict=True))
        return sum(map(len, self.ids)) / last

    def decode_rate(self) -> float:
        """Tokens per second after every request has its first token."""
        begin, end = self.prefill_s(), max(times[-1] for times in self.times)
        return sum(at > begin for times in self.times for at in times) / (end - begin)


Generate = Callable[[Sequence[list[int]], Sequence[int]], Outcome]
"""(prompts, new tokens of each) -> Outcome."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """kind: decode, ragged or prefill."""

    kind: str
    name: str
    prompts: list[list[int]]
    outputs: list[int]

    def rate(self, outcome: Outcome) -> float:
        if self.kind == "prefill":
            return sum(map(len, self.prompts)) / outcome.prefill_s()
        return outcome.decode_rate() if self.kind == "decode" else outcome.whole_rate()

    def floor(self, floor: Floor) -> float:
        lengths = [len(prompt) for prompt in self.prompts]
        if self.kind == "prefill":
            return floor.prefill_rate(lengths)
        return (floor.decode_rate if self.kind == "decode" else floor.whole_rate)(lengths, self.outputs)


def spread(count: int, shortest: int, longest: int, rng: random.Random) -> list[int]:
    """Evenly from longest to shortest, shuffled."""
    lengths = [longest - (longest - shortest) * i // max(1, count - 1) for i in range(count)]
    rng.shuffle(lengths)
    return lengths


def ragged_prompts(count: int, shortest: int, longest: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Lengths spread evenly from shortest to longest, in random order; the same ids every time."""
    rng = random.Random(seed)
    lengths = spread(count, shortest, longest, rng)
    return [[rng.randrange(100, vocab_size) for _ in range(n)] for n in lengths]


def our_side(runner: TorchModelRunner) -> Generate:
    # No prefix cache: every round computes the same prompts. No bound on the step time: the comparison is of
    # throughput.
    config = EngineConfig(
        num_blocks=runner.num_blocks,
        block_size=BLOCK_SIZE,
        max_step_time_s=None,
        mixed_step_time_s=None,
        enable_prefix_caching=False,
    )
    identity = IdentityHeader(bytes(32), "bench", "bench", runner.kv_dtype, BLOCK_SIZE)

    def generate(prompts: Sequence[list[int]], outputs: Sequence[int]) -> Outcome:
        requests = [
            EngineRequest(
                f"bench-{i}", Prompt(tuple(p)), SamplingParams(max_tokens=outputs[i], temperature=0.0, ignore_eos=True)
            )
            for i, p in enumerate(prompts)
        ]
        engine = OfflineEngine(LocalExecutor(runner), config, identity)
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

    def generate(prompts: Sequence[list[int]], outputs: Sequence[int]) -> Outcome:
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        stamps: list[float] = []

        def stamp(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            stamps.append(time.perf_counter() - begin)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                padded,
                attention_mask=mask,
                max_new_tokens=max(outputs),
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([stamp]),
            )
        ids = [row[longest : longest + count].tolist() for row, count in zip(out, outputs, strict=True)]
        return Outcome(ids, [stamps[:count] for count in outputs])

    return generate


def _round(ours: Generate, theirs: Generate, scenario: Scenario, number: int) -> tuple[float, float, int]:
    """Tokens/s of both sides in round `number`, and how many requests sampled the same ids."""
    sides = [("ours", ours), ("theirs", theirs)]
    outcomes: dict[str, Outcome] = {}
    for name, side in sides if number % 2 == 0 else reversed(sides):
        outcomes[name] = side(scenario.prompts, scenario.outputs)
    same = sum(a == b for a, b in zip(outcomes["ours"].ids, outcomes["theirs"].ids, strict=True))
    return scenario.rate(outcomes["ours"]), scenario.rate(outcomes["theirs"]), same


def scenarios(args: argparse.Namespace, vocab_size: int) -> list[Scenario]:
    some = []
    for batch in args.batches:
        prompts = ragged_prompts(batch, args.shortest_prompt, args.longest_prompt, vocab_size)
        some.append(Scenario("decode", f"decode, batch {batch}", prompts, [args.new_tokens] * batch))
    for batch in args.ragged:
        prompts = ragged_prompts(batch, args.shortest_prompt, args.longest_prompt, vocab_size)
        outputs = spread(batch, args.shortest_output, args.longest_output, random.Random(1))
        some.append(Scenario("ragged", f"ragged, batch {batch}", prompts, outputs))
    for length in args.prefill:
        prompts = ragged_prompts(1, length, length, vocab_size)
        some.append(Scenario("prefill", f"prefill {length}", prompts, [1]))
    return some


def run(args: argparse.Namespace, rows: list[Row], save: Callable[[list[Row], dict[int, Ceilings], str], None]) -> None:
    """Add rounds to `rows`; call save(rows, ceilings by threads, our backend) after every round."""
    folder = Path(args.model)
    if not (folder / "config.json").exists():
        raise ConfigError("model", str(folder), "no model there; `make model` fetches the default one")
    longest = max([args.longest_prompt + max(args.new_tokens, args.longest_output), *args.prefill]) + 1
    num_blocks = max([1, *args.batches, *args.ragged]) * -(-longest // BLOCK_SIZE) + 8
    runner = TorchModelRunner.load(
        folder, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=args.threads[0], backend=args.backend
    )
    ours, theirs = our_side(runner), their_side(folder)
    bench = CeilingBench()
    for threads in args.threads:
        torch.set_num_threads(threads)
        warm = ragged_prompts(2, 8, 16, runner.vocab_size)
        ours(warm, [2, 2]), theirs(warm, [2, 2])
        ceilings = bench.measure()
        for scenario in scenarios(args, runner.vocab_size):
            for _ in range(args.rounds):
                known = [row for row in rows if (row.scenario, row.threads) == (scenario.name, threads)]
                a, b, same = _round(ours, theirs, scenario, sum(len(row.our_rounds) for row in known))
                ceilings = ceilings.better(bench.measure())
                row = make_row(
                    scenario.name, threads, [a], [b], floor=scenario.floor(Floor(runner.description, ceilings)),
                    same_ids=same, requests=len(scenario.prompts),
                )  # fmt: skip
                rows = merge(rows, [row])
                save(rows, {threads: ceilings}, runner.backend)
            done = [row for row in rows if (row.scenario, row.threads) == (scenario.name, threads)]
            print(table(done).splitlines()[1], flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(cache_dir() / "models" / DEFAULT_MODEL), help="a local folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="alternations of each scenario")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--shortest-prompt", type=int, default=16)
    parser.add_argument("--longest-prompt", type=int, default=256)
    parser.add_argument("--ragged", type=int, nargs="*", default=[32], help="batches of ragged prompts and outputs")
    parser.add_argument("--shortest-output", type=int, default=16)
    parser.add_argument("--longest-output", type=int, default=128)
    parser.add_argument("--backend", choices=["native", "torch"], help="our kernels; native where it can be had")
    parser.add_argument("--quick", action="store_true", help="one thread, one round, small sizes")
    parser.add_argument("--out", help="JSON file, written anew or added to; default: a new one in bench/results")
    args = parser.parse_args(argv)
    if args.quick:
        args.threads, args.rounds, args.batches, args.prefill, args.new_tokens = [1], 1, [1, 8], [256], 12
        args.ragged = []
    if (
        args.rounds < 1
        or args.new_tokens < 2
        or min(args.threads) < 1
        or min([*args.batches, *args.ragged, *args.prefill], default=1) < 1
    ):
        parser.error("rounds, threads, batches and lengths must be at least 1, new tokens at least 2")
    if not 1 <= args.shortest_prompt <= args.longest_prompt:
        parser.error("prompts: 1 <= shortest <= longest")
    if not 2 <= args.shortest_output <= args.longest_output:
        parser.error("outputs: 2 <= shortest <= longest")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    now = datetime.now(UTC)
    facts = surroundings()
    settings = {k: v for k, v in vars(args).items() if k not in ("model", "out")}
    path = Path(args.out or f"bench/results/engine-vs-transformers-{now:%Y%m%d-%H%M%S}.json")
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "runs": []}
    measured: dict[str, Any] = {}
    shown: list[Row] = []

    def save(rows: list[Row], ceilings: dict[int, Ceilings], backend: str) -> None:
        measured.update({str(threads): asdict(c) for threads, c in ceilings.items()})
        this = {
            "date": now.isoformat(),
            "machine": facts,
            "settings": settings | {"model": Path(args.model).name, "backend": backend},
            "ceilings": measured,
        }
        record = {
            "command": "python -m diptych.bench.engine.vs_transformers",
            "ours": "OfflineEngine.generate over TorchModelRunner, float32, greedy, no prefix cache",
            "theirs": "AutoModelForCausalLM(dtype=float32).generate(do_sample=False), left-padded batch",
            "runs": [*before["runs"], this],
            "rows": [asdict(r) for r in rows],
            "best": [asdict(b) for b in best_of(rows)],
        }
        write(path, record)
        shown[:] = rows

    run(args, read_rows(before["rows"]), save)
    print(f"\n{facts}\n{settings}\n{measured}\n{now:%Y-%m-%d %H:%M} UTC\n\n{table(shown)}")


if __name__ == "__main__":
    main()
