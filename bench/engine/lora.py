"""LoRA adapters beside the base model, over HTTP, with the flags that a user gives `diptych serve`.

    python -P -m diptych.bench.engine.lora [--blocks throughput slots] [--model FOLDER] [--serve-args --device cuda]

Ten minutes with the default model on two cores that do nothing else. `--rounds 1 --users 8 --seconds 2` shows that all of it
works. Every round prints a line; each block is written as it ends.

Adapters are random, of all linear layers, in folders as peft writes them. Sides take turns, in another order each round.

    throughput  all users at once, one answer each. Sides: `off`, a server without --enable-lora; `base`, a server with
                it, no adapter named; `adapters`, the same server, its users on 8 adapters in turn. Tokens/s from the first
                request to the last token; ratios are medians over the rounds, to `base` and to `off`
    slots       64 adapters on 8 slots: one tenant streams from the base model while others send short requests, each for
                the next adapter (`adapters`) or all for the base model (`base`). The tenant's intervals between tokens:
                p99, and the median over the rounds of its ratio
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diptych.bench.engine.vs_transformers import DEFAULT_MODEL
from diptych.bench.gpu.http_client import Answer, ask
from diptych.bench.gpu.over_http import Server, percentiles
from diptych.bench.result import RESULTS, spread, surroundings, write
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych.engine.exec.models.registry import describe

BLOCKS = ("throughput", "slots")
OFF, BASE, ADAPTERS = "off", "base", "adapters"
NUM_SERVED, NUM_MANY, SLOTS = 8, 64, 8
Prompt = list[int]


def write_adapters(model: Path, folder: Path, count: int, rank: int) -> dict[str, Path]:
    """Name -> folder of random adapters, small beside the weights, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    description = describe(json.loads((model / "config.json").read_text()))
    linears = [linear for block in description.blocks for linear in block.linears]
    generator = torch.Generator().manual_seed(5)
    made = {}
    for number in range(count):
        tensors = {}
        for linear in linears:
            for part in linear.parts:
                for side, shape in (("A", (rank, linear.inputs)), ("B", (part.outputs, rank))):
                    values = torch.randn(shape, generator=generator) * 0.5 * shape[1] ** -0.5
                    tensors[f"base_model.model.{part.name}.lora_{side}.weight"] = values.bfloat16()
        path = folder / f"adapter-{number}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(config))
        made[path.name] = path
    return made


def serve_command(args: argparse.Namespace, lora_dir: Path, adapters: dict[str, Path]) -> list[str]:
    """Arguments of `diptych`."""
    command = ["serve", "--model", args.model, *args.serve_args]
    if adapters:
        command += ["--enable-lora", "--max-loras", str(SLOTS), "--max-lora-rank", str(args.rank)]
        command += ["--max-cpu-loras", str(max(len(adapters), SLOTS)), "--lora-dir", str(lora_dir)]
        for name, path in adapters.items():
            command += ["--lora-modules", f"{name}={path}"]
    return command


@contextlib.contextmanager
def serving(args: argparse.Namespace, folder: Path, adapters: dict[str, Path]) -> Iterator[Server]:
    """`diptych serve` with these adapters; none: without --enable-lora. The server's own defaults, but for --serve-args."""
    folder.mkdir()
    server = Server(serve_command(args, folder.parent, adapters), folder, {})
    try:
        print(f"{folder.name}: ready after {server.start():.1f} s", flush=True)
        yield server
    finally:
        server.stop()


class Prompts:
    """Token ids that no request had before, so that nothing is a hit."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._rng, self._vocab_size = random.Random(seed), vocab_size

    def next(self, length: int) -> Prompt:
        return [self._rng.randrange(self._vocab_size // 50, self._vocab_size) for _ in range(length)]


def checked(answers: Sequence[Answer], max_tokens: int) -> Sequence[Answer]:
    """Raises: RuntimeError when one is not whole."""
    for answer in answers:
        if answer.error or answer.num_tokens != max_tokens:
            raise RuntimeError(answer.error or f"{answer.num_tokens} of {max_tokens} tokens")
    return answers


# ---- throughput ----


@dataclass(slots=True)
class Throughput:
    """Tokens/s of each round, by side. ratios: `adapters` to `base` and to `off`, `base` to `off`: medians of the rounds'."""

    users: int
    rounds: dict[str, list[float]] = field(default_factory=lambda: {OFF: [], BASE: [], ADAPTERS: []})

    def ratio(self, side: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(self.rounds[side], self.rounds[to], strict=True))

    def result(self) -> dict[str, Any]:
        pairs = ((ADAPTERS, BASE), (ADAPTERS, OFF), (BASE, OFF))
        ratios = {f"{side} / {to}": round(self.ratio(side, to), 3) for side, to in pairs}
        return {"users": self.users, "ratios": ratios, "tokens_per_s": {k: spread(v) for k, v in self.rounds.items()}}


