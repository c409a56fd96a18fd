"""A router whose cache events are dropped, doubled and reordered converges to the workers' caches."""

import asyncio
import random
from dataclasses import replace

from diptych.common.block_identity import block_keys
from diptych.common.secret import tenant_salt
from diptych.common.store.interface import KvEvent
from diptych.common.tiers import TierState
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.index import IndexMode
from diptych_tests.router_fleet import running

SETTLED_S = 60.0


def spoiled(events, rng):
    """5% of them lost, 5% doubled, 5% late by one place."""
    out = []
    for event in events:
        luck = rng.random()
        if luck < 0.05:
            continue
        out += [event, event] if luck < 0.10 else [event]
        if luck > 0.95 and len(out) > 1:
            out[-1], out[-2] = out[-2], out[-1]
    return out


async def test_the_index_is_the_workers_truth_two_seconds_after_lossy_news(model_folder, tmp_path):
    rng = random.Random(7)
    async with running(model_folder, tmp_path) as fleet:
        prompts = [[i] * 17 for i in range(60)]
        header = replace(fleet.header, salt=tenant_salt(fleet.secret, ""))
        keys = [block_keys(header, prompt)[0] for prompt in prompts]
        workers = {name: await fleet.add(name, role) for name, role in (("p0", "prefill"), ("d0", "decode"))}
        await fleet.until_ready()
        held = {name: set() for name in workers}
        sequence = dict.fromkeys(workers, 0)
        for _ in range(20):
            for name, worker in workers.items():
                batch = []
                for _ in range(20):
                    key = rng.choice(keys)
                    kind = "evicted" if key in held[name] else "stored"
                    (held[name].discard if kind == "evicted" else held[name].add)(key)
                    sequence[name] += 1
                    batch.append(KvEvent(worker.incarnation, 0, sequence[name], kind, (key,)))
                worker.dump = (0, sequence[name], tuple(held[name]))
                await fleet.store.append_events(name, spoiled(batch, rng))
            await asyncio.sleep(0.005)  # sleep: the reader may look between two batches or not
        for name, worker in workers.items():  # as heartbeats do: how far the worker's events go
            record = fleet.record(
                worker, {"p0": "prefill", "d0": "decode"}[name], tiers=(TierState("device", sequence[name]),)
            )
            await fleet.store.put_worker(record, ttl_s=1000)
        index = fleet.frontend._cluster._index

        def settled():
            for name in workers:
                if index.mode(name) is not IndexMode.EXACT:
                    return False
                for key in keys:
                    column = index.column(name)
                    if bool(index.runs(as_keys([key])).blocks[column]) is not (key in held[name]):
                        return False
            return True

        await fleet.until(settled)
        assert any(worker.num_dumps for worker in workers.values())
