"""A prompt that was seen before is answered from the caches, and with the same ids."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from diptych.client import AsyncClient

BLOCK = 16
KV_BYTES_PER_TOKEN = 46_080

pytestmark = pytest.mark.multiproc


async def test_repeated_prompt_comes_from_decodes_own_cache(client: AsyncClient, cluster, fresh_prompt):
    prompt = fresh_prompt(150)
    whole_blocks = BLOCK * ((len(prompt) - 1) // BLOCK)
    options = {"token_ids": prompt, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "explain": True}

    first = await client.generate(**options, local_prefill_max_tokens=0)  # else a busy decode worker might be cheaper
    assert first.usage.cached_tokens == 0
    assert not first.explanation.local_prefill
    why = first.explanation
    assert 0 < why.prefill_queue_s + why.prefill_compute_s <= why.first_token_s - why.reserved_s + 0.01, (
        "no second counts twice"
    )
    assert first.explanation.kv_bytes == len(prompt) * KV_BYTES_PER_TOKEN
    assert first.explanation.prefill == "prefill-0"

    async with asyncio.timeout(300):  # the router gets decode's cache events
        while not (again := await client.generate(**options)).explanation.local_prefill:
            pass
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == whole_blocks
    assert again.explanation.cached_tokens_decode == whole_blocks
    assert again.explanation.kv_bytes == 0
    assert again.explanation.transport == "none"

    forced = await client.generate(**options, local_prefill_max_tokens=0)
    assert forced.token_ids == first.token_ids
    assert not forced.explanation.local_prefill
    assert forced.explanation.cached_tokens_prefill == whole_blocks
    assert forced.explanation.cached_tokens_decode == whole_blocks
    assert forced.usage.cached_tokens == whole_blocks
    assert forced.explanation.kv_bytes == (len(prompt) - whole_blocks) * KV_BYTES_PER_TOKEN
    cluster.wait_idle()


async def test_a_cache_salt_parts_and_the_same_one_joins(cluster):
    """Over HTTP, on both workers: what one salt has cached no other finds."""
    prompt = "A story about a fox and a hedgehog, who both wanted the same pear: " * 8
    cached = []
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=300.0) as http:
        for salt in ("one", "two", "one", "two", None, ""):
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "local_prefill_max_tokens": 0}
            answer = await http.post("/v1/completions", json=body | ({} if salt is None else {"cache_salt": salt}))
            assert answer.status_code == 200, answer.text
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, False, True, True, False, True]


async def test_shared_prefix_moves_only_what_is_new(client: AsyncClient, fresh_prompt):
    prefix = fresh_prompt(6 * BLOCK)
    common = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "explain": True, "local_prefill_max_tokens": 0}
    await client.generate(token_ids=prefix + fresh_prompt(20), **common)
    tail = fresh_prompt(40)
    answer = await client.generate(token_ids=prefix + tail, **common)
    assert answer.explanation.cached_tokens_decode == len(prefix)
    assert answer.explanation.cached_tokens_prefill == len(prefix)
    assert answer.explanation.kv_bytes == len(tail) * KV_BYTES_PER_TOKEN


async def test_one_token_moves_no_kv(client: AsyncClient, cluster, fresh_prompt):
    before = cluster.audit("decode-0").kv_bytes_received
    answer = await client.generate(
        token_ids=fresh_prompt(100), max_tokens=1, temperature=0.0, ignore_eos=True, explain=True
    )
    assert len(answer.token_ids) == 1
    assert answer.finish_reason == "length"
    assert answer.explanation.kv_bytes == 0
    assert cluster.audit("decode-0").kv_bytes_received == before
    cluster.wait_idle()


async def test_eos_first_takes_no_decode_step(client: AsyncClient, cluster, goldens):
    """A prompt that goes on with the reference answer up to its last word: the model's first token is the end."""
    ended = next(g for g in goldens if not g.ignore_eos and len(g.output) < 64)
    steps = cluster.steps()["decode-0"]
    answer = await client.generate(
        token_ids=[*ended.prompt, *ended.output[:-1]],
        max_tokens=16,
        temperature=0.0,
        explain=True,
        local_prefill_max_tokens=0,
    )
    assert answer.finish_reason == "stop"
    assert answer.stop_token_id in (ended.output[-1], None)
    assert answer.usage.completion_tokens == 1
    assert cluster.steps()["decode-0"] == steps
    cluster.wait_idle()