async def all_at_once(port: int, models: Sequence[str], prompts: Sequence[Prompt], new_tokens: int) -> float:
    """Tokens/s. Args: models: of each request; empty: the server's own."""
    begun = time.monotonic()
    answers = await asyncio.gather(*(
        ask(port, prompt, new_tokens, **({"model": model} if model else {}))
        for model, prompt in zip(models, prompts, strict=True)
    ))  # fmt: skip
    checked(answers, new_tokens)
    return len(answers) * new_tokens / (max(answer.times[-1] for answer in answers) - begun)


def throughput(args: argparse.Namespace, adapters: dict[str, Path], made: Path, vocab_size: int) -> list[Any]:
    names, points = list(adapters), []
    with serving(args, made / "with", adapters) as with_loras, serving(args, made / "without", {}) as without:
        prompts = Prompts(1, vocab_size)

        def run(side: str, users: int) -> float:
            port = (without if side == OFF else with_loras).port
            models = [names[i % len(names)] if side == ADAPTERS else "" for i in range(users)]
            made_prompts = [prompts.next(args.prompt_tokens) for _ in range(users)]
            return asyncio.run(all_at_once(port, models, made_prompts, args.new_tokens))

        for users in args.users:
            point, order = Throughput(users), [OFF, BASE, ADAPTERS]
            for side in order:  # each adapter gets its slot, and what is compiled or measured at first use is done
                print(f"{users} users, warm-up, {side}: {run(side, users):.1f} tokens/s", flush=True)
            for number in range(1, args.rounds + 1):
                for side in order:
                    point.rounds[side].append(run(side, users))
                last = ", ".join(f"{side} {rates[-1]:.1f}" for side, rates in point.rounds.items())
                print(f"{users} users, round {number} of {args.rounds}: {last} tokens/s", flush=True)
                order = order[1:] + order[:1]
            points.append(point.result())
            rates = ", ".join(f"{side} {statistics.median(r):.1f}" for side, r in point.rounds.items())
            print(f"{users} users: {rates} tokens/s; {points[-1]['ratios']}", flush=True)
    return points


# ---- slots ----


@dataclass(slots=True)
class Window:
    """One side of one round: the tenant's intervals in ms, and how many requests of others ended."""

    itl_ms: dict[str, float]
    intervals: int
    others: int


async def window(port: int, names: Iterator[str], prompts: Prompts, args: argparse.Namespace) -> Window:
    """The tenant's streams, one after the other on each of its connections, beside others' short requests."""
    until = time.monotonic() + args.seconds
    streams: list[Answer] = []
    others = 0

    async def tenant() -> None:
        while time.monotonic() < until:
            streams.append(await ask(port, prompts.next(args.prompt_tokens), args.new_tokens))

    async def other() -> None:
        nonlocal others
        while time.monotonic() < until:
            model = next(names)
            prompt = prompts.next(args.prompt_tokens)
            answer = await ask(port, prompt, args.other_tokens, **({"model": model} if model else {}))
            checked([answer], args.other_tokens)
            others += 1

    await asyncio.gather(*(tenant() for _ in range(args.tenant_streams)), *(other() for _ in range(args.others)))
    gaps = [
        later - earlier
        for answer in checked(streams, args.new_tokens)
        for earlier, later in itertools.pairwise(answer.times)
    ]
    return Window(percentiles(gaps), len(gaps), others)


