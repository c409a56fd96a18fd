"""The real Gemma 3 270M over HTTP: prefill and decode in two processes, and one colocated process, answer as transformers.

Some of the prompts are longer than its window of 512 tokens.
"""

from __future__ import annotations

import asyncio

import httpx
import pytest

from diptych.bench.engine import gemma3
from diptych.common.errors import ConfigError
from diptych.common.paths import cache_dir
from diptych_tests import gemma3_real

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]
ANSWER_S = 1800.0
FLAGS = ("--num-blocks", "512", "--max-model-len", "2048")
PATIENT = ("--startup-timeout-s", "3600")


@pytest.fixture(scope="module")
def model():
    try:
        return gemma3.gguf_file(cache_dir())
    except ConfigError as error:
        pytest.skip(str(error))


CASES = gemma3_real.golden()


async def ask(url: str, prompts: list[list[int]], **fields: object) -> list[list[int]]:
    """All at once; the answers' token ids."""
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        answer = await client.post("/v1/completions", json={**body, "prompt": prompt})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:
        served = (await client.get("/v1/models")).json()["data"][0]["id"]
        body["model"] = served
        return await asyncio.gather(*(one(client, prompt) for prompt in prompts))


async def test_prefill_and_decode_answer_as_transformers(cluster_module, tmp_path, model):
    with cluster_module.running_cluster(tmp_path, "--model", str(model), *FLAGS, *PATIENT) as cluster:
        before = cluster.audit("decode-0", full=False).kv_bytes_received
        got = await ask(
            cluster.http_url, [prompt for prompt, _ in CASES], max_tokens=gemma3_real.TOKENS, local_prefill_max_tokens=0
        )
        assert got == [answer for _, answer in CASES]
        cluster.wait_idle()
        moved = cluster.audit("decode-0", full=False).kv_bytes_received - before
        assert moved > 0, "every prompt was computed by the other worker"
        assert cluster.audit("prefill-0").violations == cluster.audit("decode-0").violations == []


async def test_one_colocated_process_answers_as_transformers(cluster_module, tmp_path, model):
    with cluster_module.running_serve(tmp_path, "--model", str(model), *FLAGS) as serving:
        got = await ask(serving.http_url, [prompt for prompt, _ in CASES], max_tokens=gemma3_real.TOKENS)
        assert got == [answer for _, answer in CASES]
