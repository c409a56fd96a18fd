"""Token ids while KV crosses during the computation, and with trained adapters: the cluster whose steps can be held has both."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from diptych.client import AsyncClient
from diptych_tests import golden_adapters, waiting
from diptych_tests.clusters import GATED_STEP_TOKENS, KV_BYTES_PER_TOKEN

ANSWER_S = 300.0

pytestmark = pytest.mark.multiproc


async def test_ranges_cross_while_the_prompt_is_computed(gated_cluster, gates, goldens, fresh_prompt):
    """With `--kv-overlap on` the second chunk is held until the first one's KV has been read."""
    prompt = fresh_prompt(GATED_STEP_TOKENS + 70)
    async with AsyncClient(gated_cluster.grpc_address, timeout_s=ANSWER_S) as client:
        received = gated_cluster.audit("decode-0", full=False).kv_bytes_received
        gates.hold(gated_cluster, "prefill-0", after_steps=1)
        options = {"max_tokens": 4, "ignore_eos": True, "explain": True, "local_prefill_max_tokens": 0}
        task = asyncio.create_task(client.generate(token_ids=prompt, **options))
        try:
            await gates.wait_held("prefill-0", task)
            await waiting.until(
                lambda: gated_cluster.audit("decode-0", full=False).kv_bytes_received > received,
                "KV crosses",
                every_s=0.1,
            )
        finally:
            gates.open("prefill-0")
        facts = (await task).explanation
    assert facts.kv_ranges >= 2
    assert facts.kv_ranges_overlapped >= 1
    assert facts.kv_bytes == len(prompt) * KV_BYTES_PER_TOKEN
    gated_cluster.wait_idle()


async def test_trained_adapters_mixed_in_one_batch_across_the_pools(gated_cluster):
    """All of them and the base model: ids are those of peft and transformers. More prompts: test_adapters_pd.py."""
    async with httpx.AsyncClient(base_url=gated_cluster.http_url, timeout=ANSWER_S) as http:
        await golden_adapters.check_mixed(http, gated_cluster.model, golden_adapters.cases(prompts=1), new_tokens=8)
    gated_cluster.wait_idle()
