"""Pools of seven blocks and staging rings of two slabs on both sides: whatever is full, some request always gets on.

Every bound of time is an hour: a request that waits for one would fail the test.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

from diptych_tests import waiting
from diptych_tests.fake_model_cluster import ask, check, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]
AN_HOUR = 3600.0
KV = {"head_dim": 32}
"""A slab holds one block."""
TINY: dict[str, Any] = {
    "num_blocks": 7, "num_slabs": 2, "num_second_slabs": 2, "slab_bytes": 4096, "fake": KV, "max_num_seqs": 16,
    "slab_lease_s": AN_HOUR, "read_base_s": AN_HOUR, "leg_silence_s": AN_HOUR,
}  # fmt: skip


async def test_both_pools_are_full_and_every_request_ends(tmp_path: Path) -> None:
    async with (
        fake_model_cluster(tmp_path, router={"turn_window_s": 0.0}, **TINY) as cluster,
        cluster.client(AN_HOUR) as client,
    ):
        asks = [ask(i, num_prompt=40 + i, max_tokens=20 + i % 5) for i in range(16)]
        async with asyncio.timeout(300.0):
            answers = await asyncio.gather(*(client.generate(**asked) for asked in asks))
        for asked, answer in zip(asks, answers, strict=True):
            check(answer, asked, **KV)
            assert not answer.explanation.attempts
        await cluster.idle_again()


@pytest.mark.slow
async def test_each_worker_is_shown_with_its_own_size(tmp_path: Path) -> None:
    """One of 40 blocks that is nearly full beside one of 400: what is reported of each is of its own blocks."""
    sizes = {"decode_0": {"num_blocks": 40}, "decode_1": {"num_blocks": 400}}
    async with fake_model_cluster(tmp_path, decode=2, **sizes) as cluster, cluster.client() as client:
        await cluster.hold("decode-0", after_steps=4)
        for number in itertools.count():
            asked = ask(number, num_prompt=470, max_tokens=30)
            answering = asyncio.create_task(client.generate(**asked))
            await waiting.until(lambda one=answering: one.done() or cluster.gates.held("decode-0"), every_s=0.01)
            if not answering.done():
                break  # the small one has it

        async def usages() -> dict[str, tuple[int, float]]:
            workers = (await cluster.status())["cluster"]["workers"]
            return {one["id"]: (one["num_blocks"], one["kv_usage"]) for one in workers if one["role"] == "decode"}

        async def reported() -> bool:
            return (await usages())["decode-0"][1] > 0

        await waiting.until(reported, "it reports what it holds")
        (small, small_usage), (large, large_usage) = (await usages())["decode-0"], (await usages())["decode-1"]
        assert (small, large) == (40, 400)
        assert small_usage > 0.7
        assert large_usage < 0.1
        cluster.gates.open("decode-0")
        check(await answering, asked)
        await cluster.idle_again()
