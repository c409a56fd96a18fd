"""Item 6.1: what the benchmark of decisions times is what a router runs."""

from __future__ import annotations

import dataclasses
import random

from diptych.bench.router.decision import HEADER, Setup
from diptych.common.clock import FakeClock
from diptych.common.store.memory import MemoryStore
from diptych.router.cluster.cluster import Cluster
from diptych.router.cluster.compatibility import RouterCheck
from diptych.router.config import RouterConfig
from diptych.router.placement.native.library import choose_library
from diptych.router.placement.placer import Candidate, Placer

DEFAULTS = {field.name: field.default for field in dataclasses.fields(RouterConfig)}


def graph(value, seen=()):
    """The types of an object and of all objects of the router below it."""
    kind = type(value)
    if not kind.__module__.startswith("diptych.router") or id(value) in seen:
        return "a function" if callable(value) else kind.__name__
    names = {name for base in kind.__mro__ for name in getattr(base, "__slots__", ())} | set(
        getattr(value, "__dict__", ())
    )
    return kind.__name__, {name: graph(getattr(value, name), (*seen, id(value))) for name in sorted(names)}


def in_production(clock: FakeClock) -> Placer:
    check = RouterCheck("model", "tokenizer", bytes(32))
    cluster = Cluster(
        MemoryStore(clock),
        check,
        clock=clock,
        rng=random.Random(0),
        policy=DEFAULTS["placement_policy"],
        hot_prefix_copies=DEFAULTS["hot_prefix_copies"],
        library=choose_library(DEFAULTS["placement_backend"]),
        turn_window_s=DEFAULTS["turn_window_s"],
    )
    return cluster.placer


async def test_the_benchmark_builds_what_production_builds():
    setup = Setup(8, 100_000, library=choose_library("auto"))
    placer = in_production(FakeClock())
    records = [setup.placer.fleet.records[i] for i in range(8)]
    for record in records:
        placer._index.register(record.worker_id, "i", 0, 0)
    sides = [
        [Candidate(record, 0.0, HEADER) for record in records if record.role == role] for role in ("prefill", "decode")
    ]
    placer.set_workers(*sides, {}, {})
    assert graph(placer) == graph(setup.placer)
    assert type(placer.policy).__name__ == "CheapestPair"
    assert len(placer._groups) == len(setup.placer._groups) == 1
    assert graph(placer._groups[0]) == graph(setup.placer._groups[0])
