"""`python -m diptych.bench.gpu.over_http --out FILE`: two GPUs with default flags: `diptych up --device cuda` over
HTTP.

    model      random weights of Llama-3.1-8B's shape in bf16, and a small model in fp32, written to a folder first
    first-seconds  one user from readiness on, second by second
    identity   the small model in fp32: token ids over P/D, on two GPUs and with both roles on one, equal those of `diptych serve`
    windows    the same of a model in fp32 whose layers have windows (groups of KV)
    batch-invariant  the 8B shape in bf16 with --batch-invariant: ids over P/D, all prompts at once, equal those of `serve`,
               one at a time
    streams    one user: one token a message; intervals compared with decode's steps
    hand-off   an idle cluster: the interval between first and second token, less one step
    pulls      the second turn of a chat: prefill reads the KV of decode's answer of 2,048 tokens; the rate beside that at
               which decode reads prompts of 2,048 tokens, and the ids beside those of an empty cache (in bf16 they are equal
               with --up-args=--batch-invariant)
    closed     users in a closed loop, 512 tokens in, 128 out
    poisson    2,000 tokens in, 128 out
    serve      `diptych serve --device cuda` on one GPU, closed loop

A kernel that is compiled after readiness fails the command and is named.

The client records arrival times and parses after a run, so that it costs little while it measures. --device cpu with
--tiny is a rehearsal without a GPU.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.bench.gpu.http_client import Answer, ask
from diptych.bench.gpu.random_model import BIG, SMALL, TINY, write_model, write_window_model
from diptych.cli.up.processes import free_port
from diptych.cli.up.readiness import is_ready
from diptych.common import child
from diptych.engine.exec.cuda.late_kernels import LATE

START_S = 240.0
FIRST_S = 12.0
BLOCKS = (
    "identity",
    "windows",
    "batch-invariant",
    "first-seconds",
    "streams",
    "hand-off",
    "pulls",
    "closed",
    "poisson",
    "serve",
)
PULLED_CHATS = 5
EVENTS_S = 1.5
"""Until routers know what was cached, and what was measured."""
BLOCK_SIZE = 16
Row = dict[str, Any]


def percentiles(values: Sequence[float]) -> Row:
    """Milliseconds. `values`: seconds."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3) for name, q in at.items()}


def summary(answers: Sequence[Answer], max_tokens: int, span_s: float) -> Row:
    """Summary of one run. An interval is between two messages; the first one is the hand-off and is also listed
    separately."""
    good = [answer for answer in answers if not answer.error and answer.num_tokens == max_tokens]
    bad = sorted({answer.error or f"{answer.num_tokens} tokens" for answer in answers if answer not in good})
    messages = sum(len(answer.times) for answer in good)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "errors": bad[:3],
        "ttft_ms": percentiles([answer.times[0] - answer.begun for answer in good]),
        "second_gap_ms": percentiles([answer.times[1] - answer.times[0] for answer in good if len(answer.times) > 1]),
        "itl_ms": percentiles([b - a for answer in good for a, b in zip(answer.times, answer.times[1:], strict=False)]),
        "tpot_ms": percentiles(
            [(answer.times[-1] - answer.times[0]) / max(1, max_tokens - answer.counts[0]) for answer in good]
        ),
        "output_tokens_per_s": round(sum(answer.num_tokens for answer in good) / span_s, 1),
        "tokens_per_message": round(sum(answer.num_tokens for answer in good) / max(1, messages), 3),
    }


