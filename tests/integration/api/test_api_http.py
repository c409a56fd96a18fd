"""The HTTP API behind a real uvicorn, with the real openai client and with raw bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.common.errors import NoWorkerError, WorkerLostError
from diptych.router.api.fake import MODEL, REQUEST_ID, FakeRouterApi, hello_script
from diptych.router.requests.messages import TokenEvent
from diptych_tests.http_api import events, http, openai_client

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


async def test_openai_client_whole_answer() -> None:
    router_api = FakeRouterApi(hello_script())
    async with openai_client(router_api) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "developer", "content": "Be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            max_completion_tokens=7,
            temperature=0,
            stop=["!"],
            extra_body={"top_k": 5, "ignore_eos": True, "return_token_ids": True},
            extra_headers={"x-diptych-explain": "1", "x-request-id": "mine"},
        )
        models = [model.id async for model in client.models.list()]
    spec = router_api.specs[0]
    assert spec.messages == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "a\nb"}]
    assert spec.sampling == {"max_tokens": 7, "temperature": 0, "stop": ["!"], "top_k": 5, "ignore_eos": True}
    assert (spec.request_id, spec.explain) == ("mine", True)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello there", "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer._request_id == REQUEST_ID
    extra = answer.model_extra or {}
    assert extra["prompt_token_ids"] == [1, 2, 3]
    assert (choice.model_extra or {})["token_ids"] == [10, 11, 12, 13]
    facts = extra["diptych"]
    assert (facts["prefill"], facts["transport"], facts["kv_bytes"], facts["decode_pid"]) == ("p0", "ucx:tcp", 4096, 12)
    assert facts["notes"] == ["as planned"]
    assert facts["placement"][0]["chosen"] is True
    assert models == [MODEL]


async def test_openai_client_stream() -> None:
    router_api = FakeRouterApi(hello_script())
    async with openai_client(router_api) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].delta.content for chunk in middle] == ["Hello", " there"]
    assert all(chunk.choices[0].finish_reason is None and chunk.usage is None for chunk in [first, *middle])
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("stop", None)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.total_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


async def test_openai_client_completions() -> None:
    router_api = FakeRouterApi(hello_script())
    async with openai_client(router_api) as client:
        answer = await client.completions.create(model=MODEL, prompt=[5, 6, 7])
        stream = await client.completions.create(model=MODEL, prompt="text", stream=True)
        chunks = [chunk async for chunk in stream]
    assert answer.choices[0].text == "Hello there"
    assert (router_api.specs[0].token_ids, router_api.specs[1].prompt) == ([5, 6, 7], "text")
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_openai_client_several_prompts() -> None:
    router_api = FakeRouterApi(hello_script())
    async with openai_client(router_api) as client:
        prompts: list[Any] = ["one", "two", "three"]
        answer = await client.completions.create(
            model=MODEL, prompt=prompts, echo=True, extra_headers={"idempotency-key": "k"}
        )
        stream = await client.completions.create(
            model=MODEL, prompt=prompts, echo=True, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (i, f"{prompt}Hello there", "stop") for i, prompt in enumerate(prompts)
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 12)
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]
    assert chunks[-1].usage == answer.usage
    assert [spec.prompt for spec in router_api.specs] == prompts * 2
    assert [spec.idempotency_key for spec in router_api.specs] == ["k", "", "", "", "", ""]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_one_of_several_prompts_fails() -> None:
    """Before the response started it is a plain error; after that it ends the stream, and the others are cancelled."""
    body = {"prompt": ["a", "b"], "stream": True}
    refusing = FakeRouterApi([], before_start=[NoWorkerError("nobody")])
    async with http(refusing) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 503
    breaking = FakeRouterApi([TokenEvent(0, (1,), "He"), WorkerLostError("decode d0 is gone")])
    async with http(breaking) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert "error" in json.loads(events(answer.text)[-1])
    assert refusing.running == breaking.running == 0


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**64 - 1])
async def test_the_seed_takes_signed_64_bits(seed: int) -> None:
    router_api = FakeRouterApi(hello_script())
    async with http(router_api) as client:
        for path, body in (
            (CHAT, {"messages": MESSAGES}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/responses", {"input": "a"}),
        ):
            answer = await client.post(path, json=body | {"seed": seed})
            assert answer.status_code == 200, answer.text
    assert [spec.sampling["seed"] for spec in router_api.specs] == [seed] * 3


async def test_stream_on_the_wire() -> None:
    body = {"messages": MESSAGES, "stream": True, "return_token_ids": True}
    async with http(FakeRouterApi(hello_script())) as client:
        answer = await client.post(CHAT, json=body, headers={"x-diptych-explain": "1"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == REQUEST_ID
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert parsed[0]["prompt_token_ids"] == [1, 2, 3]
    assert [token for chunk in parsed for token in chunk["choices"][0].get("token_ids", [])] == [10, 11, 12, 13]
    assert parsed[-1]["choices"][0]["stop_reason"] == "!"
    assert parsed[-1]["diptych"]["decode"] == "d0"
    assert all("usage" not in chunk for chunk in parsed)


async def test_health_readiness_metrics_version() -> None:
    router_api = FakeRouterApi([])
    async with http(router_api) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/ready")).json() == {"ready": True, "reasons": []}
        router_api.reasons = ["no decode worker"]
        not_ready = await client.get("/ready")
        assert (not_ready.status_code, not_ready.json()["reasons"]) == (503, ["no decode worker"])
        assert (await client.get("/health")).status_code == 200
        router_api.metrics.counter("things", "Things").inc(2)
        assert "diptych_things_total 2.0" in (await client.get("/metrics")).text
        assert (await client.get("/version")).json()["version"]
        schema = (await client.get("/openapi.json")).json()
        assert "ChatCompletionRequest" in schema["components"]["schemas"]
