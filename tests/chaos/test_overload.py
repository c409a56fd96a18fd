"""Five times the capacity, from clients that ask again: refusals are typed and say when to come again, nothing else goes wrong,
and both pools are as before once it is over. How much is served meanwhile, and how soon: `make bench-overload-http`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import ask, check, fake_model_cluster
from diptych_tests.overload_run import PROMPT, run, told

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
STEP_S, STEP_TOKENS, TARGET_S = 0.2, 128, 2.0
CAPACITY = 2 * STEP_TOKENS / STEP_S / (sum(PROMPT) / 2)
"""Requests a second that two prefill workers compute at most."""


async def test_five_times_the_capacity(tmp_path: Path) -> None:
    slow: dict[str, Any] = {"fake": {"step_s": STEP_S}, "max_num_batched_tokens": STEP_TOKENS}
    async with fake_model_cluster(
        tmp_path, prefill=2, decode=2, router={"max_ttft_s": TARGET_S}, prefill_0=slow, prefill_1=slow
    ) as cluster:
        async with aiohttp.ClientSession(cluster.http_url, timeout=aiohttp.ClientTimeout(total=300.0)) as http:
            before = await run(http, [(12.0, 0.8 * CAPACITY)], 1, range(1000))  # its speeds are learned
            phases = [(2.0, 0.5 * CAPACITY), (8.0, 5.0 * CAPACITY), (4.0, 0.5 * CAPACITY)]
            sent = await run(http, phases, 2, range(1000, 2000))
        assert set(told(before)) <= {"200", "529"}
        assert set(told(sent)) == {"200", "529"}, told(sent)
        assert [one.error for one in sent if one.error] == []
        assert all(one.retry_after_s > 0 for one in sent if one.refused)
        assert await cluster.metric("diptych_admission_refusals_judged_total", right="no") == 0, (
            "a refused request would have been in time"
        )

        async def nothing_booked() -> bool:
            workers = (await cluster.status())["cluster"]["workers"]
            return not any(one["pending_requests"] or one["pending_tokens"] for one in workers)

        await cluster.idle_again()
        await waiting.until(nothing_booked, "the router has nothing booked")
        async with cluster.client() as client:
            for number in range(4):  # none is refused any more
                check(await client.generate(**ask(5000 + number)), ask(5000 + number))
        assert await cluster.usable() == set(cluster.workers())
        assert await cluster.metric("diptych_replacements_total") == 0
