"""Mixed load for half an hour with a kill each minute: memory, descriptors and conservation laws of every process; `make soak`.

    python -P -m diptych_tests.soak_run --minutes 30 --out FILE

A cluster as shipped (`diptych up`, default flags but for its size, small pools, and the tenants' keys): chats, long prompts,
grammars, named tools, n = 3 and log probabilities through the openai client, the SDK beside it, clients that leave in the
middle, and a tenant beyond its quota. Every minute a worker is killed, if all others are back; the supervisor starts it again.
Each worker has its turn of a third of the time, so that the others live long enough for a slope. Every second each worker is
asked for its audit, every five seconds each process for its memory and descriptors.

What must hold: no law is violated; no request of a tenant within its quota fails, ends early, or has another answer than the
first of its kind; the quota refuses with 429 and Retry-After; the memory of every incarnation that served enough does not grow
with its requests (soak_law.py), and there is one of each role; the descriptors of those that live for three minutes after their
warm-up stay; after the load everything is free. The record says all of it, whether it holds or not, with the MiB a minute of
each life; the exit status is 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
import psutil

from diptych.bench import result
from diptych.client import AsyncClient, DiptychError
from diptych.loadtest.reports.svg import Series, chart
from diptych.router.api.auth.keys import add_key
from diptych.rpc.v1 import worker_pb2, worker_pb2_grpc
from diptych_tests import clusters, kill_run
from diptych_tests.soak_law import WARM, WARM_ROUTER, Sample, growth, private_mib

WORKERS = ("decode-0", "decode-1", "prefill-0")
KINDS = ("plain", "grammar", "tool", "several", "logprobs", "long")
KILL_EVERY_S, AUDIT_EVERY_S, SAMPLE_EVERY_S = 60.0, 1.0, 5.0
LEAST_LIFE_S = 180.0
"""A slope of a shorter time says nothing."""
BLOCKS = 192
"""Of a worker's pool: few, so that every page of it has been touched when the warm-up ends. Until then memory grows with each
block that is used for the first time: with 320 blocks (220 MiB) that took a decode worker on a busy machine up to ten minutes."""
QUOTA = 200
"""Tokens a minute of the tenant that asks for more."""


@dataclass
class Soak:
    """What was seen. samples: by process and incarnation."""

    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    first: dict[tuple[str, int], Any] = field(default_factory=dict)
    """By kind and number of a request: its first answer."""
    audits: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    not_killed: list[float] = field(default_factory=list)
    """Minutes without a kill, since the last one's worker was still starting."""
    left_over: str = ""

    def lives(self, warm_s: float) -> list[dict[str, Any]]:
        """Of every incarnation that lived long enough after a warm-up of its own."""
        found = []
        for name, samples in sorted(self.samples.items()):
            kept = [one for one in samples if one.seconds >= samples[0].seconds + warm_s]
            if len(kept) < 3 or kept[-1].seconds - kept[0].seconds < LEAST_LIFE_S:
                continue
            minutes = [one.seconds / 60.0 for one in kept]
            slope = statistics.linear_regression(minutes, [one.mib for one in kept]).slope
            descriptors = [one.descriptors for one in kept]
            half = len(descriptors) // 2
            grown = growth(samples, WARM_ROUTER if name.startswith("router") else WARM)
            found.append(
                {
                    "process": name, "minutes": round(minutes[-1] - minutes[0], 2), "mib_per_minute": round(slope, 3),
                    "requests": samples[-1].requests - samples[0].requests,
                    "mib_first": round(kept[0].mib, 1), "mib_last": round(kept[-1].mib, 1),
                    "mib_max": round(max(one.mib for one in kept), 1), "ring_mib": round(kept[-1].fixed_mib, 1),
                    "late_growth": None if grown is None else {
                        "requests": grown.requests, "mib": round(grown.mib, 2), "most_mib": round(grown.most_mib, 2),
                        "total_mib": round(grown.total_mib, 2), "sees_kib_a_request": round(grown.sees_kib, 2),
                        "holds": grown.holds,
                    },
                    "descriptors_median_first_half": statistics.median(descriptors[:half]),
                    "descriptors_median_second_half": statistics.median(descriptors[half:]),
                    "descriptors_max": max(descriptors),
                }
            )  # fmt: skip
        return found


