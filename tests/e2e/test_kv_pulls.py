"""The two-turn chat over HTTP: prefill takes the KV of the first answer from decode, and the ids are those of an empty cache."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

BLOCK = 16
NEW = 80
FEW = 8
"""Tokens of an answer of which only its beginning matters."""

pytestmark = pytest.mark.multiproc


async def test_turn_2_computes_at_most_a_block_and_the_new_tokens(cluster, fresh_prompt):
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=300.0) as http:

        async def ask(prompt: list[int], **fields: Any) -> dict[str, Any]:
            body = {
                "prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
                "local_prefill_max_tokens": 0,
            }  # fmt: skip
            answer = await http.post("/v1/completions", json=body | fields, headers={"x-diptych-explain": "1"})
            assert answer.status_code == 200, answer.text
            return answer.json()

        async with asyncio.timeout(300):  # until the router has decode's cache events before the second turn
            while True:
                first = await ask(fresh_prompt(150))
                history = [*first["choices"][0]["prompt_token_ids"], *first["choices"][0]["token_ids"]]
                held = (len(history) - 1) // BLOCK * BLOCK
                turn_2 = [*history, *fresh_prompt(NEW)]
                second = await ask(turn_2, max_tokens=FEW)
                why = second["diptych"]
                if why["cached_tokens_prefill"] == held:
                    break
        [pull] = why["pulls"]
        assert (pull["reader"], pull["holder"], pull["note"]) == ("prefill-0", "decode-0", "")
        assert pull["first_token"] + pull["num_tokens"] == held
        assert len(turn_2) - why["cached_tokens"] <= BLOCK + NEW
        [planned] = [terms["pull"] for terms in why["placement"] if terms["chosen"]]
        assert planned["pull_ms"] < planned["compute_ms"]
        assert planned["pays_from_tokens"] <= pull["num_tokens"]
        alone = await ask(turn_2, max_tokens=FEW, cache_salt="alone")
        assert alone["diptych"]["cached_tokens"] == 0
        assert alone["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
        print(
            {name: pull[name] for name in ("num_tokens", "kv_bytes", "duration_s")},
            planned,
            "ttft",
            why["ttft_s"],
            alone["diptych"]["ttft_s"],
        )
    cluster.wait_idle()
