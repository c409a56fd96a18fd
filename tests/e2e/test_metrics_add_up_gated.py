"""Issue 15, 4.10: what router, prefill and decode count adds up after clients that left, one in the middle of its answer and one
before its first token: held there by gates."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from diptych_tests.clusters import GATED_STEP_TOKENS
from diptych_tests.scraped import Scraped
from diptych_tests.waiting import wait_until

pytestmark = pytest.mark.multiproc

ANSWER_S = 300.0
BODY: dict[str, Any] = {
    "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True, "local_prefill_max_tokens": 0,
}  # fmt: skip


async def test_who_leaves_is_counted_on_both_sides(gated_cluster, gates, fresh_prompt, metric_laws) -> None:
    """And one that stays, and one that is refused."""
    scraped = Scraped(gated_cluster)
    path, of_prefill = "/v1/completions", fresh_prompt(2 * GATED_STEP_TOKENS + 70)
    async with httpx.AsyncClient(base_url=gated_cluster.http_url, timeout=ANSWER_S) as http:
        gates.hold(gated_cluster, "decode-0", after_steps=20)
        try:
            async with http.stream("POST", path, json=BODY | {"prompt": fresh_prompt(40)}) as answer:
                lines = answer.aiter_lines()  # kept: one that nobody holds is closed, and the answer with it
                await anext(lines)
                await gates.wait_held("decode-0")
        finally:
            gates.open("decode-0")
        gates.hold(gated_cluster, "prefill-0", after_steps=1)
        try:
            leaving = asyncio.create_task(http.post(path, json=BODY | {"prompt": of_prefill}))
            await gates.wait_held("prefill-0", leaving)
            leaving.cancel()
            await asyncio.wait([leaving])
        finally:
            gates.open("prefill-0")
        whole = await http.post(path, json=BODY | {"prompt": fresh_prompt(40), "max_tokens": 6, "stream": False})
        assert whole.status_code == 200, whole.text
        refused = await http.post(path, json={"prompt": "x", "n": 17})
        assert refused.status_code == 400
    wait_until(lambda: scraped.grown()[0].total("request_errors_total") == 3, what="the router has noticed")
    router, decode, prefill = scraped.grown()
    assert not metric_laws.check_router(router)
    assert not metric_laws.check_workers(router, decode, prefill, exact=False)
    assert router.total("num_requests_running") == 0
    assert router.total("requests_total") == 4
    assert router.total("request_errors_total", reason="CLIENT_LEFT") == 2
    assert router.total("request_success_total") == 1
    assert router.total("unfinished_tokens_total", of="prompt") >= 40
    assert router.total("unfinished_tokens_total", of="generation") >= 1
