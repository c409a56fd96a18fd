"""Logits that are no numbers, in one row of a step: that request ends typed, and its neighbours get their answers."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from diptych.client import DiptychError
from diptych_tests.fake_model_cluster import POISON, ask, check, fake_model_cluster

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCXX is not installed"),
]


async def test_logits_that_are_no_numbers_end_their_request_alone(tmp_path: Path) -> None:
    """On prefill and on decode, amid others that share its steps; nothing of it is cached, and no worker counts as faulty."""
    async with fake_model_cluster(tmp_path, fake={"poison": POISON}) as cluster, cluster.client() as client:
        for local in (0, 2**31 - 1):
            bad = ask(50)
            bad["token_ids"][100] = POISON
            asks = [ask(number + local % 7) for number in range(6)]
            running = [asyncio.create_task(client.generate(**a, local_prefill_max_tokens=local)) for a in asks]
            for _ in range(2):
                with pytest.raises(DiptychError, match="logits"):
                    await client.generate(**bad, local_prefill_max_tokens=local)
            for asked, answer in zip(asks, await asyncio.gather(*running), strict=True):
                check(answer, asked)
            good = bad | {"token_ids": [*bad["token_ids"][:100], 5, *bad["token_ids"][101:]]}
            answer = await client.generate(**good, local_prefill_max_tokens=local)
            check(answer, good)
            await cluster.idle_again()
        assert await cluster.usable() == {"prefill-0", "decode-0"}
