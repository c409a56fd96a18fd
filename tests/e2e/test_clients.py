"""The clients that people use: the OpenAI package, curl-like HTTP, our SDK, the terminal."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import httpx
import pytest
from openai import BadRequestError, OpenAI

from diptych.client import AsyncClient, Client

pytestmark = pytest.mark.multiproc

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def openai_client(cluster):
    with OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0, timeout=300.0) as client:
        yield client


def test_openai_chat(openai_client, cluster):
    answer = openai_client.chat.completions.create(model=cluster.model, messages=MESSAGES, temperature=0, max_tokens=32)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens % 16 == 0


def test_openai_chat_streaming(openai_client, cluster):
    chunks = list(
        openai_client.chat.completions.create(
            model=cluster.model,
            messages=MESSAGES,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0


def test_openai_completions(openai_client, cluster):
    options = {"model": cluster.model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    whole = openai_client.completions.create(**options)
    pieces = openai_client.completions.create(**options, stream=True)
    assert whole.choices[0].finish_reason == "length"
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert "Paris" in whole.choices[0].text


def test_openai_models_and_errors(openai_client, cluster):
    assert [model.id for model in openai_client.models.list()] == [cluster.model]
    with pytest.raises(BadRequestError) as failure:
        openai_client.chat.completions.create(model=cluster.model, messages=MESSAGES, temperature=9)
    assert failure.value.param == "temperature"


def test_explain_header(cluster):
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    url = f"{cluster.http_url}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers={"x-diptych-explain": "1"}, timeout=300.0).json()
    facts = answer["diptych"]
    assert facts["decode"] == "decode-0"
    assert {"prefill", "decode", "transport", "kv_bytes", "cached_tokens_prefill", "cached_tokens_decode"} <= set(facts)
    assert any(facts[name] for name in ("placement", "candidates") if name in facts), (
        "the placement's terms are missing"
    )
    assert "diptych" not in httpx.post(url, json=body, timeout=300.0).json()


def test_unknown_field_is_ignored(cluster):
    body = {"messages": MESSAGES, "max_tokens": 2, "temperature": 0, "my_own_field": 1}
    assert httpx.post(f"{cluster.http_url}/v1/chat/completions", json=body, timeout=300.0).status_code == 200


def test_health_ready_metrics(cluster):
    for path in ("/health", "/ready"):
        assert httpx.get(cluster.http_url + path, timeout=300.0).status_code == 200
    text = httpx.get(cluster.http_url + "/metrics", timeout=300.0).text
    assert "diptych" in text


def test_sdk_sync(cluster):
    with Client(cluster.grpc_address, timeout_s=300.0) as client:
        assert [model.id for model in client.list_models()] == [cluster.model]
        whole = client.generate(messages=MESSAGES, temperature=0.0, max_tokens=32)
        assert whole.text == ANSWER
        stream = client.stream(messages=MESSAGES, temperature=0.0, max_tokens=32)
        deltas = list(stream)
        assert "".join(delta.text for delta in deltas) == ANSWER
        ids = [token for delta in deltas for token in delta.token_ids]
        assert tuple(ids) == whole.token_ids
        offset = 0
        for delta in deltas:
            assert delta.offset == offset
            offset += len(delta.token_ids)


async def test_sdk_async_and_seed(client: AsyncClient):
    options = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
    first, again, other = await asyncio.gather(
        client.generate(**options, seed=7), client.generate(**options, seed=7), client.generate(**options, seed=8)
    )
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_stop_string_and_stop_id(client: AsyncClient):
    cut = await client.generate(messages=MESSAGES, temperature=0.0, max_tokens=32, stop=[" France"])
    assert cut.text == "The capital of"
    assert cut.finish_reason == "stop"
    whole = await client.generate(messages=MESSAGES, temperature=0.0, max_tokens=32)
    third = whole.token_ids[2]
    by_id = await client.generate(messages=MESSAGES, temperature=0.0, max_tokens=32, stop_token_ids=[third])
    assert by_id.finish_reason == "stop"
    assert by_id.token_ids[:2] == whole.token_ids[:2]
    assert by_id.usage.completion_tokens == 3


def test_chat_in_a_pipe(cluster):
    env = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    command = [
        sys.executable,
        "-P",
        "-m",
        "diptych.cli",
        "chat",
        "--address",
        cluster.grpc_address,
        "--temperature",
        "0",
    ]
    result = subprocess.run(
        command, input="What is the capital of France?\n", capture_output=True, text=True, timeout=300, env=env
    )
    assert result.returncode == 0, result.stderr
    assert ANSWER in result.stdout
