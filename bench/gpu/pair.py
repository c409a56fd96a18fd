"""`python -m diptych.bench.gpu.pair --out FILE`: prefill on one GPU, decode on another of the same host, real
processes.

    link       GPU memory of one process read by a kernel of the other (bench/gpu/link.py), and a peer copy by the copy engine
    hand-off   on an idle pair: from the first token leaving prefill's engine to the second token here, less one decode step
    load       Poisson arrivals; TTFT and inter-token latency

This process acts as the router: it uses Decode.Attach over gRPC, and shares the host's monotonic clock with the
workers.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import datetime
import functools
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diptych.bench.gpu.rule import CostRule
from diptych.common.sampling import SamplingParams
from diptych.common.secret import call_key, call_token, create_secret
from diptych.router.cluster.decode_stream import DecodeStream
from diptych.rpc.channels import open_channel
from diptych.rpc.convert import sampling_to_proto
from diptych.rpc.v1 import decode_pb2, types_pb2

VOCABULARY = 128_256
MIB = 1 << 20


@functools.cache
def _secret() -> tuple[str, bytes]:
    """The file of a secret for this run, and its content."""
    folder = tempfile.TemporaryDirectory(prefix="diptych-bench-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "secret"
    return str(path), create_secret(path)


class Worker:
    """A child process; its output is read as it arrives."""

    def __init__(self, process: asyncio.subprocess.Process, role: str) -> None:
        self._process, self._role = process, role
        self.trace: list[str] = []
        self.ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self.left: dict[str, float] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, gpu: int, role: str, options: dict[str, Any]) -> Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "diptych.bench.gpu.worker", role, json.dumps({**options, "secret_file": _secret()[0]})),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
        )
        return cls(process, role)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            word, _, rest = raw.decode().partition(" ")
            if word == "READY":
                self.ready.set_result(json.loads(rest))
            elif word == "TRACE":
                self.trace.append(f"{rest.strip()} [{self._role}]")
            elif word == "FIRST":
                attempt, when = json.loads(rest)
                self.left[attempt.rpartition("/")[0]] = when
        if not self.ready.done():
            self.ready.set_exception(RuntimeError("the worker ended before it was ready"))

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
        await self._reading


class Client:
    """prefill: None: decode computes every prompt. rule: selects prompts that decode computes beside a prefill worker;
    None: none."""

    def __init__(self, prefill: dict[str, str] | None, decode: dict[str, str], *, rule: CostRule | None = None) -> None:
        self._prefill, self._decode, self._rule = prefill, decode, rule
        self.local = 0
        """Prompts that the rule assigned to decode."""
        channel = open_channel(decode["address"], token=call_token(call_key(_secret()[1]), decode["address"]))
        self._stream = DecodeStream(channel, decode["worker_id"])
        self._stream.start()
        self._number = 0

    async def up(self) -> None:
        async with asyncio.timeout(30):
            while not self._stream.up:  # noqa: ASYNC110 - a start, once
                await asyncio.sleep(0.05)

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[str, float, list[float]]:
        """Returns: attempt, submission time, arrival time of each token (monotonic seconds)."""
        self._number += 1
        attempt = f"bench-{self._number}"
        rule = self._rule
        local = self._prefill is None or (rule is not None and rule.place(attempt, len(prompt)))
        self.local += local
        placement = decode_pb2.Placement(
            decode=_ref(self._decode), local_prefill=local, local_prefill_max_tokens=len(prompt) if local else 0
        )
        if self._prefill is not None:
            placement.prefill.append(_ref(self._prefill))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        begin = time.monotonic()
        call = self._stream.open(
            decode_pb2.Submit(
                attempt=attempt,
                request_id=attempt,
                prompt_token_ids=prompt,
                sampling=sampling_to_proto(sampling),
                placement=placement,
                remaining_s=60.0,
            )
        )
        times: list[float] = []
        while True:
            event = await call.next()
            kind = event.WhichOneof("event")
            if kind == "tokens":
                times += [time.monotonic()] * len(event.tokens.token_ids)
                if rule is not None:
                    rule.first_token(attempt)
            elif kind == "end":
                if rule is not None:
                    rule.ended(attempt)
                if event.end.HasField("failure"):
                    raise RuntimeError(f"{attempt}: {event.end.failure}")
                return attempt, begin, times


def _ref(worker: dict[str, str]) -> types_pb2.WorkerRef:
    return types_pb2.WorkerRef(**worker)


def _prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _percent(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def handoff(client: Client, prefill: Worker, count: int, repeats: int, rng: random.Random) -> dict[str, Any]:
    rows = []
    for turn in range(repeats + 2):
        attempt, begin, times = await client.generate(_prompt(rng, count), 24)
        step = statistics.median(b - a for a, b in itertools.pairwise(times[3:]))
        left = prefill.left[attempt]
        if turn >= 2:
            rows.append((times[1] - left - step, times[0] - begin, times[0] - left, step))
        await asyncio.sleep(0.05)
    handoffs, ttft, hop, steps = ([1e3 * value for value in column] for column in zip(*rows, strict=True))
    return {
        "tokens": count,
        "handoff_ms_p50": statistics.median(handoffs),
        "handoff_ms_min_max": [min(handoffs), max(handoffs)],
        "ttft_ms_p50": statistics.median(ttft),
        "first_token_hop_ms_p50": statistics.median(hop),
        "decode_step_ms_p50": statistics.median(steps),
        "repeats": repeats,
    }


async def load(
    clients: Sequence[Client], rate: float, seconds: float, rng: random.Random, lengths: tuple[int, int]
) -> dict[str, Any]:
    """Poisson arrivals, prompts uniform between `lengths`, 128 tokens out; clients alternate."""
    tasks: list[asyncio.Task[tuple[str, float, list[float]]]] = []
    end = time.monotonic() + seconds
    next_at = time.monotonic()
    while next_at < end:
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
        client = clients[len(tasks) % len(clients)]
        tasks.append(asyncio.create_task(client.generate(_prompt(rng, rng.randint(*lengths)), 128)))
        next_at += rng.expovariate(rate)
    results = await asyncio.gather(*tasks)
    ttft = [1e3 * (times[0] - begin) for _, begin, times in results]
    gaps = [1e3 * (b - a) for _, _, times in results for a, b in itertools.pairwise(times)]
    second = [1e3 * (times[1] - times[0]) for _, _, times in results]
    tpot = [1e3 * (times[-1] - times[0]) / (len(times) - 1) for _, _, times in results]
    return {
        "rate": rate,
        "requests": len(results),
        "prompt_tokens": lengths,
        "ttft_ms": {"p50": _percent(ttft, 0.5), "p90": _percent(ttft, 0.9), "p99": _percent(ttft, 0.99)},
        "itl_ms": {"p50": _percent(gaps, 0.5), "p90": _percent(gaps, 0.9), "p99": _percent(gaps, 0.99)},
        "tpot_ms": {"p50": _percent(tpot, 0.5), "p99": _percent(tpot, 0.99)},
        "second_token_gap_ms": {"p50": _percent(second, 0.5), "p99": _percent(second, 0.99)},
    }


async def link() -> dict[str, Any]:
    env = [{**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in (0, 1)]
    command = (sys.executable, "-m", "diptych.bench.gpu.link")
    pipe = asyncio.subprocess.PIPE
    lender = await asyncio.create_subprocess_exec(*command, "lend", stdout=pipe, env=env[0])
    assert lender.stdout is not None
    lent = await lender.stdout.readline()
    puller = await asyncio.create_subprocess_exec(*command, "pull", stdin=pipe, stdout=pipe, env=env[1])
    out, _ = await puller.communicate(lent)
    if lender.returncode is None:
        lender.kill()
    await lender.wait()
    found = next((line[5:] for line in out.decode().splitlines() if line.startswith("LINK ")), None)
    return json.loads(found) if found else {"failed": puller.returncode}


def peer_copy() -> float:
    """GB/s of the copy engine, 256 MiB from GPU 0 to GPU 1."""
    source = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    times = []
    for _ in range(12):
        for gpu in (0, 1):
            torch.cuda.synchronize(gpu)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        for gpu in (0, 1):
            torch.cuda.synchronize(gpu)
        times.append(time.perf_counter() - began)
    return 256 * MIB / statistics.median(times[2:]) / 1e9


async def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "transport": args.transport,
        "slab_mib": args.slab_mib,
        "peer_copy_gb_per_s": peer_copy(),
    }
    if "link" in args.parts:
        result["link"] = await link()
        print(json.dumps(result, indent=1), flush=True)
    if set(args.parts) <= {"link"}:
        return result
    rng = random.Random(7)
    common: dict[str, Any] = {
        "trace": args.trace, "switch_interval_s": args.switch_ms / 1e3,
        "transport": args.transport, "slab_bytes": args.slab_mib * MIB, "num_slabs": args.num_slabs, "max_model_len": 20_000,
        "num_blocks": 20_000, "max_num_seqs": 256, "max_num_batched_tokens": args.chunk, "steps_ahead": not args.after,
    }  # fmt: skip
    workers = [
        await Worker.start(0, "prefill", {**common, "graph_sizes": [1]}),
        await Worker.start(1, "decode", common),
    ]
    try:
        prefill, decode = [await asyncio.wait_for(worker.ready, 400) for worker in workers]
        client = Client(prefill, decode)
        await client.up()
        if "handoff" in args.parts:
            for count, repeats in ((512, 10), (2048, 20), (8192, 10)):
                result[f"handoff_{count}"] = await handoff(client, workers[0], count, repeats, rng)
                print(json.dumps(result[f"handoff_{count}"]), flush=True)
                if args.trace:
                    lines = sorted(line for worker in workers for line in worker.trace[-400:])
                    print("\n".join(lines[-args.trace :]), flush=True)
                    for worker in workers:
                        worker.trace.clear()
        if "load" in args.parts:
            for rate in args.rates:
                result[f"load_{rate:g}"] = await load([client], rate, args.seconds, rng, (512, 3584))
                print(json.dumps(result[f"load_{rate:g}"]), flush=True)
    finally:
        for worker in workers:
            await worker.stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["link", "handoff", "load"])
    parser.add_argument("--transport", choices=("ipc", "ucx-gpu"), default="ipc")
    parser.add_argument("--slab-mib", type=int, default=258)
    parser.add_argument("--num-slabs", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a prefill step")
    parser.add_argument("--trace", type=int, default=0, help="print so many last moments of each hand-off series")
    parser.add_argument("--switch-ms", type=float, default=0.05, help="sys.setswitchinterval of the workers")
    parser.add_argument("--after", action="store_true", help="plan every step after the last one's tokens are read")
    parser.add_argument("--rates", type=float, nargs="+", default=[8.0, 16.0])
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    result = asyncio.run(run(args))
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
