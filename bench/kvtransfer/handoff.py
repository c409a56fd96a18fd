"""The hand-off through whole clusters of this machine: exposed transfer time, and the cost of cancelled prompts.

    python -m diptych.bench.kvtransfer.handoff exposed --out bench/results/handoff-exposed
    python -m diptych.bench.kvtransfer.handoff cancelled --out bench/results/handoff-cancelled

exposed:    the interval between the first and the second token, less one decode step (the median of the later
            intervals), for prompts of several lengths, with kv_overlap on (ranges, and layers of the last chunk), off,
            and auto (what is predicted to win), alternately: three clusters run, one is used at a time. JSON and an SVG.
cancelled:  ten long prompts, cancelled before their first token; then one short prompt. Its waiting time, compared with
            the same prompt on the idle cluster, and with one prefill chunk: the time to the first token of a prompt
            that fills one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from diptych.bench.result import spread, surroundings, write
from diptych.cli.bench import cluster as bench_cluster
from diptych.cli.bench.config import ClusterChoice
from diptych.cli.bench.run import run_async
from diptych.loadtest.reports.svg import Series, chart
from diptych.loadtest.targets.openai import OpenAITarget
from diptych.loadtest.targets.target import Ask, Chunk, Ended, Event

LENGTHS = (32, 128, 512, 1024, 2048, 4096)
MODES = ("on", "off", "auto")
REMOTE = {"local_prefill_max_tokens": 0}
"""Every prompt goes through prefill, also where decode would be faster."""
ANSWER_TOKENS = 8
CHUNK_TOKENS = 512
"""Most tokens of one prefill step (the workers' default)."""
SHORT_TOKENS = 32
MANY, LONG_TOKENS = 10, 2048
_SETTLED_S = 0.3


@dataclass(frozen=True, slots=True)
class Timeline:
    """Arrival of each token, in seconds after the request was sent."""

    tokens_s: tuple[float, ...]
    transport: str = ""
    """Transport of the KV, from the answer's explanation."""

    @property
    def first_s(self) -> float:
        return self.tokens_s[0]

    @property
    def step_s(self) -> float:
        later = [b - a for a, b in zip(self.tokens_s[1:], self.tokens_s[2:], strict=False)]
        return statistics.median(later)

    @property
    def exposed_s(self) -> float:
        """May be slightly negative: steps differ."""
        return self.tokens_s[1] - self.tokens_s[0] - self.step_s


class Prompts:
    """Random prompts without common prefixes, so that there are no cache hits."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def of(self, tokens: int, answer: int = ANSWER_TOKENS) -> Ask:
        ids = self._random.integers(1000, 40000, tokens).tolist()
        return Ask(answer, token_ids=tuple(ids))


async def timeline(target: OpenAITarget, ask: Ask) -> Timeline:
    """Raises: TargetError; RuntimeError when the answer is too short."""
    began = time.perf_counter()
    came: list[float] = []
    transport = ""
    async for event in target.send(ask):
        if isinstance(event, Chunk):
            came += [time.perf_counter() - began] * max(1, len(event.token_ids))
        elif isinstance(event, Ended) and event.server is not None:
            if event.server.local_prefill:
                raise RuntimeError("the prompt was computed on decode: nothing was transferred")
            transport = event.server.transport
    if len(came) != ask.max_tokens:
        raise RuntimeError(f"{len(came)} tokens arrived, {ask.max_tokens} were requested")
    return Timeline(tuple(came), transport)


Found = dict[str, dict[int, list[Timeline]]]
"""By mode and prompt length."""


def cross_over(found: Found) -> int | None:
    """The shortest prompt from which overlap exposes less than none, by the medians."""
    lengths = [n for n in sorted(found["on"]) if found["on"][n] and found["off"].get(n)]
    wins = [_exposed(found["on"][n]) < _exposed(found["off"][n]) for n in lengths]
    first = next((i for i in range(len(wins)) if all(wins[i:])), None)
    return None if first is None else lengths[first]


def _exposed(runs: Sequence[Timeline]) -> float:
    return statistics.median(run.exposed_s for run in runs)


async def _exposed_rounds(
    targets: dict[str, OpenAITarget], lengths: Sequence[int], rounds: int, until: float, report: Callable[[Found], None]
) -> None:
    """No length starts after `until` (monotonic). `report` is called with the results so far after each."""
    prompts = Prompts(5)
    found: Found = {mode: {n: [] for n in lengths} for mode in targets}
    for target in targets.values():
        await timeline(target, prompts.of(lengths[0]))
    for turn in range(rounds):
        # The shortest prompts first, so that an exhausted budget costs runs of the longest only.
        for length in lengths:
            if time.monotonic() > until:
                return
            for mode in MODES if turn % 2 == 0 else reversed(MODES):
                run = await timeline(targets[mode], prompts.of(length))
                found[mode][length].append(run)
                print(
                    f"  {length:>5} tokens, overlap {mode:<3}: exposed {run.exposed_s * 1e3:7.1f} ms, "
                    f"step {run.step_s * 1e3:.1f} ms, first token {run.first_s:.2f} s",
                    flush=True,
                )
            report(found)


async def _cancelled_rounds(target: OpenAITarget, rounds: int) -> list[dict[str, float]]:
    prompts = Prompts(6)
    found = []
    await timeline(target, prompts.of(SHORT_TOKENS))
    for _ in range(rounds):
        idle = (await timeline(target, prompts.of(SHORT_TOKENS))).first_s
        chunk = (await timeline(target, prompts.of(CHUNK_TOKENS, 1))).first_s
        streams = [target.send(prompts.of(LONG_TOKENS)) for _ in range(MANY)]
        waiting = [asyncio.ensure_future(_first_token(stream)) for stream in streams]
        await asyncio.sleep(_SETTLED_S)
        early = sum(task.done() for task in waiting)
        if early:
            raise RuntimeError(f"{early} of {MANY} long prompts were answered before they could be cancelled")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        short = (await timeline(target, prompts.of(SHORT_TOKENS))).first_s
        found.append({"idle_s": idle, "chunk_s": chunk, "behind_cancelled_s": short, "waited_s": short - idle})
        print(f"  idle {idle:.3f} s, one chunk {chunk:.3f} s, behind {MANY} cancelled {short:.3f} s", flush=True)
    return found


async def _first_token(stream: AsyncGenerator[Event, None]) -> None:
    """A cancel closes the stream, as a client that disconnects."""
    async with contextlib.aclosing(stream):
        async for event in stream:
            if isinstance(event, Chunk):
                return


def run_exposed(lengths: Sequence[int], rounds: int, budget_s: float, transport: str, out: Path) -> int:
    environment = surroundings()
    with contextlib.ExitStack() as stack:
        urls = {}
        for mode in MODES:
            choice = ClusterChoice(threads_per_worker=1, cluster_args=f"--kv-overlap {mode} --transport {transport}")
            urls[mode] = stack.enter_context(bench_cluster.running(choice, colocated=False)).http_url

        async def main() -> None:
            async with contextlib.AsyncExitStack() as opened:
                targets = {}
                for mode, url in urls.items():
                    targets[mode] = OpenAITarget(url, extra=REMOTE)
                    await targets[mode].open()
                    opened.push_async_callback(targets[mode].close)
                until = time.monotonic() + budget_s
                await _exposed_rounds(targets, lengths, rounds, until, partial(_report_exposed, environment, out))

        run_async(main())
    return 0


def _report_exposed(environment: dict[str, Any], out: Path, found: Found) -> None:
    body = {
        "bench": "exposed transfer: gap between the first and the second token, less one decode step",
        "environment": environment,
        "cross_over_tokens": cross_over(found),
        "points": [
            {
                "kv_overlap": mode, "prompt_tokens": length, "rounds": len(runs), "transport": runs[-1].transport,
                "exposed_s": spread([run.exposed_s for run in runs]),
                "decode_step_s": spread([run.step_s for run in runs]),
                "first_token_s": spread([run.first_s for run in runs]),
            }
            for mode, by_length in found.items() for length, runs in by_length.items() if runs
        ],
    }  # fmt: skip
    write(out.with_suffix(".json"), body)
    lines = [
        Series(f"overlap {mode}", [(n, _exposed(runs) * 1e3) for n, runs in by_length.items() if runs])
        for mode, by_length in found.items()
    ]
    picture = chart("What of the transfer a client waits for", lines, x="prompt, tokens", y="exposed, ms (median)")
    out.with_suffix(".svg").write_text(picture + "\n")
    print(f"overlap exposes less from {body['cross_over_tokens']} tokens on; {out.with_suffix('.svg')}", flush=True)


def run_cancelled(rounds: int, out: Path) -> int:
    environment = surroundings()
    with bench_cluster.running(ClusterChoice(threads_per_worker=1), colocated=False) as cluster:

        async def main() -> list[dict[str, float]]:
            target = OpenAITarget(cluster.http_url, extra=REMOTE)
            await target.open()
            try:
                return await _cancelled_rounds(target, rounds)
            finally:
                await target.close()

        found = run_async(main())
    body = {
        "bench": f"one prompt of {SHORT_TOKENS} tokens behind {MANY} of {LONG_TOKENS}, cancelled before their first token",
        "environment": environment,
        "chunk_tokens": CHUNK_TOKENS,
        **{name: spread([run[name] for run in found]) for name in found[0]},
        "within_one_chunk": sum(run["waited_s"] <= run["chunk_s"] for run in found),
        "rounds": len(found),
    }
    write(out.with_suffix(".json"), body)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("exposed", "cancelled"))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=3600.0, help="no more runs begin after so long")
    parser.add_argument("--transport", default="auto", help="of the KV, exposed only: auto, nixl or ucx")
    parser.add_argument("--out", type=Path, required=True, help="without an ending")
    args = parser.parse_args()
    if args.what == "exposed":
        return run_exposed(args.lengths, args.rounds, args.budget_s, args.transport, args.out)
    return run_cancelled(args.rounds, args.out)


if __name__ == "__main__":
    sys.exit(main())
