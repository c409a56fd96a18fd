"""bench/router/agents.py: what is read of our streams and of vLLM's, and what a run's figures count."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diptych.bench.router.agents import Turn, read_answer, summary


async def stream(*events: dict[str, Any]) -> AsyncIterator[str]:
    for event in events:
        yield f"data: {json.dumps(event)}"
        yield ""
    yield "data: [DONE]"


def tokens(*ids: int, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "t", "token_ids": list(ids)}], **more}


async def test_of_ours_the_explanation_counts() -> None:
    why = {
        "local_prefill": False,
        "cached_tokens_prefill": 64,
        "cached_tokens_decode": 96,
        "pulls": [{"num_tokens": 32}],
    }
    usage = {"prompt_tokens_details": {"cached_tokens": 80}}
    answer = await read_answer(stream(tokens(5), tokens(6, 7), {"choices": [], "usage": usage}, tokens(diptych=why)))
    assert (answer.token_ids, answer.cached, answer.pulled) == ((5, 6, 7), 64, 32)
    local = await read_answer(stream(tokens(5), tokens(diptych=why | {"local_prefill": True})))
    assert local.cached == 96


async def test_of_vllm_the_usage_counts() -> None:
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 80}}
    answer = await read_answer(stream(tokens(5), {"choices": [], "usage": usage}))
    assert (answer.token_ids, answer.cached, answer.pulled) == ((5,), 80, 0)
    assert answer.first_at > 0.0
    assert (await read_answer(stream(tokens(5), {"choices": [], "usage": {"prompt_tokens": 9}}))).cached == 0


@pytest.mark.parametrize("events", [(), ({"error": {"message": "lost"}},), (tokens(),)])
async def test_an_answer_without_a_token_is_an_error(events: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(RuntimeError):
        await read_answer(stream(*events))


def test_recomputed_is_what_a_worker_had_and_another_computed() -> None:
    turns = [Turn(0, 100, 0, 0, 0, 9.0), Turn(1, 200, 128, 96, 32, 0.2), Turn(2, 300, 192, 208, 0, 0.4)]
    found = summary(turns)
    assert (found["prompt_tokens"], found["recomputed"]) == (600, round(32 / 600, 4))
    assert (found["cached"], found["pulled"]) == (round(304 / 600, 4), round(32 / 600, 4))
    assert found["ttft_later_p50_s"] == pytest.approx(0.3)