async def within(ends: asyncio.Event, seconds: float) -> None:
    """Return after so many seconds, or when the run ends."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ends.wait(), seconds)


async def http_stream(
    soak: Soak, url: str, key: str, kind: str, numbers: itertools.count[int], ends: asyncio.Event
) -> None:
    bodies = kill_run.asks()[kind]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600.0) as client:
        for turn in itertools.count():
            if ends.is_set():
                return
            which, number = turn % len(bodies), next(numbers)
            body = bodies[which]
            flight = kill_run.Flight(f"soak-{number}", kind, which, time.monotonic())
            try:
                await kill_run.ask(client, "smollm2", flight, body)
            except ValueError as error:  # what the client library cannot read
                flight.error = repr(error)
            wrong = flight.error
            if not (flight.usage and all(flight.seen.get(i, {}).get("end") for i in range(body.get("n", 1)))):
                wrong = wrong or "it ended early"
            elif flight.outcome != soak.first.setdefault((kind, which), flight.outcome):
                wrong = f"another answer: {flight.outcome} for {soak.first[kind, which]}"
            soak.outcomes[f"{kind}: {'failed' if wrong else 'whole'}"] += 1
            if wrong:
                soak.errors.append(f"{kind}: {wrong}")


async def leaving_stream(soak: Soak, url: str, key: str, rng: random.Random, ends: asyncio.Event) -> None:
    """Clients that leave after some tokens, or before any."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600.0) as client:
        while not ends.is_set():
            prompt, after = f"Tale {rng.random()}. Once upon a time", rng.randrange(0, 30)
            try:
                async with asyncio.timeout(rng.uniform(0.05, 20.0)):
                    stream = await client.completions.create(
                        model="smollm2", prompt=prompt, max_tokens=200, stream=True
                    )
                    async with stream:
                        for _ in range(after):
                            await anext(stream)
            except (TimeoutError, StopAsyncIteration):
                pass
            except openai.OpenAIError as error:
                soak.errors.append(f"leaves: {error!r}")
            soak.outcomes["leaves"] += 1


async def sdk_stream(soak: Soak, address: str, key: str, rng: random.Random, ends: asyncio.Event) -> None:
    async with AsyncClient(address, api_key=key, timeout_s=600.0) as client:
        while not ends.is_set():
            tokens = rng.randrange(8, 80)
            try:
                answer = await client.generate(
                    prompt=f"Story {rng.random()}. Once upon a time", max_tokens=tokens, ignore_eos=True, seed=1
                )
                whole = answer.usage.completion_tokens == len(answer.token_ids) == tokens
                soak.outcomes[f"sdk: {'whole' if whole else 'failed'}"] += 1
                if not whole:
                    soak.errors.append(f"sdk: {answer.usage}")
            except DiptychError as error:
                soak.outcomes["sdk: failed"] += 1
                soak.errors.append(f"sdk: {error!r}")


