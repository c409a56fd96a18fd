"""HTTP errors: status codes, bodies and field names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diptych.common.errors import NoWorkerError, OverloadedError, RequestDeadlineError, WorkerLostError
from diptych.router.api.fake import MODEL, FakeRouterApi, Step, hello_script
from diptych.router.requests.messages import TokenEvent
from diptych_tests.http_api import WAIT_S, events, http, serving
from diptych_tests.waiting import until

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


BAD_BODIES: list[tuple[str, bytes | dict[str, Any], str | None]] = [
    (CHAT, b"{", None),
    (CHAT, b"[]", None),
    (CHAT, b"", None),
    (CHAT, b'{"messages": "\xff"}', None),
    (CHAT, b'{"a":' * 5000 + b"1" + b"}" * 5000, None),
    (CHAT, b"[" * 200_000, None),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "stop": "\\udc00x"}', "stop"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "temperature"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "temperature": -Infinity}', "temperature"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', "temperature"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": ' + b"9" * 5000 + b"}", "max_tokens"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages"),
    (CHAT, {"messages": MESSAGES, "model": 3}, "model"),
    (CHAT, {"messages": MESSAGES, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": MESSAGES, "temperature": 2.5}, "temperature"),
    (CHAT, {"messages": MESSAGES, "top_p": 0}, "top_p"),
    (CHAT, {"messages": MESSAGES, "top_k": 1.5}, "top_k"),
    (CHAT, {"messages": MESSAGES, "seed": 2**64}, "seed"),
    (CHAT, {"messages": MESSAGES, "seed": -(2**63) - 1}, "seed"),
    (CHAT, {"messages": MESSAGES, "max_tokens": -1}, "max_tokens"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2**63}, "max_tokens"),
    (CHAT, {"messages": MESSAGES, "max_tokens": True}, "max_tokens"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": MESSAGES, "stop": [1]}, "stop"),
    (CHAT, {"messages": MESSAGES, "stop": ""}, "stop"),
    (CHAT, {"messages": MESSAGES, "stop_token_ids": [10**6]}, "stop_token_ids"),
    (CHAT, {"messages": MESSAGES, "ignore_eos": "yes"}, "ignore_eos"),
    (CHAT, {"messages": MESSAGES, "stream": "yes"}, "stream"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": MESSAGES, "failure_policy": "pray"}, "failure_policy"),
    (CHAT, {"messages": MESSAGES, "priority": 1.5}, "priority"),
    (CHAT, {"messages": MESSAGES, "n": 0}, "n"),
    (CHAT, {"messages": MESSAGES, "n": 10**9}, "n"),
    (CHAT, {"messages": MESSAGES, "best_of": 2, "stream": True}, "best_of"),
    (CHAT, {"messages": MESSAGES, "use_beam_search": True, "stream": True}, "use_beam_search"),
    (CHAT, {"messages": MESSAGES, "use_beam_search": True, "beam_width": 65}, "beam_width"),
    (CHAT, {"messages": MESSAGES, "use_beam_search": True, "beam_width": 2, "n": 3}, "beam_width"),
    (CHAT, {"messages": MESSAGES, "use_beam_search": False, "beam_width": 2}, "beam_width"),
    (CHAT, {"messages": MESSAGES, "use_beam_search": True, "temperature": 0.5}, "temperature"),
    (CHAT, {"messages": MESSAGES, "use_beam_search": True, "top_k": 5}, "top_k"),
    (CHAT, {"messages": MESSAGES, "use_beam_search": True, "stop": "x"}, "stop"),
    (CHAT, {"messages": MESSAGES, "use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    (CHAT, {"messages": MESSAGES, "use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    (CHAT, {"messages": MESSAGES, "length_penalty": 2}, "length_penalty"),
    (CHAT, {"messages": MESSAGES, "early_stopping": True}, "early_stopping"),
    (CHAT, {"messages": MESSAGES, "logprobs": 1}, "logprobs"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"messages": MESSAGES, "guided_json": {"properties": {f"p{i}": {} for i in range(1025)}}}, "guided_json"),
    (CHAT, {"messages": MESSAGES, "guided_regex": 3}, "guided_regex"),
    (CHAT, {"messages": MESSAGES, "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"a": 5}}, "logit_bias"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"1": 500}}, "logit_bias"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"5000": 5}}, "logit_bias"),
    (CHAT, {"messages": MESSAGES, "presence_penalty": 2.5}, "presence_penalty"),
    (CHAT, {"messages": MESSAGES, "repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"messages": MESSAGES, "min_p": -0.1}, "min_p"),
    (CHAT, {"messages": MESSAGES, "min_tokens": 30, "max_tokens": 3}, "min_tokens"),
    (CHAT, {"messages": MESSAGES, "bad_words": "x"}, "bad_words"),
    (CHAT, {"messages": MESSAGES, "allowed_token_ids": [10**6]}, "allowed_token_ids"),
    (CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
    (CHAT, {"messages": MESSAGES, "truncation_side": "middle"}, "truncation_side"),
    (CHAT, {"messages": MESSAGES, "cache_salt": 5}, "cache_salt"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "enormous"}, "reasoning_effort"),
    (
        CHAT,
        {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (CHAT, {"messages": MESSAGES, "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    (CHAT, {"messages": MESSAGES, "chat_template": "{{ messages }}"}, "chat_template"),
    ("/v1/completions", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 65}, "prompt"),
    ("/v1/completions", {"prompt": ["a", [1]]}, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ("/v1/completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [5]}, "logprob_token_ids"),
    ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": -3}, "prompt_logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "logprob_token_ids": [5]}, "logprob_token_ids"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
    ("/v1/completions", {"prompt": {"text": "a"}}, "prompt"),
    ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("/v1/completions", {"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "logprobs": True}, "logprobs"),
]


async def test_bad_bodies_are_400_and_name_the_field() -> None:
    router_api = FakeRouterApi(hello_script())
    async with http(router_api) as client:
        for path, body, param in BAD_BODIES:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
            error = answer.json()["error"]
            shown = content[:100]
            assert (answer.status_code, error["param"]) == (400, param), (shown, error)
            assert error["type"] == "invalid_request_error"
            assert error["message"], shown
            assert not error["message"].startswith("token_ids is"), shown
            assert answer.headers["x-request-id"], shown
    assert router_api.prepared == 0


async def test_neutral_values_of_unbuilt_fields_pass_and_unknown_ones_warn_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = {
        "messages": MESSAGES,
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "parallel_tool_calls": True,
        "user": "me",
        "stop": None,
        "frobnicate": {"deep": [1]},
    }
    async with http(FakeRouterApi(hello_script())) as client:
        for _ in range(3):
            assert (await client.post(CHAT, json=body)).status_code == 200
    warnings = [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]
    assert warnings == ["unknown field 'frobnicate' is ignored"]


async def test_a_body_over_the_cap_is_413() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 1024 * 1024

    async with http(FakeRouterApi(hello_script())) as client:
        declared = await client.post(CHAT, content=b" " * (8 * 1024 * 1024 + 1))
        assert declared.status_code == 413
        streamed = await client.post(CHAT, content=endless())
        assert streamed.status_code == 413
        assert streamed.json()["error"]["type"] == "invalid_request_error"


async def test_errors_before_the_start_are_plain_answers() -> None:
    table: list[tuple[FakeRouterApi, int, str | None]] = [
        (FakeRouterApi([], refuse=OverloadedError("full", retry_after_s=2.5)), 529, "3"),
        (FakeRouterApi([], before_start=[NoWorkerError("nobody")]), 503, "1"),
        (FakeRouterApi([], before_start=[RequestDeadlineError("late")]), 504, None),
        (FakeRouterApi([], before_start=[ValueError("a bug")]), 500, None),
    ]
    for router_api, status, retry_after in table:
        async with http(router_api) as client:
            for stream in (False, True):
                answer = await client.post(CHAT, json={"messages": MESSAGES, "stream": stream})
                assert answer.status_code == status
                assert answer.headers.get("retry-after") == retry_after
                assert "a bug" not in answer.text
                assert answer.headers["x-request-id"]


async def test_unknown_model_and_unknown_route_are_404() -> None:
    async with http(FakeRouterApi(hello_script())) as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES, "model": "other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
        nowhere = await client.get("/nowhere")
        assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")
        assert (await client.get(CHAT)).status_code == 405
        assert nowhere.headers["x-request-id"] != answer.headers["x-request-id"]


@pytest.mark.parametrize("failure", [WorkerLostError("decode d0 is gone"), ValueError("a bug")])
async def test_a_failure_in_mid_stream_is_an_event_without_done(failure: Exception) -> None:
    script: list[Step] = [TokenEvent(0, (1,), "He"), failure]
    async with http(FakeRouterApi(script)) as client:
        answer = await client.post(CHAT, json={"messages": MESSAGES, "stream": True})
        whole = await client.post(CHAT, json={"messages": MESSAGES})
    assert answer.status_code == 200
    *_, token, error = [json.loads(event) for event in events(answer.text)]
    assert token["choices"][0]["delta"]["content"] == "He"
    assert error["error"]["message"]
    assert "a bug" not in answer.text
    assert "[DONE]" not in answer.text
    assert whole.status_code in (500, 503)


async def test_a_stream_that_just_ends_is_an_error() -> None:
    async with http(FakeRouterApi([TokenEvent(0, (1,), "He")])) as client:
        streamed = await client.post(CHAT, json={"messages": MESSAGES, "stream": True})
        whole = await client.post(CHAT, json={"messages": MESSAGES})
    assert "error" in json.loads(events(streamed.text)[-1])
    assert whole.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_leaves_cancels(stream: bool, started: bool) -> None:
    router_api = FakeRouterApi([TokenEvent(0, (1,), "He"), None]) if started else FakeRouterApi([], before_start=[None])
    async with serving(router_api) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        body = json.dumps({"messages": MESSAGES, "stream": stream}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: router_api.running == 1)
        if stream and started:
            await asyncio.wait_for(reader.readuntil(b"He"), WAIT_S)
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(router_api.left.wait(), WAIT_S)
        assert (router_api.running, router_api.cancelled) == (0, 1)