def pull_row(turns: Sequence[tuple[Answer, Answer, int, int]], rates: Mapping[str, Mapping[str, float]]) -> Row:
    """Of second turns: with the first answer's KV from decode, with an empty cache, and the tokens of history and prompt.

    Args: rates: bytes a second, by reader and holder."""
    whole, equal, tokens, sizes, seconds, other_bits = 0, 0, 0, [], [], 0
    for second, alone, history, prompt in turns:
        pulled = [one for one in second.pulls if one["reader"].startswith("prefill") and not one["note"]]
        # Of the history the last token's KV was never computed.
        whole += bool(pulled) and prompt - second.cached_prefill <= prompt - history + BLOCK_SIZE
        equal += second.token_ids == alone.token_ids and second.num_tokens == 24
        for one in pulled:
            tokens = one["num_tokens"]
            sizes.append(one["kv_bytes"])
            seconds.append(one["duration_s"])
            other_bits += one["other_bits"]
    back = rates.get("prefill-0", {}).get("decode-0", 0.0)
    there = rates.get("decode-0", {}).get("prefill-0", 0.0)
    return {
        "chats": len(turns),
        "at_most_a_block_and_the_new_tokens_computed": whole,
        "ids_as_with_an_empty_cache": equal,
        "kv_of_decode_may_differ": other_bits,
        "errors": sorted({answer.error for pair in turns for answer in pair[:2] if answer.error})[:3],
        "pulled_tokens": tokens,
        "kv_bytes": sizes[-1] if sizes else 0,
        "pull_ms": percentiles(seconds),
        "decode_to_prefill_gb_per_s": round(back / 1e9, 3),
        "prefill_to_decode_gb_per_s": round(there / 1e9, 3),
        "part_of_prefill_to_decode": round(back / there, 3) if there else 0.0,
    }


