"""Which blocks the tiers below the first one should keep: hit and computed tokens of one worker, by the order in which host
memory and files let blocks go. `python -P -m diptych.bench.engine.tiers [--seeds 1 2 3] [--out FILE]`

The pool, the tiers and the orders are the engine's, the requests are those of a trace in their order; nothing is computed:

    agents    conversations of 6 to 8 turns with pauses of 20 s
    chats     the trace of quality.py
    mixed     the agents, beside prompts that come once
    once      prompts that come once

`best` evicts the block whose next use is farthest in the future, of equals the last one of the prompt: no order can know it.
Host memory gets what the first tier evicts, files get everything that is computed.
"""

from __future__ import annotations

import argparse
import dataclasses
from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from diptych.bench.result import RESULTS, surroundings, write
from diptych.bench.router.claims import AGENTS
from diptych.bench.router.trace import BLOCK_SIZE, TraceConfig, TraceRequest, make_trace, merged
from diptych.common.tiers import TIER_EVICTIONS
from diptych.engine.sched.cache.block_pool import BlockPool
from diptych.engine.sched.cache.disk_tier import DiskTier
from diptych.engine.sched.cache.eviction import OldestUseLastBlockFirst, TierOrder, Uses, tier_orders
from diptych.engine.sched.cache.host_tier import HostTier

CHATS = TraceConfig(duration_s=120.0, sessions_per_s=2.0)
ONCE = TraceConfig(
    duration_s=200.0, sessions_per_s=2.0, turns=(1, 1), system_prompts=200, system_tokens=(16, 64),
    question_tokens=(512, 3000),
)  # fmt: skip
DEVICE, LOWER = 0.03, (0.05, 0.15, 0.4)
"""Of all blocks of a trace: in the first tier, and in the one below."""
ORDERS = (*TIER_EVICTIONS, "best")


class FarthestFirst:
    """The order of `best`."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self._uses: dict[bytes, list[int]] = {}
        for use, request in enumerate(trace, 1):
            for key in request.keys:
                self._uses.setdefault(key, []).append(use)
        self._index = {key: index for request in trace for index, key in enumerate(request.later_keys)}
        self._next: dict[bytes, int] = {}
        self._heap: list[tuple[int, int, bytes]] = []
        self._now = 0

    def __len__(self) -> int:
        return len(self._next)

    def __contains__(self, key: bytes) -> bool:
        return key in self._next

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._next)

    def used(self, keys: Sequence[bytes], use: int) -> None:
        self._now = use
        for key in keys:
            if key in self._next:
                self._put(key)

    def add(self, key: bytes, use: int, index: int) -> None:
        self._put(key)

    def remove(self, key: bytes) -> bool:
        return self._next.pop(key, None) is not None

    def pop(self, protected: Container[bytes] = ()) -> bytes | None:
        while self._heap:
            farthest, _, key = heappop(self._heap)
            if self._next.get(key) == -farthest:
                del self._next[key]
                return key
        return None

    def of_claimed(self) -> TierOrder:
        return OldestUseLastBlockFirst()

    def _put(self, key: bytes) -> None:
        uses = self._uses.get(key, [])
        at = bisect_right(uses, self._now)
        self._next[key] = uses[at] if at < len(uses) else 1 << 60
        heappush(self._heap, (-self._next[key], -self._index[key], key))


@dataclasses.dataclass(slots=True)
class Tokens:
    """Of all prompts."""

    prompt: int = 0
    device: int = 0
    lower: int = 0
    computed: int = 0


class Worker:
    """One pool, and one tier below it. Args: host, disk: blocks."""

    def __init__(self, device: int, host: int, disk: int, orders: tuple[Uses | None, TierOrder, TierOrder]) -> None:
        self._uses, host_order, disk_order = orders
        self._pool = BlockPool(
            device, HostTier(host, host_order), disk=DiskTier(disk, order=disk_order), uses=self._uses
        )
        self._pool.disk.open(())
        self.tokens = Tokens()

    def serve(self, request: TraceRequest, use: int) -> None:
        pool, keys = self._pool, request.keys[: (request.num_tokens - 1) // BLOCK_SIZE]
        hits = pool.find(keys)
        pool.pin(hits)
        rest = keys[len(hits) :]
        lower = len(pool.host.find(rest)) or len(pool.disk.run(rest))
        if self._uses is not None:
            self._uses.used(keys[: len(hits) + lower], use)
        for tier in (pool.host, pool.disk):
            tier.used(keys[: len(hits) + lower], use)
        pool.host.protect(rest[:lower])
        new = request.later_keys[len(hits) :]
        blocks = pool.allocate(len(new))
        assert blocks is not None, "the pool holds the longest request"
        pool.host.protect(())
        for block, key in zip(blocks, new, strict=True):
            pool.publish(block, key)
        first = len(hits) + lower
        if self._uses is not None:
            self._uses.used(request.later_keys[first:], use, first)
        pool.disk.offer(request.later_keys, 0, "", use)
        while taken := pool.disk.take(64, lambda key: True):
            pool.disk.written(taken, ())
        pool.release([*reversed(blocks), *reversed(hits)])
        (
            pool.take_copies(),
            pool.take_events(),
            pool.host.take_events(),
            pool.disk.take_events(),
            pool.disk.take_removed(),
        )
        tokens = self.tokens
        tokens.prompt += request.num_tokens
        tokens.device += len(hits) * BLOCK_SIZE
        tokens.lower += lower * BLOCK_SIZE
        tokens.computed += request.num_tokens - (len(hits) + lower) * BLOCK_SIZE


def traces(seed: int) -> dict[str, list[TraceRequest]]:
    agents = make_trace(dataclasses.replace(AGENTS, seed=seed))
    once = make_trace(dataclasses.replace(ONCE, seed=seed + 100))
    return {
        "agents": agents,
        "chats": make_trace(dataclasses.replace(CHATS, seed=seed)),
        "mixed": merged({"agents": agents, "once": once}),
        "once": once,
    }


def compare(trace: Sequence[TraceRequest], tier: str, part: float) -> dict[str, Any]:
    """Args: tier: host or disk; part: its size, of all blocks of the trace."""
    count = len({key for request in trace for key in request.later_keys})
    device = max(int(DEVICE * count), *(len(request.later_keys) + 1 for request in trace))
    lower = int(part * count)
    host, disk = (lower, 0) if tier == "host" else (0, lower)
    found: dict[str, Any] = {"tier": tier, "blocks": count, "device_blocks": device, "tier_blocks": lower}
    for name in ORDERS:
        orders: tuple[Uses | None, TierOrder, TierOrder] = (None, FarthestFirst(trace), FarthestFirst(trace))
        worker = Worker(device, host, disk, orders if name == "best" else tier_orders(name, count))
        for use, request in enumerate(trace, 1):
            worker.serve(request, use)
        found[name] = dataclasses.asdict(worker.tokens)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=RESULTS / "tier-eviction-20261129.json")
    args = parser.parse_args()
    began, runs = surroundings(), []
    for seed in args.seeds:
        for what, trace in traces(seed).items():
            for tier in ("host", "disk"):
                for part in LOWER:
                    runs.append({"trace": what, "seed": seed, "requests": len(trace), **compare(trace, tier, part)})
                    shares = {name: round(runs[-1][name]["lower"] / runs[-1][name]["prompt"], 4) for name in ORDERS}
                    print(seed, what, tier, part, shares, flush=True)
    write(
        args.out,
        {"what": "evictions from host memory and from files, by their order", "surroundings": began, "runs": runs},
    )


if __name__ == "__main__":
    main()
