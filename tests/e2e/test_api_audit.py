"""Details of OpenAI responses on the live cluster: ids and headers, usage, limits and just over them, unknown fields,
tokenize and detokenize, the Responses API."""

from __future__ import annotations

import json
import random
from typing import Any

import grpc
import httpx
import openai
import pytest

from diptych.rpc.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.multiproc

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def http(cluster):
    with httpx.Client(base_url=cluster.http_url, timeout=300.0) as client:
        yield client


def nested(depth: int) -> dict[str, Any]:
    """A schema with this many levels."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    return schema


def described(size: int) -> dict[str, Any]:
    """A schema whose JSON text has so many bytes."""
    schema: dict[str, Any] = {"type": "boolean", "description": ""}
    schema["description"] = "x" * (size - len(json.dumps(schema)))
    return schema


CAPS: list[tuple[str, Any, Any]] = [
    ("n", 16, 17),
    ("stop", ["\u20ac" * 85] * 16, ["x"] * 17),
    ("stop", ["x" * 256], ["x" * 257]),
    ("logprobs", 20, 21),
    ("guided_json", described(60_000), described(66_000)),
    ("guided_json", nested(8), nested(40)),
    ("guided_regex", "a{1,3}", "a" * 70_000),
    ("request_id", "x" * 128, "x" * 129),
    ("cache_salt", "x" * 128, "x" * 129),
    ("logit_bias", {"5": 100}, {"5": 101}),
    ("truncate_prompt_tokens", 1, 0),
]


@pytest.mark.parametrize(("field", "most", "over"), CAPS, ids=[f"{i}-{case[0]}" for i, case in enumerate(CAPS)])
def test_caps(http: httpx.Client, field: str, most: Any, over: Any) -> None:
    body = {"prompt": "The capital of France", "max_tokens": 1}
    allowed = http.post(COMPLETE, json=body | {field: most})
    assert allowed.status_code == 200, allowed.text
    refused = http.post(COMPLETE, json=body | {field: over})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
    assert len(refused.text) < 1000  # what was too large is not sent back


def test_every_answer_has_an_id_and_errors_have_their_form(http: httpx.Client) -> None:
    answers = {
        200: http.post(COMPLETE, json={"prompt": "a", "max_tokens": 1}),
        400: http.post(COMPLETE, content=b"{"),
        404: http.post(COMPLETE, json={"prompt": "a", "model": "nobody"}),
        405: http.get(COMPLETE),
        413: http.post(COMPLETE, content=b" " * (8 * 1024 * 1024 + 1)),
        431: http.get("/health", headers={"x-large": "x" * 33_000}),
    }
    kinds = {400: "invalid_request_error", 404: "not_found_error", 405: "invalid_request_error"}
    kinds |= {413: "invalid_request_error", 431: "invalid_request_error"}
    for status, answer in answers.items():
        assert answer.status_code == status, answer.text
        if status != 200:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], bool(error["message"])) == (kinds[status], True)
    nowhere = http.get("/nowhere")
    assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")
    more = [http.get(path) for path in ("/health", "/ready", "/metrics", "/version", "/v1/models", "/openapi.json")]
    ids = [answer.headers["x-request-id"] for answer in [*answers.values(), nowhere, *more]]
    assert len(set(ids)) == len(ids)


def test_a_label_of_the_callers_leads_back_to_the_request(http: httpx.Client, cluster) -> None:
    for field, where in (("audit-header", "header"), ("audit-body", "body")):
        body = {"prompt": "a", "max_tokens": 1} | ({"request_id": field} if where == "body" else {})
        headers = {"x-request-id": field} if where == "header" else {}
        answer = http.post(COMPLETE, json=body, headers=headers)
        assert answer.json()["id"] == "cmpl-" + answer.headers["x-request-id"]
        with grpc.insecure_channel(cluster.grpc_address) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            reported = stub.Explain(router_pb2.ExplainRequest(request_id=field), timeout=300.0)
        assert (reported.label, reported.outcome) == (field, "finished")
    assert http.post(COMPLETE, json={"prompt": "a"}, headers={"x-request-id": "x" * 129}).status_code == 400
    assert http.post(COMPLETE, json={"prompt": "a"}, headers={"idempotency-key": "x" * 129}).status_code == 400


def test_usage_has_the_cached_tokens(http: httpx.Client, cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0, timeout=300.0) as client:
        prompt = f"{random.SystemRandom().random()}: count the words of this sentence: " + "plum pear fig " * 20
        for cached in (False, True):
            answer = client.chat.completions.create(
                model=cluster.model, messages=[{"role": "user", "content": prompt}], max_tokens=3, temperature=0
            )
            usage = answer.usage
            assert usage is not None
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            assert usage.completion_tokens == 3
            assert (usage.prompt_tokens_details.cached_tokens > 64) == cached
            assert usage.completion_tokens_details.reasoning_tokens == 0
        reported = client.responses.create(
            model=cluster.model, instructions="Be brief.", input="Hi", max_output_tokens=4, temperature=0
        )
        assert (reported.status, reported.incomplete_details.reason) in (("incomplete", "max_output_tokens"),)
        assert reported.usage.total_tokens == reported.usage.input_tokens + reported.usage.output_tokens
        with client.responses.create(
            model=cluster.model, instructions="Be brief.", input="Hi", max_output_tokens=4, temperature=0, stream=True
        ) as stream:
            events = list(stream)
        assert events[0].type == "response.created"
        assert events[-1].type == "response.incomplete"
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == reported.output_text
        assert events[-1].response.usage.total_tokens == reported.usage.total_tokens


def test_an_unknown_field_warns_once(http: httpx.Client, cluster) -> None:
    for _ in range(3):
        assert http.post(COMPLETE, json={"prompt": "a", "max_tokens": 1, "audit_field": {}}).status_code == 200
    log = next(cluster.folder.logs.glob("router*.log")).read_text(errors="replace")
    assert log.count("audit_field") == 1


def test_tokens_and_back(http: httpx.Client) -> None:
    text = "größer 空は青い \U0001f469\u200d\U0001f680 <b>"
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": HI}).json()["tokens"]
    answer = http.post(CHAT, json={"messages": HI, "max_tokens": 1, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == chat
    said = [*HI, {"role": "assistant", "content": "The sky"}]
    body = {"messages": said, "continue_final_message": True, "add_generation_prompt": False}
    end = http.post("/tokenize", json=body).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": end}).json()["prompt"].endswith("assistant\nThe sky")
    going = http.post(CHAT, json=body | {"max_tokens": 1, "return_token_ids": True})
    assert going.json()["prompt_token_ids"] == end, going.text
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400


def test_several_prompts_are_what_each_is_alone(http: httpx.Client) -> None:
    prompts = ["The capital of France is", "空は", "1 2 3 4"]
    body = {
        "max_tokens": 6,
        "temperature": 0,
        "n": 2,
        "seed": 3,
        "return_token_ids": True,
        "local_prefill_max_tokens": 0,
    }
    together = http.post(COMPLETE, json=body | {"prompt": prompts}).json()
    alone = [http.post(COMPLETE, json=body | {"prompt": prompt}).json() for prompt in prompts]
    expected = [choice | {"index": 2 * i + choice["index"]} for i, one in enumerate(alone) for choice in one["choices"]]
    assert together["choices"] == expected
    assert together["usage"]["total_tokens"] == sum(one["usage"]["total_tokens"] for one in alone)
    texts = [""] * 6
    with http.stream("POST", COMPLETE, json=body | {"prompt": prompts, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in together["choices"]]