class Server:
    """A running `diptych up` or `diptych serve`, with all given flags."""

    def __init__(self, arguments: Sequence[str], folder: Path, env: dict[str, str]) -> None:
        self.port = free_port("127.0.0.1")
        self.command = [
            "diptych",
            *arguments,
            "--http-port",
            str(self.port),
            "--grpc-port",
            str(free_port("127.0.0.1")),
        ]
        self.log = folder / "server.log"
        self._folder = folder
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start and wait until it is ready; returns seconds. Raises: RuntimeError with the end of its log."""
        begun = time.monotonic()
        with self.log.open("wb") as log:
            command = [sys.executable, "-P", "-m", "diptych.cli", *self.command[1:]]
            env = os.environ | self._env | {"DIPTYCH_RUN_DIR": str(self._folder / "run")}
            self._process = child.start(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        while not is_ready("127.0.0.1", self.port)[0]:
            if self._process.poll() is not None or time.monotonic() - begun > START_S:
                raise RuntimeError(f"{' '.join(self.command)}: not ready\n{self.text()[-6000:]}")
            time.sleep(0.1)
        while self.command[1] == "up" and "first tokens served" not in self.text():
            if self._process.poll() is not None or time.monotonic() - begun > START_S:
                raise RuntimeError(f"{' '.join(self.command)}: no first token\n{self.text()[-6000:]}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def text(self) -> str:
        """Output of the process and its children."""
        logs = [self.log, *sorted((self._folder / "run" / "logs").glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')}" for log in logs if log.exists())

    def said(self) -> list[str]:
        """Log lines about its automatic choices."""
        wanted = ("by default", "kv transfer:", " on GPU ", "KV blocks fit", "first tokens served")
        return [line for line in self.text().splitlines() if any(word in line for word in wanted)]

    def late_kernels(self) -> list[str]:
        return [line for line in self.text().splitlines() if LATE in line]

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            self._process.kill()
            self._process.wait(10)


class Bench:
    """The benchmark. `args`: of the command line."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rng = random.Random(args.seed)
        self.result: Row = {"facts": facts(args.device), "servers": {}}
        self.vocab = TINY.vocab if args.tiny else BIG.vocab
        self.port = 0
        self.env: dict[str, str] = {}
        """Of the servers, besides this process's own."""
        self._server: Server | None = None

    def log_text(self) -> str:
        """Of the server that runs."""
        assert self._server is not None, "no server runs"
        return self._server.text()

    def prompt(self, length: int, vocab: int = 0) -> list[int]:
        return [self.rng.randrange(3, vocab or self.vocab) for _ in range(length)]

    async def one(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
        return await ask(self.port, prompt, max_tokens, **fields)

    @contextlib.contextmanager
    def serving(self, name: str, arguments: Sequence[str], gpus: str = "") -> Iterator[None]:
        """`gpus`: visible GPUs; empty: all."""
        folder = Path(self.args.work) / f"server-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        env = self.env | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus and self.args.device == "cuda" else {})
        self._server = server = Server(arguments, folder, env)
        entry: Row = {"command": " ".join(server.command)}
        self.result["servers"][name] = entry
        try:
            entry["start_s"] = round(server.start(), 1)
            entry["said"] = server.said()
            self.port = server.port
            say(f"{name}: ready after {entry['start_s']} s: {entry['command']}")
            yield
        finally:
            server.stop()
            entry["late_kernels"] = server.late_kernels()
            (Path(self.args.out).parent / f"{name}.log").write_text(server.text()[-400_000:])

    def up(
        self, name: str, model: Path, more: Sequence[str] = (), gpus: str = ""
    ) -> contextlib.AbstractContextManager[None]:
        return self.serving(name, ["up", "--model", str(model), "--device", self.args.device, *more], gpus)

    def serve(self, name: str, model: Path, more: Sequence[str] = ()) -> contextlib.AbstractContextManager[None]:
        return self.serving(name, ["serve", "--model", str(model), "--device", self.args.device, *more], gpus="0")

    async def warm(self, lengths: Sequence[int]) -> None:
        """A few warm-up requests."""
        for length in lengths:
            await self.one(self.prompt(length), 8)
        await asyncio.gather(*(self.one(self.prompt(lengths[-1]), 8) for _ in range(4)))

    # ---- blocks --------------------------------------------------------------------------------------------------

    async def identity(self, name: str, model: Path, flags: Sequence[str] = ()) -> Row:
        """Token ids over P/D, all prompts at once, on two GPUs and with both roles on one, beside those of `serve`, one at a
        time. `name`: of the servers; `flags`: of `up` and `serve`."""
        lengths = (5, 70, 100, 333, 700, 1500)
        vocab = TINY.vocab if self.args.tiny else SMALL.vocab
        prompts = [self.prompt(n, vocab) for n in lengths for _ in range(2)]
        found: dict[str, list[list[int]]] = {}
        errors: list[str] = []
        moved = 0
        for gpus_name, gpus in (("pair", ""), ("one_gpu", "0")):
            with self.up(f"{name}-{gpus_name}", model, flags, gpus=gpus):
                answers = await asyncio.gather(*(self.one(p, 48, local_prefill_max_tokens=0) for p in prompts))
                found[gpus_name] = [answer.token_ids for answer in answers]
                moved += sum(answer.kv_bytes > 0 for answer in answers)
                errors += [answer.error for answer in answers if answer.error]
        with self.serve(f"{name}-serve", model, flags):
            alone = [(await self.one(p, 48)).token_ids for p in prompts]
        equal = {
            name: sum(a == b and len(a) == 48 for a, b in zip(ids, alone, strict=True)) for name, ids in found.items()
        }
        return {"prompts": len(prompts), "equal": equal, "over_transport": moved, "errors": errors}

    async def first_seconds(self) -> Row:
        begun = time.monotonic()
        by_second: dict[int, list[float]] = {}
        while time.monotonic() - begun < FIRST_S:
            answer = await self.one(self.prompt(512), 128)
            for before, at in itertools.pairwise(answer.times[1:]):
                by_second.setdefault(int(at - begun), []).append(1e3 * (at - before))
        medians = [round(statistics.median(gaps), 2) for _, gaps in sorted(by_second.items()) if len(gaps) > 9]
        usual = statistics.median(medians)
        return {
            "itl_p50_ms_by_second": medians,
            "slowest_over_median": round(max(medians) / usual, 3),
            "longest_gap_ms": round(max(map(max, by_second.values())), 1),
        }

    async def streams(self) -> Row:
        answers = [await self.one(self.prompt(512), 128) for _ in range(5)]
        row = summary(answers, 128, sum(answer.times[-1] - answer.begun for answer in answers if answer.times))
        row["messages"] = [len(answer.times) for answer in answers]
        return row

    async def hand_off(self, lengths: Sequence[int]) -> Row:
        rows: Row = {}
        for length in lengths:
            gaps, steps, firsts, early = [], [], [], []
            for number in range(9):
                answer = await self.one(self.prompt(length), 24)
                if number < 2 or len(answer.times) < 3:
                    continue
                step = (answer.times[-1] - answer.times[1]) / (answer.num_tokens - sum(answer.counts[:2]))
                firsts.append(answer.times[0] - answer.begun)
                gaps.append(answer.times[1] - answer.times[0] - step)
                steps.append(step)
                early.append(f"{answer.kv_ranges_overlapped} of {answer.kv_ranges}")
            if gaps:
                middle = {"ttft_ms": firsts, "step_ms": steps, "exposed_ms": gaps}
                rows[str(length)] = {name: round(1e3 * statistics.median(of), 2) for name, of in middle.items()}
                rows[str(length)]["ranges_overlapped"] = sorted(set(early))
        return rows

    async def pulls(self, length: int) -> Row:
        """`length`: tokens of the first answer."""
        turns: list[tuple[Answer, Answer, int, int]] = []
        for _ in range(PULLED_CHATS):
            first = await self.one(prompt := self.prompt(16), length)
            history = [*prompt, *first.token_ids]
            turn_2 = [*history, *self.prompt(64)]
            await asyncio.sleep(EVENTS_S)
            second = await self.one(turn_2, 24, local_prefill_max_tokens=0)
            alone = await self.one(turn_2, 24, local_prefill_max_tokens=0, cache_salt="alone")
            turns.append((second, alone, len(history), len(turn_2)))
        for _ in range(PULLED_CHATS):
            await self.one(self.prompt(length), 8, local_prefill_max_tokens=0)
        await asyncio.sleep(EVENTS_S)
        status = await asyncio.to_thread(self.status)
        rates = {worker["id"]: worker["link_bytes_per_s"] for worker in status["cluster"]["workers"]}
        return pull_row(turns, rates)

    def status(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/status.json", timeout=10.0) as answer:
            return json.load(answer)

    async def closed(self, users: int, each: int, length: int = 512, max_tokens: int = 128) -> Row:
        prompts = [[self.prompt(length) for _ in range(each)] for _ in range(users)]

        async def user(mine: Sequence[Sequence[int]]) -> list[Answer]:
            return [await self.one(prompt, max_tokens) for prompt in mine]

        begun = time.monotonic()
        answers = [answer for part in await asyncio.gather(*map(user, prompts)) for answer in part]
        ended = max((answer.times[-1] for answer in answers if answer.times), default=begun + 1)
        return {"users": users, **summary(answers, max_tokens, ended - begun)}

    async def poisson(self, rate: float, seconds: float, length: int = 2000, max_tokens: int = 128) -> Row:
        arrivals: list[tuple[float, list[int]]] = []
        rng, at = random.Random(7), 0.0
        while (at := at + rng.expovariate(rate)) < seconds:
            arrivals.append((at, self.prompt(length)))
        begun = time.monotonic() + 0.05

        async def go(at: float, prompt: Sequence[int]) -> Answer:
            await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
            answer = await self.one(prompt, max_tokens)
            answer.begun = begun + at  # from the intended send time
            return answer

        answers = await asyncio.gather(*(go(at, prompt) for at, prompt in arrivals))
        ended = max((answer.times[-1] for answer in answers if answer.times), default=begun + 1)
        return {"rate": rate, "seconds": seconds, **summary(answers, max_tokens, ended - begun)}

    # ---- all of it -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        args, blocks = self.args, self.args.blocks.split(",")
        work = Path(args.work)
        if "identity" in blocks:
            small = write_model(work / "small", TINY if args.tiny else SMALL, args.device)
            self.keep("identity", {**await self.identity("identity", small), "dtype": "float32"})
        if "windows" in blocks:
            windows = write_window_model(work / "windows", args.device, tiny=args.tiny)
            self.keep("windows", {**await self.identity("windows", windows), "dtype": "float32"})
        if set(blocks) - {"identity", "windows"}:
            begun = time.monotonic()
            big = write_model(work / "big", TINY if args.tiny else BIG, args.device)
            say(f"model written in {time.monotonic() - begun:.1f} s")
        if "batch-invariant" in blocks:
            row = await self.identity("batch-invariant", big, ["--batch-invariant"])
            self.keep("batch_invariant", {**row, "dtype": "float32" if args.tiny else "bfloat16"})
        scale = 0.05 if args.tiny else 1.0
        sized = lambda length: max(8, int(scale * length))  # noqa: E731
        if set(blocks) & {"first-seconds", "streams", "hand-off", "pulls", "closed", "poisson"}:
            with self.up("pd", big, args.up_args.split()):
                if "first-seconds" in blocks:
                    self.keep("first_seconds", await self.first_seconds())
                await self.warm([sized(64), sized(512), sized(2000)])
                if "streams" in blocks:
                    self.keep("streams", await self.streams())
                if "hand-off" in blocks:
                    self.keep("hand_off", await self.hand_off([sized(512), sized(2048), sized(8192)]))
                if "pulls" in blocks:
                    self.keep("pulls", await self.pulls(sized(2048)))
                for users in args.users if "closed" in blocks else ():
                    self.keep(f"closed_{users}", await self.closed(users, args.each, sized(512)))
                for rate in args.rates if "poisson" in blocks else ():
                    self.keep(f"poisson_{rate:g}", await self.poisson(rate, args.seconds, sized(2000)))
        for more in args.serve_args.split(";") if "serve" in blocks else ():
            name = "serve" + more.replace("--", " ").replace(" ", "-")
            with self.serve(name, big, more.split()):
                if "first-seconds" in blocks:
                    self.keep(f"{name}_first_seconds", await self.first_seconds())
                await self.warm([sized(64), sized(512)])
                for users in args.users:
                    self.keep(f"{name}_closed_{users}", await self.closed(users, args.each, sized(512)))

    def late_kernels(self) -> list[str]:
        """Of every server that ran."""
        return [line for entry in self.result["servers"].values() for line in entry["late_kernels"]]

    def keep(self, name: str, row: Row) -> None:
        """Save at once, so that earlier measurements survive a failure."""
        self.result[name] = row
        self.write()
        say(f"{name}: {json.dumps(row)}")

    def write(self) -> None:
        Path(self.args.out).write_text(json.dumps(self.result, indent=1) + "\n")


def facts(device: str) -> Row:
    """Machine and versions."""
    from importlib import metadata

    import torch

    cards = []
    if device == "cuda":
        cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    names = ("torch", "triton", "transformers", "grpcio", "uvloop")
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cards": cards,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "versions": versions,
        "cuda": torch.version.cuda,
    }


_BEGUN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGUN:6.1f}] {text}", flush=True)


def main_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="bench/results/gpu-as-shipped.json")
    parser.add_argument("--work", default="/dev/shm/diptych-gpu-http", help="models and run folders")  # noqa: S108
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of nothing: a rehearsal")
    parser.add_argument("--blocks", default=",".join(BLOCKS))
    parser.add_argument("--users", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--each", type=int, default=4, help="requests of a user")
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=[8.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of a Poisson run")
    parser.add_argument("--up-args", default="", help="flags of up; a recorded figure has none")
    parser.add_argument("--serve-args", default="", help="sets of flags of serve, ; between them")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    args = main_parser(__doc__).parse_args(arguments)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    asyncio.run(bench.run())
    bench.write()
    if late := bench.late_kernels():
        raise SystemExit("\n".join(late))


if __name__ == "__main__":
    main()
