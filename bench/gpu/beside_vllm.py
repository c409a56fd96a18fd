"""`diptych serve` and `vllm serve` on one GPU over HTTP: the same model, prompts and client, runs in turns.

    python -P -m diptych.bench gpu-vllm --vllm FOLDER [--blocks serve lora fp8 int4 ranks] --out FILE

vLLM is not a requirement of this project. FOLDER has its packages, as `pip install --target FOLDER vllm` makes it for this
Python and its torch. Both servers live at once and share the card; only one is asked at a time. Both have their defaults but
for their share of the card's memory.

    serve  random weights of Llama-3.1-8B's shape in bf16; users in a closed loop
    lora   the same and eight adapters of one rank on every linear layer: without and with them, on both sides
    fp8    linear layers in E4M3, a scale for each output, activations with a scale for each token
    int4   linear layers in 4 bits, a scale for each 128 inputs
    ranks  16 layers of Llama-3.1-70B's shape in bf16, two ranks on two GPUs (which both servers share)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from diptych.bench.engine.lora import NUM_SERVED, Prompts, checked, write_adapters
from diptych.bench.gpu.http_client import Answer, ask
from diptych.bench.gpu.over_http import Server, facts, percentiles, say
from diptych.bench.gpu.random_model import BIG, PART_OF_70B, TINY, write_model
from diptych.bench.result import spread, write
from diptych.cli.up.processes import free_port
from diptych.common import child

BLOCKS = ("serve", "lora", "fp8", "int4", "ranks")
QUANTIZED = ("fp8", "int4")
NAME = "bench"
START_S = 400.0
VLLM, OURS = "vLLM", "Diptych"


class VllmServer:
    """`vllm serve` of packages in a folder."""

    def __init__(self, packages: Path, model: Path, folder: Path, flags: Sequence[str]) -> None:
        self.port = free_port("127.0.0.1")
        self.flags = ["--model", str(model), "--served-model-name", NAME, *flags]
        self._log = folder / "vllm.log"
        self._env = os.environ | {
            "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1",
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Returns: seconds until it is ready. Raises: RuntimeError with the end of its log."""
        begun = time.monotonic()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self.flags]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        with self._log.open("wb") as log:
            self._process = child.start(command, stdout=log, stderr=subprocess.STDOUT, env=self._env)
        while not _answers(self.port):
            if self._process.poll() is not None or time.monotonic() - begun > START_S:
                raise RuntimeError(f"vLLM is not ready\n{self._log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.5)
        return time.monotonic() - begun

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            self._process.kill()
            self._process.wait(10)


def _answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0).is_success
    return False


