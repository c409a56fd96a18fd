"""Runs over all tiers against a walk over sets; test_third_tier.py runs it with one tier more."""

from __future__ import annotations

import random

import pytest

from diptych.common.store.interface import KvEvent
from diptych.common.tiers import TIER_NAMES, TierDump
from diptych.router.placement.block_table import as_keys
from diptych.router.placement.index import BlockIndex


@pytest.mark.parametrize("seed", range(30))
def test_each_block_counts_in_its_nearest_tier(seed: int) -> None:
    chance = random.Random(seed)
    prompt = [chance.randbytes(16) for _ in range(300)]
    index = BlockIndex()
    held: dict[str, list[set[bytes]]] = {}
    for name in ("a", "b"):
        index.register(name, "i", 0)
        held[name] = [{key for key in prompt[: chance.randrange(301)] if chance.random() < 0.7} for _ in TIER_NAMES]
        if name == "a":
            for tier, keys in zip(TIER_NAMES, held[name], strict=True):
                index.apply(name, KvEvent("i", 0, 1, "stored", tuple(keys), tier))
        else:
            index.mark_stale(name)
            index.load_snapshot(name, "i", epoch=0, tiers=[TierDump(3, tuple(keys)) for keys in held[name]])
    runs = index.runs(as_keys(prompt))
    assert runs.lower_blocks is not None
    for name, tiers in held.items():
        reach = 0
        while reach < 300 and any(prompt[reach] in tier for tier in tiers):
            reach += 1
        nearest = [next(i for i, tier in enumerate(tiers) if key in tier) for key in prompt[:reach]]
        column = index.column(name)
        assert runs.blocks[column] == reach
        assert [int(row[column]) for row in runs.lower_blocks] == [nearest.count(i) for i in range(1, len(TIER_NAMES))]
