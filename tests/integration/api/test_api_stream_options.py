"""Stream options."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diptych.common.sampling import FinishReason
from diptych.router.api.fake import FakeRouterApi, Step, hello_script
from diptych.router.requests.messages import ChoiceFinishedEvent, FinishedEvent, TokenEvent, UsageInfo
from diptych_tests.http_api import events, http

FACES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/completions", {"prompt": [1, 2, 3]}),
]
BOTH = {"include_usage": True, "continuous_usage_stats": True}


async def chunks_of(script: list[Step], path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with http(FakeRouterApi(script)) as client:
        answer = await client.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


@pytest.mark.parametrize(("path", "body"), FACES)
async def test_continuous_usage_stats(path: str, body: dict[str, Any]) -> None:
    chunks = await chunks_of(hello_script(), path, body | {"stream_options": BOTH})
    reported = [(one["usage"]["prompt_tokens"], one["usage"]["completion_tokens"]) for one in chunks]
    begin = [(3, 0)] if "messages" in body else []
    # "Hello"; a token without complete text, reported with the next two; the end; the usage
    assert reported == [*begin, (3, 1), (3, 4), (3, 4), (3, 4)]
    assert all(one["usage"]["total_tokens"] == sum(pair) for one, pair in zip(chunks, reported, strict=True))
    assert [bool(one["choices"]) for one in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1]["usage"] == chunks[-2]["usage"]


@pytest.mark.parametrize(("path", "body"), FACES)
async def test_continuous_usage_stats_of_several_choices(path: str, body: dict[str, Any]) -> None:
    script: list[Step] = [
        TokenEvent(0, (10,), "a"),
        TokenEvent(0, (11, 12), "b", choice=1),
        ChoiceFinishedEvent(1, FinishReason.STOP, "", None),
        TokenEvent(1, (13,), "c"),
        FinishedEvent(FinishReason.STOP, UsageInfo(3, 4, 0), "", None, None),
    ]
    chunks = await chunks_of(script, path, body | {"n": 2, "stream_options": {"continuous_usage_stats": True}})
    reported = [one["usage"]["completion_tokens"] for one in chunks if one["choices"]]
    assert [count for count in reported if count] == [1, 3, 3, 4, 4]
    assert all(one["choices"] for one in chunks)  # no chunk of usage alone was requested


async def test_continuous_usage_stats_of_a_wrong_type_is_refused() -> None:
    path, body = FACES[0]
    async with http(FakeRouterApi(hello_script())) as client:
        options = {"stream_options": {"continuous_usage_stats": "yes"}, "stream": True}
        answer = await client.post(path, json=body | options)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