def slots(args: argparse.Namespace, adapters: dict[str, Path], made: Path, vocab_size: int) -> dict[str, Any]:
    rounds: dict[str, list[Window]] = {BASE: [], ADAPTERS: []}
    with serving(args, made / "slots", adapters) as server:
        prompts = Prompts(2, vocab_size)
        sides = {BASE: itertools.repeat(""), ADAPTERS: itertools.cycle(adapters)}
        order = list(sides)
        for number in range(args.rounds + 1):  # the first one warms up
            for side in order:
                done = asyncio.run(window(server.port, sides[side], prompts, args))
                if number:
                    rounds[side].append(done)
                what = f"round {number} of {args.rounds}" if number else "warm-up"
                print(f"slots, {what}, {side}: {done}", flush=True)
            order.reverse()
    ratios = [a.itl_ms["p99"] / b.itl_ms["p99"] for a, b in zip(rounds[ADAPTERS], rounds[BASE], strict=True)]
    ratio = round(statistics.median(ratios), 3)
    print(f"slots: p99 between tokens of the base model's tenant: {ratio} of that without adapters", flush=True)
    return {
        "adapters": len(adapters),
        "slots": SLOTS,
        "itl_p99_ratio": ratio,
        "ratios": [round(one, 3) for one in ratios],
        "rounds": {side: [asdict(one) for one in found] for side, found in rounds.items()},
    }


# ---- the command ----


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(cache_dir() / "models" / DEFAULT_MODEL), help="a local folder")
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--users", type=int, nargs="+", default=[8, 32], help="of throughput")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each side of a round of slots")
    parser.add_argument("--tenant-streams", type=int, default=2)
    parser.add_argument("--others", type=int, default=6, help="connections of the others")
    parser.add_argument("--other-tokens", type=int, default=8)
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="last: further flags of serve")
    parser.add_argument("--out", help="JSON file; default: a new one in bench/results")
    args = parser.parse_args(argv)
    if min(args.rounds, *args.users, args.rank, args.prompt_tokens, args.others, args.tenant_streams) < 1:
        parser.error("numbers must be at least 1")
    if min(args.new_tokens, args.other_tokens) < 2:
        parser.error("new tokens must be at least 2")
    return args


def commands_of(args: argparse.Namespace) -> dict[str, str]:
    """What each side's server is started with; NAME=FOLDER stands for every adapter."""
    folder = Path("FOLDER")
    settings = argparse.Namespace(**(vars(args) | settings_of(args)))
    named = {"NAME": folder}
    lines = {OFF: serve_command(settings, folder, {})}
    lines |= {side: serve_command(settings, folder, named) for side in (f"{BASE}, {ADAPTERS}", "slots")}
    for side, count in ((f"{BASE}, {ADAPTERS}", NUM_SERVED), ("slots", NUM_MANY)):
        at = lines[side].index("--max-cpu-loras") + 1
        lines[side][at] = str(count)
    return {side: " ".join(["diptych", *line]) for side, line in lines.items()}


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """For the result, without folders of this machine."""
    named = {k: v for k, v in vars(args).items() if k != "out"} | {"model": Path(args.model).name}
    return named | {"serve_args": [flag.rpartition("/")[2] if "/" in flag else flag for flag in args.serve_args]}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    model = Path(args.model)
    if not (model / "config.json").exists():
        raise ConfigError("model", args.model, "no model there; `make model` fetches the default one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped
    path = Path(args.out or RESULTS / f"lora-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    record: dict[str, Any] = {
        "command": "python -P -m diptych.bench.engine.lora",
        "machine": surroundings(),
        "settings": settings_of(args),
        "servers": commands_of(args),
    }
    with tempfile.TemporaryDirectory(prefix="diptych-lora-") as folder:
        made, count = Path(folder), NUM_MANY if "slots" in args.blocks else NUM_SERVED
        print(f"{count} random adapters of rank {args.rank} for {model.name}", flush=True)
        adapters = write_adapters(model, made, count, args.rank)
        if "throughput" in args.blocks:
            served = dict(itertools.islice(adapters.items(), NUM_SERVED))
            record["throughput"] = throughput(args, served, made, vocab_size)
            write(path, record)
        if "slots" in args.blocks:
            record["slots"] = slots(args, adapters, made, vocab_size)
            write(path, record)


if __name__ == "__main__":
    main()
