"""Token ids under prefill/decode, over UCX between two processes, are those of transformers' greedy decoding."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from diptych.client import AsyncClient, Client, Completion

KV_BYTES_PER_TOKEN = 46_080
ANSWER_S = 300.0
BATCH = 16

pytestmark = pytest.mark.multiproc


async def generate(client: AsyncClient, golden) -> Completion:
    return await client.generate(
        token_ids=golden.prompt,
        max_tokens=64,
        temperature=0.0,
        ignore_eos=golden.ignore_eos,
        explain=True,
        local_prefill_max_tokens=0,
    )


def check(golden, answer: Completion) -> None:
    assert answer.token_ids == golden.output, f"{golden.name}: ids differ from the reference"
    facts = answer.explanation
    assert facts is not None
    assert not facts.local_prefill
    assert facts.prefill_pid != facts.decode_pid
    assert facts.prefill_pid
    assert facts.decode_pid
    assert not facts.notes, facts.notes
    uncached = len(golden.prompt) - facts.cached_tokens_decode
    assert facts.kv_bytes == uncached * KV_BYTES_PER_TOKEN
    assert facts.transport.startswith("ucx")


async def test_alone(client: AsyncClient, cluster, golden):
    check(golden, await generate(client, golden))
    cluster.wait_idle()


async def staggered(client: AsyncClient, goldens, seed: int) -> None:
    rng = random.Random(seed)

    async def one(golden, delay_s: float) -> Completion:
        await asyncio.sleep(delay_s)  # sleep: at different times, whichever they are
        return await generate(client, golden)

    answers = await asyncio.gather(*(one(golden, rng.uniform(0.0, 4.0)) for golden in goldens))
    for golden, answer in zip(goldens, answers, strict=True):
        check(golden, answer)


async def test_batch_of_16_arriving_at_different_times(client: AsyncClient, cluster, goldens):
    await staggered(client, sorted(goldens, key=lambda g: len(g.prompt))[:BATCH], seed=1)
    cluster.wait_idle()


@pytest.mark.slow
async def test_all_in_batches_of_16(client: AsyncClient, cluster, goldens):
    longest_first = sorted(goldens, key=lambda g: -len(g.prompt))
    for first in range(0, len(goldens), BATCH):
        batch = longest_first[first : first + BATCH]
        await staggered(client, batch + longest_first[: BATCH - len(batch)], seed=first)
    cluster.wait_idle()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_every_way_to_ask_gives_the_same(client: AsyncClient, cluster, goldens, temperature: float):
    """HTTP, gRPC, and both clients straight from the decode worker: the same ids and text."""
    golden = max(goldens, key=lambda g: len(g.prompt))
    options = {
        "token_ids": golden.prompt[:120],
        "max_tokens": 16,
        "temperature": temperature,
        "seed": 11,
        "ignore_eos": True,
        "local_prefill_max_tokens": 0,
    }
    routed = await client.generate(**options)

    def ask_sync() -> Completion:
        with Client(cluster.grpc_address, lookaside=True) as sync:
            return sync.generate(**options)

    body = {name: value for name, value in options.items() if name != "token_ids"}
    body |= {"prompt": list(options["token_ids"]), "model": cluster.model, "return_token_ids": True}
    async with (
        AsyncClient(cluster.grpc_address, timeout_s=300.0, lookaside=True) as direct,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=300.0) as http,
    ):
        alone = await direct.generate(**options, explain=True)
        answered, synced, *together = await asyncio.gather(
            http.post("/v1/completions", json=body),
            asyncio.to_thread(ask_sync),
            *(direct.generate(**options) for _ in range(6)),
        )
        assert direct._lookaside._streams, "no answer came straight from decode"
    choice = answered.json()["choices"][0]
    assert alone.explanation is not None
    assert alone.explanation.placement
    for answer in (alone, synced, *together):
        assert (answer.token_ids, answer.text, answer.finish_reason) == (routed.token_ids, routed.text, "length")
    assert (tuple(choice["token_ids"]), choice["text"]) == (routed.token_ids, routed.text)
    cluster.wait_idle()
