"""Redis is killed for ten seconds under load, and comes back empty: no request fails, placements say that the view may be
old, and the router says when its index is right again, and then it is. How long that takes: `make redis-away`."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

from diptych_tests.fake_model_cluster import ask, check, fake_model_cluster
from diptych_tests.redis_away import holds, outage


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed")
async def test_redis_is_killed_for_ten_seconds_under_load(tmp_path: Path) -> None:
    async with fake_model_cluster(tmp_path, decode=2) as cluster, cluster.client() as client:
        seen = await outage(cluster, client, itertools.count(1))
        assert seen.failed == []
        assert set(seen.labels) == {"STALE"}
        assert seen.labels.total() >= 8
        for asked in seen.unseen[-2:]:  # computed while no event arrived
            answer = await client.generate(**asked)
            check(answer, asked)
            assert answer.explanation.index_mode == "EXACT"
            assert answer.explanation.predicted_cached_tokens == answer.usage.cached_tokens == 144  # all whole blocks
        fresh = ask(10**6)
        check(await client.generate(**fresh), fresh)
        await cluster.idle_again()


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, [True, True, True]),
        ({"failed": ["a"]}, [False, True, True]),
        ({"in_outage": {"STALE": 5, "EXACT": 1}}, [True, False, True]),
        ({"in_outage": {}}, [True, False, True]),
        ({"summary": {"right_s": {"max": 2.1}}}, [True, True, False]),
    ],
)
def test_what_a_record_shows(change: dict[str, Any], kept: list[bool]) -> None:
    record = {"failed": [], "in_outage": {"STALE": 5}, "summary": {"right_s": {"max": 1.4}}}
    assert [*holds(record | change).values()] == kept
