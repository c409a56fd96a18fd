"""Redis is killed under load and comes back empty: what fails, how placements are labelled, and when the router's view is right
again; `make redis-away`.

    python -P -m diptych_tests.redis_away --times 10 --out FILE

All times are from the logs of the processes: Redis says when it accepts connections, a worker when it has a lease again, and the
router when it finds the store away, back, and its index right (every worker has a lease, and the index has all that the
leases mention). The cluster is that of fake_model_cluster: shipped processes with default intervals, and a fake model.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from diptych.bench import result
from diptych.client import AsyncClient
from diptych_tests import waiting
from diptych_tests.fake_model_cluster import FakeModelCluster, ask, check, fake_model_cluster

MOST_RIGHT_S = 2.0
"""After Redis' return, until the router's index is right."""
AWAY_S = 10.0
"""Longer than a lease (5 s): what is not renewed has ended."""
STREAMS = 4
_READY = re.compile(r"(\d+ \w{3} \d{4} [\d:]+\.\d+) .*Ready to accept connections")


@dataclass
class Outage:
    """Times are in seconds.

    Args:
        answers: of the whole run.
        labels: index_mode of those that were placed and ended while the router knew that Redis was away.
        unseen: their requests: no event told the router of their blocks.
        failed: what the streams raised.
        noticed_s: from the kill until the router said that the store is away.
        leases_s, view_s, right_s: from the time at which Redis accepted connections until the last worker had a lease, the router
            had read the store, and its index was right.
    """

    answers: int
    labels: Counter[str]
    unseen: list[dict[str, Any]]
    failed: list[str]
    noticed_s: float
    leases_s: float
    view_s: float
    right_s: float


async def outage(
    cluster: FakeModelCluster, client: AsyncClient, numbers: Iterator[int], away_s: float = AWAY_S
) -> Outage:
    """Kill Redis under load, start it again after `away_s`, and return when the router's index is right."""
    ends = asyncio.Event()
    done: list[tuple[float, float, dict[str, Any], str]] = []
    """(began, ended, request, index_mode)"""

    async def stream() -> None:
        while not ends.is_set():
            asked, began = ask(next(numbers)), time.time()
            answer = await client.generate(**asked)
            check(answer, asked)  # whole, and the undisturbed one
            assert answer.explanation is not None
            done.append((began, time.time(), asked, answer.explanation.index_mode))

    streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]

    async def served(more: int = 8) -> None:
        at = len(done)
        await waiting.until(lambda: len(done) >= at + more or any(one.done() for one in streams), every_s=0.05)

    try:
        await served()
        killed = time.time()
        cluster.kill_hard("redis")
        noticed = await said(cluster, "router", "store is unavailable", killed)
        await served()
        await waiting.until(lambda: time.time() > killed + away_s, every_s=0.05)
        assert await cluster.usable() == set(cluster.workers())  # none is dropped with its lease
        called_back = time.time()
        cluster.start("redis")
        ready = await redis_ready(cluster, called_back)
        leases = [await said(cluster, name, "registered in the store", called_back) for name in cluster.workers()]
        view = await said(cluster, "router", "store is available again", ready)
        right = await said(cluster, "router", "index is right again", view)
        await served()
    finally:
        ends.set()
        ended = await asyncio.gather(*streams, return_exceptions=True)
    in_outage = [one for one in done if noticed < one[0] and one[1] < called_back]
    return Outage(
        answers=len(done),
        labels=Counter(mode for *_, mode in in_outage),
        unseen=[asked for _, _, asked, _ in in_outage],
        failed=[repr(one) for one in ended if one is not None],
        noticed_s=round(noticed - killed, 3),
        leases_s=round(max(leases) - ready, 3),
        view_s=round(view - ready, 3),
        right_s=round(right - ready, 3),
    )


async def said(cluster: FakeModelCluster, name: str, event: str, since: float) -> float:
    """When a process first logged the event, not before `since`."""

    def times() -> list[float]:
        lines = (cluster.root / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        entries = [json.loads(line) for line in lines if f'"{event}"' in line]
        return [at for one in entries if (at := datetime.fromisoformat(one["timestamp"]).timestamp()) >= since]

    await waiting.until(times, f"{name} says {event!r}", every_s=0.05)
    return times()[0]


async def redis_ready(cluster: FakeModelCluster, since: float) -> float:
    """When Redis, started at `since`, accepted connections: to the millisecond, as its log says."""

    def times() -> list[float]:
        found = _READY.findall((cluster.root / "redis.log").read_text(encoding="utf-8", errors="replace"))
        moments = [datetime.strptime(text, "%d %b %Y %H:%M:%S.%f").timestamp() for text in found]  # noqa: DTZ007 - local
        return [at for at in moments if at >= since - 0.001]

    await waiting.until(times, "Redis accepts connections", every_s=0.05)
    return times()[0]


async def measured(root: Path, times: int) -> list[Outage]:
    numbers, found = itertools.count(1), []
    async with fake_model_cluster(root, decode=2) as cluster, cluster.client() as client:
        for number in range(times):
            found.append(await outage(cluster, client, numbers))
            one = found[-1]
            print(f"[{number + 1}/{times}] {one.answers} answers, {one.labels}, {len(one.failed)} failed; leases "
                  f"{one.leases_s} s, view {one.view_s} s, index {one.right_s} s after the return", flush=True)  # fmt: skip
        await cluster.idle_again()
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="redis_away", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    environment = result.surroundings()
    with tempfile.TemporaryDirectory() as root:
        outages = asyncio.run(measured(Path(root), chosen.times))
    summary = {
        name: {"median": statistics.median(values), "max": max(values)}
        for name in ("noticed_s", "leases_s", "view_s", "right_s")
        if (values := [getattr(one, name) for one in outages])
    }
    body: dict[str, Any] = {
        "environment": environment,
        "command": ["redis_away", *arguments],
        "away_s": AWAY_S,
        "streams": STREAMS,
        "answers": sum(one.answers for one in outages),
        "failed": [text for one in outages for text in one.failed],
        "in_outage": dict(sum((one.labels for one in outages), Counter())),
        "summary": summary,
        "outages": [{name: getattr(one, name) for name in ("answers", *summary)} for one in outages],
    }
    body["holds"] = holds(body)
    result.write(chosen.out, body)
    print(body["holds"], flush=True)
    return 0 if all(body["holds"].values()) else 1


def holds(body: Mapping[str, Any]) -> dict[str, bool]:
    """Which promises a record shows."""
    return {
        "no request failed": not body["failed"],
        "placements are labelled": set(body["in_outage"]) == {"STALE"},
        f"the index is right within {MOST_RIGHT_S:g} s": body["summary"]["right_s"]["max"] <= MOST_RIGHT_S,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
