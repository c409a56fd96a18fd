"""Five times the capacity over HTTP, from clients that retry, against shipped processes; `make bench-overload-http`.

    python -P -m diptych_tests.overload_run --out FILE

The cluster is that of fake_model_cluster: real processes, gRPC, UCX and Redis, with a model whose step takes a fixed time in
place of computing, so that the capacity is not that of a busy machine. The router has its default flags, a target
(--max-ttft-s), which no default can know, and no local prefill, so that the capacity is that of the prefill workers. First
steady loads around the capacity, for the peak; then half the capacity, five times it, and half again. Each load has as many
arrivals as its rate says, at random times. A client whose request is refused waits Retry-After, and up to half as long again,
and asks for the same up to four times; when the surge ends its clients are gone. A request is good if its first token came
within the target, as its client saw it, and its answer is whole. The second run has admission off; what still waits there some
time after the last arrival is too late for certain, and is given up.

What must hold with admission on, and is in the record: accepted requests are in time (but for the one in a hundred refusals that
is not carried out, and those that a shorter one delays), good answers are nine tenths of the peak, everything is in time 10 s
after the surge, every refusal says when to come again, and nothing else goes wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from diptych.bench import result
from diptych.router.config import ADMISSION_MODES
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, body_of, fake_model_cluster

PREFILLS, DECODES = 2, 2
PREFILL_STEP_S, DECODE_STEP_S = 0.64, 0.06
"""Slow, so that router and clients need a tenth of a core at five times the capacity."""
STEP_TOKENS = 128
PROMPT, ANSWER = (100, 400), (8, 24)
"""Least and most tokens."""
TARGET_S = 6.0
TIMES = 5.0
ATTEMPTS = 4
RECOVERY_S = 10.0
LEAST_IN_TIME, LEAST_OF_PEAK = 0.95, 0.9
"""Shares of what was accepted, and of the peak, that must be good."""
SETTLED_S = 5.0
"""Of a load: what is sent before is not counted."""
_TELL_S = 10.0
_GIVE_UP_S = 20.0
"""After the last arrival: longer than the target and an answer."""
CAPACITY = PREFILLS * STEP_TOKENS / PREFILL_STEP_S / (sum(PROMPT) / 2)
"""Requests a second that the prefill workers compute at most."""


@dataclass
class Attempt:
    """One request of a client: when it was sent (seconds of the run), its status, and seconds to the first token and to the end;
    retry_after_s: of a refusal; given_up: it waited still when the run ended."""

    at: float
    num_prompt: int
    status: int = 0
    ttft_s: float = math.inf
    took_s: float = math.inf
    retry_after_s: float = 0.0
    error: str = ""
    given_up: bool = False

    @property
    def good(self) -> bool:
        return self.status == 200 and not self.error and not self.given_up and self.ttft_s <= TARGET_S

    @property
    def accepted(self) -> bool:
        return self.status == 200 or self.given_up

    @property
    def refused(self) -> bool:
        return self.status not in (0, 200)


async def send(http: aiohttp.ClientSession, attempt: Attempt, number: int, max_tokens: int) -> None:
    """Fill the attempt. Cancelled: it is given up."""
    body = body_of(ask(number, num_prompt=attempt.num_prompt, max_tokens=max_tokens), stream=True)
    sent, tokens, end = time.monotonic(), 0, ""
    try:
        async with http.post("/v1/completions", json=body) as response:
            attempt.status = response.status
            if response.status != 200:
                attempt.retry_after_s = float(response.headers.get("retry-after", 0.0))
            else:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        attempt.error = str(chunk["error"])
                        break
                    for choice in chunk["choices"]:
                        if choice.get("token_ids") and not tokens:
                            attempt.ttft_s = time.monotonic() - sent
                        tokens += len(choice.get("token_ids") or ())
                        end = choice.get("finish_reason") or end
                if not attempt.error and (tokens, end) != (max_tokens, "length"):
                    attempt.error = f"{tokens} of {max_tokens} tokens, {end!r}"
    except (aiohttp.ClientError, TimeoutError) as error:
        attempt.error = repr(error)
    except asyncio.CancelledError:
        attempt.given_up = True
        raise
    attempt.took_s = time.monotonic() - sent


def arrivals(phases: Sequence[tuple[float, float]], rng: random.Random) -> list[float]:
    """Times of arrival: a Poisson process of which the number in each phase is known, so that a load is what it is called."""
    found, start = list[float](), 0.0
    for seconds, rate in phases:
        found += sorted(start + seconds * rng.random() for _ in range(round(seconds * rate)))
        start += seconds
    return found


async def run(
    http: aiohttp.ClientSession, phases: Sequence[tuple[float, float]], seed: int, numbers: range
) -> list[Attempt]:
    """`phases`: (seconds, requests per second); clients of the second one leave at its end."""
    sent = list[Attempt]()
    began = time.monotonic()
    start = sum(seconds for seconds, _ in phases)
    ends = sum(seconds for seconds, _ in phases[:2]) if len(phases) > 1 else math.inf

    async def client(number: int, at: float) -> None:
        own = random.Random(number)
        num_prompt, max_tokens = own.randint(*PROMPT), own.randint(*ANSWER)
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))  # sleep: its time of arrival
        for _ in range(ATTEMPTS):
            attempt = Attempt(time.monotonic() - began, num_prompt)
            sent.append(attempt)
            await send(http, attempt, number, max_tokens)
            if not attempt.refused:
                return
            wait_s = attempt.retry_after_s * (1.0 + 0.5 * own.random())
            if at < ends <= time.monotonic() - began + wait_s:
                return
            await asyncio.sleep(wait_s)  # sleep: as Retry-After says

    times = arrivals(phases, random.Random(seed))
    clients = [asyncio.create_task(client(number, at)) for number, at in zip(numbers, times, strict=False)]
    telling = asyncio.create_task(_tell(sent, began, start))
    try:
        _, late = await asyncio.wait(clients, timeout=start + _GIVE_UP_S)
        for one in late:
            one.cancel()
        ended = await asyncio.gather(*clients, return_exceptions=True)
    finally:
        telling.cancel()
    for error in ended:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            raise error
    return sent


async def _tell(sent: Sequence[Attempt], began: float, seconds: float) -> None:
    """A line now and then: minutes pass otherwise without one."""
    while True:
        await asyncio.sleep(_TELL_S)  # sleep: between two lines
        print(f"  after {time.monotonic() - began:.0f} s (arrivals: {seconds:.0f} s): {told(sent)}", flush=True)


def told(sent: Sequence[Attempt]) -> dict[str, int]:
    """How many attempts have which status, or wait."""
    waits = "given up" if any(one.given_up for one in sent) else "waits"
    return dict(Counter(waits if one.given_up or not (one.status or one.error) else str(one.status) for one in sent))


def goodput(sent: Sequence[Attempt], since: float, until: float) -> tuple[float, float]:
    """Good answers, and prompt tokens of theirs, per second, by when they were sent."""
    good = [one.num_prompt for one in sent if one.good and since <= one.at < until]
    return len(good) / (until - since), sum(good) / (until - since)


def figures(
    sent: Sequence[Attempt], phases: Sequence[tuple[float, float]], peak: tuple[float, float]
) -> dict[str, Any]:
    before, surge, after = (seconds for seconds, _ in phases)
    ends = before + surge
    got = goodput(sent, before + SETTLED_S, ends)
    accepted = [one for one in sent if one.accepted and before + SETTLED_S <= one.at < ends]
    refused = [one for one in sent if one.refused]
    late = [one.at - ends for one in sent if one.at >= ends and not one.good]
    last = [one for one in sent if one.at >= ends + RECOVERY_S]
    return {
        "attempts": len(sent),
        "statuses": told(sent),
        "errors": [one.error for one in sent if one.error][:20],
        "num_errors": sum(bool(one.error) for one in sent),
        "goodput_per_s": round(got[0], 2),
        "goodput_of_peak": round(got[0] / peak[0], 3) if peak[0] else None,
        "tokens_of_peak": round(got[1] / peak[1], 3) if peak[1] else None,
        "accepted": len(accepted),
        "accepted_in_time": round(sum(one.good for one in accepted) / max(1, len(accepted)), 4),
        "accepted_ttft_s": quantiles([one.ttft_s for one in accepted]),
        "accepted_late": [(one.num_prompt, rounded(one.ttft_s)) for one in accepted if not one.good][:20],
        "refused": len(refused),
        "refused_after_s": quantiles([one.took_s for one in refused]),
        "without_retry_after": sum(not one.retry_after_s for one in refused),
        "last_late_s_after_the_surge": round(max(late), 2) if late else 0.0,
        "in_time_10_s_after": round(sum(one.good for one in last) / max(1, len(last)), 4),
        "seconds_after": after,
    }


def rounded(seconds: float) -> float | None:
    """None: it never came."""
    return round(seconds, 3) if math.isfinite(seconds) else None


def quantiles(seconds: Sequence[float]) -> dict[str, float | None]:
    times = sorted(seconds)
    at = lambda share: rounded(times[math.ceil(share * len(times)) - 1] if times else math.inf)  # noqa: E731
    return {"p50": at(0.5), "p99": at(0.99), "max": at(1.0)}


def holds(on: Mapping[str, Any]) -> dict[str, bool]:
    """Which of the promises hold; see the module."""
    return {
        "accepted requests are in time": on["accepted_in_time"] >= LEAST_IN_TIME,
        "goodput": (on["goodput_of_peak"] or 0.0) >= LEAST_OF_PEAK,
        "recovery": on["in_time_10_s_after"] == 1.0,
        "every refusal has Retry-After": not on["without_retry_after"],
        "no errors": not on["num_errors"],
        "no refusal was wrong": not on["refusals_judged"]["no"],
    }


async def serve(cluster: FakeModelCluster, *, seconds: float, surge_s: float, peaks: bool, seed: int) -> dict[str, Any]:
    """The peak (if asked for), and the overload, at one cluster."""
    numbers = iter(range(0, 10**9, 10**6))
    found: dict[str, Any] = {}
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        cluster.http_url, connector=limits, timeout=aiohttp.ClientTimeout(total=300.0)
    ) as http:

        async def some(phases: Sequence[tuple[float, float]], seed: int) -> list[Attempt]:
            first = next(numbers)
            return await run(http, phases, seed, range(first, first + 10**6))

        print("0.6 of the capacity, so that rates are measured", flush=True)
        await some([(15.0, 0.6 * CAPACITY)], seed)  # rates are measured, and speeds learned
        if peaks:
            found["steady"] = {}
            for part in (0.75, 0.9, 1.05):
                print(f"{part} of the capacity", flush=True)
                sent = await some([(seconds, part * CAPACITY)], seed)
                each, tokens = goodput(sent, SETTLED_S, seconds)
                found["steady"][part] = {"good_per_s": round(each, 3), "tokens_per_s": round(tokens, 1)}
                print(part, found["steady"][part], flush=True)
        print(f"half the capacity, {TIMES:.0f} times it for {surge_s:.0f} s, and half again", flush=True)
        phases = [(15.0, 0.5 * CAPACITY), (surge_s, TIMES * CAPACITY), (30.0, 0.5 * CAPACITY)]
        router = psutil.Process(cluster.processes["router"].pid)
        before, began = router.cpu_times(), time.monotonic()
        found["phases"], found["sent"] = phases, await some(phases, seed + 1)
        after = router.cpu_times()
        used_s = after.user + after.system - before.user - before.system
        found["router_cores"] = round(used_s / (time.monotonic() - began), 3)
        judged = {
            right: cluster.metric("diptych_admission_refusals_judged_total", right=right) for right in ("yes", "no")
        }
        found["refusals_judged"] = {right: int(await number) for right, number in judged.items()}
    return found


async def measured(root: Path, *, modes: Sequence[str], seconds: float, surge_s: float, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {}
    peak = (0.0, 0.0)
    for mode in modes:
        folder = root / mode
        folder.mkdir()
        print(f"admission {mode}: the cluster starts", flush=True)
        workers = {
            f"{role}_{i}": {"fake": {"step_s": step_s}, "max_num_batched_tokens": STEP_TOKENS}
            for role, count, step_s in (("prefill", PREFILLS, PREFILL_STEP_S), ("decode", DECODES, DECODE_STEP_S))
            for i in range(count)
        }
        router: dict[str, object] = {"max_ttft_s": TARGET_S, "local_prefill_max_tokens": 0, "admission": mode}
        async with fake_model_cluster(folder, prefill=PREFILLS, decode=DECODES, router=router, **workers) as cluster:
            found = await serve(cluster, seconds=seconds, surge_s=surge_s, peaks=mode == "on", seed=seed)
            await cluster.idle_again()
        if mode == "on":
            steady = found["steady"].values()
            peak = (max(one["good_per_s"] for one in steady), max(one["tokens_per_s"] for one in steady))
            body |= {"steady": found["steady"], "phases": found["phases"]}
        body[f"admission {mode}"] = figures(found["sent"], found["phases"], peak) | {
            name: found[name] for name in ("refusals_judged", "router_cores")
        }
        print(mode, body[f"admission {mode}"], flush=True)
    return body


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="overload_run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="of each steady load")
    parser.add_argument("--surge-s", type=float, default=60.0)
    parser.add_argument("--modes", default="on,off", help="of admission; the first must be on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    modes = chosen.modes.split(",")
    if modes[0] != "on" or len(set(modes)) < len(modes) or set(modes) - set(ADMISSION_MODES):
        parser.error(f"--modes {chosen.modes}: on, and then others of {', '.join(ADMISSION_MODES)}, with commas")
    for name in ("seconds", "surge_s"):
        if getattr(chosen, name) <= SETTLED_S:
            flag, given = name.replace("_", "-"), getattr(chosen, name)
            parser.error(f"--{flag} {given:g}: must be above {SETTLED_S:g}, whose requests are not counted")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    environment = result.surroundings()
    with tempfile.TemporaryDirectory() as root:
        body = asyncio.run(
            measured(
                Path(root),
                modes=modes,
                seconds=chosen.seconds,
                surge_s=chosen.surge_s,
                seed=chosen.seed,
            )
        )
    setting = {
        "prefill_workers": PREFILLS, "decode_workers": DECODES, "prefill_step_s": PREFILL_STEP_S, "decode_step_s": DECODE_STEP_S,
        "step_tokens": STEP_TOKENS, "prompt_tokens": PROMPT, "answer_tokens": ANSWER, "target_s": TARGET_S, "times": TIMES,
        "attempts": ATTEMPTS, "capacity_per_s": round(CAPACITY, 3),
    }  # fmt: skip
    result.write(
        chosen.out,
        {
            "environment": environment,
            "load_1m_at_end": round(os.getloadavg()[0], 1),
            "command": ["overload_run", *arguments],
            "setting": setting,
            **body,
            "holds": (kept := holds(body["admission on"])),
        },
    )
    print(kept, flush=True)
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