@dataclass(slots=True)
class Point:
    """Runs of one number of users, by side. A side is `vLLM`, `Diptych`, or one of these with `adapters`."""

    users: int
    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)
    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    itl_p50_ms: dict[str, list[float]] = field(default_factory=dict)
    itl_p99_ms: dict[str, list[float]] = field(default_factory=dict)

    def add(self, side: str, answers: Sequence[Answer], begun: float, ended: float) -> None:
        gaps = [later - earlier for one in answers for earlier, later in itertools.pairwise(one.times)]
        first = percentiles([one.times[0] - one.begun for one in answers])
        between = percentiles(gaps)
        for name, value in (
            ("tokens_per_s", sum(one.num_tokens for one in answers) / (ended - begun)),
            ("ttft_ms", first["p50"]), ("itl_p50_ms", between["p50"]), ("itl_p99_ms", between["p99"]),
        ):  # fmt: skip
            getattr(self, name).setdefault(side, []).append(value)

    def ratio(self, name: str, side: str, to: str) -> float:
        rows: Mapping[str, list[float]] = getattr(self, name)
        return round(statistics.median(a / b for a, b in zip(rows[side], rows[to], strict=True)), 3)

    def result(self, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
        names = ("tokens_per_s", "ttft_ms", "itl_p50_ms", "itl_p99_ms")
        return {
            "users": self.users,
            "ratios": {f"{a} / {b}": {name: self.ratio(name, a, b) for name in names} for a, b in pairs},
            **{name: {side: spread(values) for side, values in getattr(self, name).items()} for name in names},
        }


async def closed_loop(
    port: int, users: int, each: int, prompt: Callable[[], list[int]], new_tokens: int, models: Sequence[str]
) -> tuple[list[Answer], float, float]:
    """`each` requests of each user, one after the other. Returns: answers, when it began and ended, in s."""
    begun = time.monotonic()

    async def user(number: int) -> list[Answer]:
        model = models[number % len(models)]
        return [
            await ask(port, prompt(), new_tokens, **({"model": model} if model else {})) for _ in range(each)
        ]  # fmt: skip

    found = await asyncio.gather(*(user(number) for number in range(users)))
    answers = list(checked([one for some in found for one in some], new_tokens))
    return answers, begun, max(one.times[-1] for one in answers)


def measure(
    args: argparse.Namespace, sides: Mapping[str, tuple[int, Sequence[str]]], pairs: Sequence[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Args: sides: port and models of each. Rounds take the sides in turns, in another order each round."""
    prompts, points = Prompts(args.seed, args.vocab_size), []
    for users in args.users:
        point, order = Point(users), list(sides)
        for number in range(args.rounds + 1):  # the first one warms up
            for side in order:
                port, models = sides[side]
                each = args.each if number else 1
                done = asyncio.run(
                    closed_loop(port, users, each, lambda: prompts.next(args.prompt_tokens), args.new_tokens, models)
                )
                if number:
                    point.add(side, *done)
            order = order[1:] + order[:1]
        points.append(point.result(pairs))
        medians = {side: round(statistics.median(rates), 1) for side, rates in point.tokens_per_s.items()}
        say(f"{users} users: tokens/s {medians}; {points[-1]['ratios']}")
    return points


def _share(args: argparse.Namespace) -> list[str]:
    return ["--gpu-memory-utilization", str(args.memory)]


@contextlib.contextmanager
def both(
    args: argparse.Namespace, model: Path, folder: Path, vllm_flags: Sequence[str], our_flags: Sequence[str]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields: the ports of vLLM and of Diptych, and what was started."""
    folder.mkdir(parents=True)
    peer = VllmServer(
        args.vllm, model, folder,
        [*_share(args), *vllm_flags, *shlex.split(args.vllm_args)],
    )  # fmt: skip
    ours = Server(
        ["serve", "--model", str(model), "--device", args.device, *_share(args), *our_flags], folder, {}
    )  # fmt: skip
    try:
        say(f"vLLM is ready after {peer.start():.1f} s")
        say(f"Diptych is ready after {ours.start():.1f} s")
        away = f"{folder.parent}/"
        commands = {VLLM: ["vllm", "serve", *peer.flags], OURS: ours.command}
        yield peer.port, ours.port, {side: [word.replace(away, "") for word in line] for side, line in commands.items()}
    finally:
        ours.stop()
        peer.stop()


def serve(args: argparse.Namespace, model: Path, folder: Path, flags: Sequence[str] = ()) -> dict[str, Any]:
    with both(args, model, folder, flags, flags) as (peer, ours, commands):
        sides = {VLLM: (peer, [NAME]), OURS: (ours, [""])}
        return {"commands": commands, "points": measure(args, sides, [(OURS, VLLM)])}


def quantized(args: argparse.Namespace, method: str) -> dict[str, Any]:
    model = write_model(args.work / f"model-{method}", TINY if args.tiny else BIG, args.device, method)
    return serve(args, model, args.work / method)


def ranks(args: argparse.Namespace) -> dict[str, Any]:
    model = write_model(args.work / "model-ranks", TINY if args.tiny else PART_OF_70B, args.device)
    return serve(args, model, args.work / "ranks", ["--tensor-parallel-size", "2"])


def lora(args: argparse.Namespace, model: Path, work: Path) -> dict[str, Any]:
    made = work / "adapters"
    if not made.exists():
        made.mkdir(parents=True)
        write_adapters(model, made, NUM_SERVED, args.rank)
    adapters = {path.name: path for path in sorted(made.iterdir())}
    sizes = ["--enable-lora", "--max-loras", str(NUM_SERVED), "--max-lora-rank", str(args.rank)]
    named = [f"{name}={path}" for name, path in adapters.items()]
    theirs = [*sizes, "--max-cpu-loras", str(NUM_SERVED), "--lora-modules", *named]
    mine = [*sizes, "--lora-dir", str(made), *itertools.chain.from_iterable(("--lora-modules", one) for one in named)]
    with both(args, model, work / "lora", theirs, mine) as (peer, ours, commands):
        with_adapters = {side: f"{side}, adapters" for side in (VLLM, OURS)}
        sides = {
            VLLM: (peer, [NAME]), with_adapters[VLLM]: (peer, list(adapters)),
            OURS: (ours, [""]), with_adapters[OURS]: (ours, list(adapters)),
        }  # fmt: skip
        pairs = [(with_adapters[side], side) for side in (VLLM, OURS)]
        pairs += [(OURS, VLLM), (with_adapters[OURS], with_adapters[VLLM])]
        return {"commands": commands, "rank": args.rank, "points": measure(args, sides, pairs)}


def measured(args: argparse.Namespace, block: str) -> dict[str, Any]:
    if block in QUANTIZED:
        return quantized(args, block)
    if block == "ranks":
        return ranks(args)
    model = write_model(args.work / "model", TINY if args.tiny else BIG, args.device)
    return lora(args, model, args.work) if block == "lora" else serve(args, model, args.work / "serve")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="folder with vLLM's packages")
    parser.add_argument("--memory", type=float, default=0.42, help="share of the card's memory of each server")
    parser.add_argument("--vllm-args", default="", help="further flags of vllm serve")
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--each", type=int, default=2, help="requests of a user in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of nothing: a rehearsal")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/diptych-beside-vllm"), help="models and logs")  # noqa: S108
    parser.add_argument("--commit", default="", help="to write into the result")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    args.vocab_size = (TINY if args.tiny else BIG).vocab
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions(path=[str(args.vllm)])}
    record: dict[str, Any] = {
        "command": "python -P -m diptych.bench gpu-vllm", "commit": args.commit, "facts": facts(args.device),
        "vllm": found.get("vllm", ""),
        "settings": {name: getattr(args, name) for name in ("users", "each", "rounds", "prompt_tokens", "new_tokens")},
    }  # fmt: skip
    for block in args.blocks:
        say(block)
        record[block] = measured(args, block)
        write(args.out, record)
    print(json.dumps({block: record[block]["points"] for block in args.blocks}, indent=1))


if __name__ == "__main__":
    main()
