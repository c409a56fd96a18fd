"""`python -m diptych.bench.gpu.cross --out FILE`: two GPUs at one load, used in three ways, over prompt lengths.

    disaggregated  prefill on one, decode on the other (ipc)
    colocated      both do both, with chunked prompts in the decode steps; requests alternate
    conditional    as disaggregated, but of prompts of up to --local-tokens decode computes those that cost less there, as a
                   router decides it

Poisson arrivals of prompts of one length, 128 tokens out, at a rate that keeps one GPU's prefill busy for --share of
the time. A request is good if its first token arrived within FIRST_S + FIRST_TOKEN_S a prompt token, and 99% of its
intervals are within GAP_S. Writes FILE and two charts beside it: ITL p99 and the share of good requests.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diptych.bench.gpu.pair import MIB, Client, Worker, _percent, _prompt
from diptych.bench.gpu.rule import CostRule
from diptych.loadtest.reports.svg import Series, chart

FIRST_S, FIRST_TOKEN_S, GAP_S = 0.2, 0.00006, 0.025
MODES = ("disaggregated", "colocated", "conditional")
OUTPUT = 128
Result = tuple[str, float, list[float]]


def is_good(begin: float, times: Sequence[float], prompt_tokens: int) -> bool:
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return times[0] - begin <= FIRST_S + FIRST_TOKEN_S * prompt_tokens and _percent(gaps, 0.99) <= GAP_S


def summary(results: Sequence[Result], prompt_tokens: int, seconds: float) -> dict[str, Any]:
    ttft = [1e3 * (times[0] - begin) for _, begin, times in results]
    gaps = [1e3 * (b - a) for _, _, times in results for a, b in itertools.pairwise(times)]
    good = sum(is_good(begin, times, prompt_tokens) for _, begin, times in results)
    return {
        "requests": len(results),
        "ttft_ms": {"p50": _percent(ttft, 0.5), "p99": _percent(ttft, 0.99)},
        "itl_ms": {"p50": _percent(gaps, 0.5), "p99": _percent(gaps, 0.99)},
        "good": good / len(results),
        "goodput_per_s": good / seconds,
    }


def crossover(rows: Sequence[dict[str, Any]], key: str) -> int | None:
    """The shortest prompt length from which disaggregated is never worse than colocated; key: "itl" or "good"."""
    found = None
    for row in sorted(rows, key=lambda one: -int(one["prompt_tokens"])):
        some, other = row["disaggregated"], row["colocated"]
        wins = some["itl_ms"]["p99"] <= other["itl_ms"]["p99"] if key == "itl" else some["good"] >= other["good"]
        if not wins:
            break
        found = int(row["prompt_tokens"])
    return found


async def offer(
    clients: Sequence[Client], rate: float, seconds: float, prompt_tokens: int, seed: int
) -> tuple[list[Result], float]:
    """Returns: the results, and the duration of the arrivals. The same seed gives the same arrivals."""
    rng = random.Random(seed)
    tasks: list[asyncio.Task[Result]] = []
    start = next_at = time.monotonic()
    while next_at < start + seconds:
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
        client = clients[len(tasks) % len(clients)]
        tasks.append(asyncio.create_task(client.generate(_prompt(rng, prompt_tokens), OUTPUT)))
        next_at += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks)), seconds


async def run(args: argparse.Namespace) -> dict[str, Any]:
    common: dict[str, Any] = {
        "transport": "ipc", "slab_bytes": 258 * MIB, "num_slabs": 12, "max_model_len": 20_000, "num_blocks": 6_000,
        "max_num_seqs": 256,
    }  # fmt: skip
    decode_options = {**common, "max_num_batched_tokens": args.local_chunk}
    workers = [
        await Worker.start(0, "prefill", {**common, "graph_sizes": [1], "max_num_batched_tokens": 4096}),
        await Worker.start(1, "decode", decode_options),
        await Worker.start(0, "decode", {**decode_options, "number": 1}),
    ]
    rows = []
    try:
        prefill, decode, second = [await asyncio.wait_for(worker.ready, 400) for worker in workers]
        rule = CostRule(most_tokens=args.local_tokens, prefill_per_s=args.prefill_per_s)
        clients = {
            "disaggregated": [Client(prefill, decode)],
            "colocated": [Client(None, decode), Client(None, second)],
            "conditional": [Client(prefill, decode, rule=rule)],
        }
        for client in itertools.chain(*clients.values()):
            await client.up()
            await client.generate(_prompt(random.Random(1), 600), 8)
        for length in args.lengths:
            rate = min(args.most_per_s, args.share * args.prefill_per_s / length)
            row: dict[str, Any] = {"prompt_tokens": length, "rate": rate}
            for mode in MODES:
                results, seconds = await offer(clients[mode], rate, max(args.seconds, 12 / rate), length, length)
                row[mode] = summary(results, length, seconds)
            (client,) = clients["conditional"]
            row["conditional"]["computed_on_decode"], client.local = client.local, 0
            rows.append(row)
            print(json.dumps(row), flush=True)
    finally:
        for worker in workers:
            await worker.stop()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "model": "Llama-3.1-8B's shape, random weights, bf16",
        "output_tokens": OUTPUT,
        "slo": {"first_s": FIRST_S, "first_s_per_prompt_token": FIRST_TOKEN_S, "p99_gap_s": GAP_S},
        "local_tokens": args.local_tokens,
        "local_chunk": args.local_chunk,
        "crossover_tokens": {key: crossover(rows, key) for key in ("itl", "good")},
        "rows": rows,
    }


def draw(result: dict[str, Any], out: Path) -> None:
    def lines(value: str) -> list[Series]:
        return [
            Series(
                mode,
                [(r["prompt_tokens"], r[mode]["itl_ms"]["p99"] if value == "itl" else r[mode]["good"]) for r in rows],
            )
            for mode in MODES
        ]

    rows = result["rows"]
    for name, title, unit in (
        ("itl", "Gaps between tokens, 99th percentile", "ms"),
        ("good", "Requests within the SLO", "share"),
    ):
        picture = chart(title, lines(name), x="prompt, tokens", y=unit, log_x=True)
        out.with_name(f"{out.stem}-{name}.svg").write_text(picture + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192, 16_384])
    parser.add_argument("--share", type=float, default=0.6, help="of the time that one GPU's prefill is busy")
    parser.add_argument(
        "--prefill-per-s", type=float, default=40_000.0, help="prompt tokens that one GPU computes alone"
    )
    parser.add_argument("--most-per-s", type=float, default=24.0, help="requests, however short")
    parser.add_argument(
        "--local-tokens", type=int, default=512, help="conditional: of longer prompts decode computes none itself"
    )
    parser.add_argument("--local-chunk", type=int, default=1024, help="prompt tokens beside the decodes in one step")
    parser.add_argument("--seconds", type=float, default=7.0)
    args = parser.parse_args()
    result = asyncio.run(run(args))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    draw(result, args.out)


if __name__ == "__main__":
    main()