async def over_budget_stream(soak: Soak, url: str, key: str, ends: asyncio.Event) -> None:
    """Asks for far more than its quota; it waits a second after a refusal, or Retry-After if that is less."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=600.0) as client:
        while not ends.is_set():
            try:
                await client.completions.create(model="smollm2", prompt="Once upon a time", max_tokens=60)
                soak.outcomes["over budget: served"] += 1
            except openai.RateLimitError as error:
                after = error.response.headers.get("retry-after")
                soak.outcomes["over budget: refused"] += 1
                if after is None:
                    soak.errors.append("over budget: no Retry-After")
                await within(ends, min(1.0, float(after or 1.0)))
            except openai.OpenAIError as error:
                soak.errors.append(f"over budget: {error!r}")


async def audited(soak: Soak, cluster: clusters.Cluster, ends: asyncio.Event) -> None:
    """A worker that is starting or was just killed does not answer: that is counted."""

    def audit(name: str) -> worker_pb2.AuditResponse | None:
        with contextlib.suppress(grpc.RpcError, StopIteration), cluster.worker_channel(name) as channel:
            return worker_pb2_grpc.WorkerStub(channel).Audit(
                worker_pb2.AuditRequest(full=True), timeout=10.0
            )  # short: it may be killed meanwhile; it is counted
        return None

    while not ends.is_set():
        answers = await asyncio.gather(*(asyncio.to_thread(audit, name) for name in WORKERS))
        for name, answer in zip(WORKERS, answers, strict=True):
            soak.audits["no answer" if answer is None else "answered"] += 1
            if answer is not None and answer.violations:
                soak.violations.append(f"{name}: {list(answer.violations)}")
        await within(ends, AUDIT_EVERY_S)


def memory_of(pid: int) -> tuple[float, float]:
    """See soak_law.private_mib. Raises: OSError."""
    with Path(f"/proc/{pid}/smaps").open(encoding="utf-8") as lines:
        return private_mib(lines)


async def sampled(soak: Soak, cluster: clusters.Cluster, began: float, ends: asyncio.Event) -> None:
    while not ends.is_set():
        pids = {"up": cluster.process.pid} | {child.name: child.pid for child in cluster.state.children}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                descriptors = psutil.Process(pid).num_fds()
                with contextlib.suppress(OSError):  # it has just ended
                    mib, fixed_mib = await asyncio.to_thread(memory_of, pid)
                    at, ended = time.monotonic() - began, soak.outcomes.total()
                    soak.samples[f"{name} {pid}"].append(Sample(at, ended, mib, descriptors, fixed_mib))
        await within(ends, SAMPLE_EVERY_S)


async def run(cluster: clusters.Cluster, keys: dict[str, str], *, minutes: float, seed: int) -> Soak:
    soak, ends, began = Soak(), asyncio.Event(), time.monotonic()
    watch = kill_run.Watch(cluster, keys["acme"])
    numbers = itertools.count()
    url, address = cluster.http_url, cluster.grpc_address
    tasks = [
        *(asyncio.create_task(http_stream(soak, url, keys["acme"], kind, numbers, ends)) for kind in KINDS),
        asyncio.create_task(leaving_stream(soak, url, keys["acme"], random.Random(seed), ends)),
        asyncio.create_task(sdk_stream(soak, address, keys["other"], random.Random(seed + 1), ends)),
        asyncio.create_task(over_budget_stream(soak, url, keys["greedy"], ends)),
        asyncio.create_task(audited(soak, cluster, ends)),
        asyncio.create_task(sampled(soak, cluster, began, ends)),
    ]
    while (left_s := began + 60.0 * minutes - time.monotonic()) > 0:
        done, _ = await asyncio.wait(tasks, timeout=min(KILL_EVERY_S, left_s), return_when=asyncio.FIRST_COMPLETED)
        if done:
            break  # one failed
        if left_s > KILL_EVERY_S:
            at = time.monotonic() - began
            victim = WORKERS[int(at / (20.0 * minutes)) % len(WORKERS)]
            if await watch.look() == set(WORKERS):
                cluster.kill(victim)
                soak.kills.append((round(at, 1), victim))
            else:  # one more could leave no decode worker
                soak.not_killed.append(round(at, 1))
            print(f"{at:.0f} s, {len(soak.kills)} kills, {dict(soak.outcomes)}, {len(soak.errors)} errors", flush=True)
    ends.set()
    await watch.close()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if ended is not None:
            soak.errors.append(f"the run itself: {ended!r}")
    try:
        for name in WORKERS:  # the last one killed may still be starting
            await asyncio.to_thread(cluster.wait_idle_of, name)
    except (AssertionError, TimeoutError) as error:
        soak.left_over = repr(error)
    return soak


def drawing(soak: Soak) -> str:
    series = [
        Series(name, [(one.seconds / 60.0, one.mib) for one in samples])
        for name, samples in sorted(soak.samples.items())
        if samples[-1].seconds - samples[0].seconds > LEAST_LIFE_S
    ]
    return chart(
        "Memory of each process that lived for three minutes (private, without the staging ring)",
        series,
        x="minutes",
        y="MiB",
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="soak_run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--warm-up-s", type=float, default=180.0, help="of a process: nothing before counts for its MiB a minute"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--up-args", default="", help="further flags of `diptych up`, as one string")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    environment = result.surroundings()
    clusters.OF_USERS = frozenset(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        file = root / "keys.json"
        keys = {
            name: add_key(file, name, now=0.0, tokens_per_minute=QUOTA if name == "greedy" else 0)[0]
            for name in ("acme", "other", "greedy")
        }
        model = str(kill_run.model_folder(root / "model", chosen.model))
        flags = ["--model", model, "--served-model-name", "smollm2", "--decode-workers", "2", "--keys-file", str(file)]
        flags += ["--num-blocks", str(BLOCKS)]
        with clusters.running_cluster(
            root, *flags, *chosen.up_args.split(), extra_env={"DIPTYCH_API_KEY": keys["acme"]}
        ) as cluster:
            soak = asyncio.run(run(cluster, keys, minutes=chosen.minutes, seed=chosen.seed))
    lives = soak.lives(chosen.warm_up_s)
    judged = {one["process"]: one["late_growth"]["holds"] for one in lives if one["late_growth"] is not None}
    grown = [process for process, holds in judged.items() if not holds]
    unjudged = [role for role in ("decode", "prefill") if not any(name.startswith(role) for name in judged)]
    more = [
        one["process"]
        for one in lives
        if one["descriptors_median_second_half"] > 1.2 * one["descriptors_median_first_half"] + 8
    ]
    body = {
        "environment": environment,
        "load_1m_at_end": round(os.getloadavg()[0], 1),
        "command": ["soak_run", *arguments],
        "minutes": chosen.minutes,
        "holds": not (grown or unjudged or more or soak.violations or soak.errors or soak.left_over),
        "outcomes": dict(sorted(soak.outcomes.items())),
        "errors": soak.errors[:50],
        "num_errors": len(soak.errors),
        "audits": dict(soak.audits),
        "violations": soak.violations,
        "left_over": soak.left_over,
        "kills": soak.kills,
        "not_killed": soak.not_killed,
        "lives": lives,
        "samples": {
            name: [[round(one.seconds), one.requests, round(one.mib, 2), round(one.fixed_mib, 2)] for one in samples]
            for name, samples in sorted(soak.samples.items())
        },
        "memory_grew": grown,
        "too_few_requests_of": unjudged,
        "descriptors_grew": more,
    }
    result.write(chosen.out, body)
    chosen.out.with_suffix(".svg").write_text(drawing(soak), encoding="utf-8")
    print(
        {
            name: body[name]
            for name in (
                "holds",
                "outcomes",
                "num_errors",
                "audits",
                "memory_grew",
                "too_few_requests_of",
                "descriptors_grew",
            )
        }
    )
    return 0 if body["holds"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
