"""Large requests are processed off the event loop, and rejected by a count if they would block it anyway."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from functools import partial

import grpc.aio
import pytest

from diptych.client import AsyncClient, InvalidRequestError
from diptych.common.clock import FakeClock
from diptych.common.errors import OverloadedError, PromptTooLongError, RequestDeadlineError
from diptych.common.text.tokenizer import GenerationDefaults
from diptych.router.api import json_body
from diptych.router.api.fake import FakeRouterApi, hello_script
from diptych.router.api.grpc import service
from diptych.router.api.http import app as http_app
from diptych.router.api.json_body import MAX_VALUES, count_values
from diptych.router.preprocess.bounded_executor import LONG_BYTES, MAX_WAITING_BYTES, BoundedExecutor
from diptych.router.preprocess.preprocessor import PreprocessLimits, RequestPreprocessor
from diptych.router.preprocess.text_bound import TextBound
from diptych.router.requests.messages import UncheckedRequest
from diptych.router.tools.options import MAX_MESSAGES
from diptych_tests import waiting
from diptych_tests.http_api import api_servers, http

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def threads(monkeypatch):
    """Names of the threads on which bodies were parsed and requests made."""
    seen: list[str] = []

    def watched(whole):
        def instead(*args, **more):
            seen.append(threading.current_thread().name)
            return whole(*args, **more)

        return instead

    monkeypatch.setattr(json_body, "parse_object", watched(json_body.parse_object))
    monkeypatch.setattr(http_app, "completion_call", watched(http_app.completion_call))
    monkeypatch.setattr(service, "spec_from", watched(service.spec_from))
    return seen


async def test_large_bodies_leave_the_loop_and_small_ones_do_not(threads):
    async with http(FakeRouterApi(hello_script())) as client:
        for size, where in ((10, "MainThread"), (LONG_BYTES + 1, "body-long_0")):
            answer = await client.post(TEXT, json={"prompt": "Hi", "max_tokens": 3, "zz": "a" * size})
            assert answer.status_code == 200
            assert set(threads) == {where}
            threads.clear()


async def test_the_grpc_api_does_the_same(threads):
    async with api_servers(FakeRouterApi(hello_script())) as at:
        address = at.grpc
        async with AsyncClient(address) as client:
            await client.generate(prompt="Hi")
            await client.generate(prompt="a" * (LONG_BYTES + 1))
            assert threads == ["MainThread", "body-long_0"]
            with pytest.raises(InvalidRequestError, match=f"at most {MAX_MESSAGES} entries"):
                await client.generate(messages=[{"role": "user", "content": ""}] * (MAX_MESSAGES + 1))


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (TEXT, b'{"prompt": "a", "zz": [' + b"[]," * MAX_VALUES + b"[]]}", f"more than {MAX_VALUES} values"),
        (CHAT, json.dumps({"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)}).encode(), "messages"),
    ],
)
async def test_too_many_are_counted_and_refused(path, body, words):
    async with http(FakeRouterApi(hello_script())) as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2, {"b": null}]}',
        '{"a": "x, y: z", "b": 1}',
        '{"a": "\\", \\\\", "b": ["\\\\\\"", "," ]}',
        "[]",
        '{"": ":::,,,"}',
    ],
)
def test_values_are_counted_outside_of_texts(text):
    def there(value):
        inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        return sum(1 + there(part) for part in inner)

    assert there(json.loads(text)) / 2 <= count_values(text.encode()) <= there(json.loads(text)) + 1


class Words:
    """One token a word; a text with "wait" in it waits."""

    vocab_size = 100

    def __init__(self):
        self.go = threading.Event()
        self.seen = []

    def encode(self, text, add_special_tokens=True, *, param="prompt", limit=None):
        self.seen.append(threading.current_thread().name)
        if limit is not None:
            limit.check(text.encode(), param)
        if "wait" in text:
            assert self.go.wait(300)
        return [1] * len(text.split())

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "x " * len(token_ids)


@pytest.fixture
def words():
    return Words()


@pytest.fixture
def intake(words):
    limits = PreprocessLimits("m", lambda: 40_000, 4 << 20, 64, 600.0, TextBound(6))
    made = RequestPreprocessor(
        words, limits, defaults=GenerationDefaults(), salt=str.encode, clock=FakeClock(), rng=random.Random(1)
    )
    yield made
    words.go.set()
    made.close()


async def test_a_text_that_cannot_fit_is_not_cut_into_tokens(intake, words):
    for text in ("a" * 240_001, "é" * 120_001):
        with pytest.raises(PromptTooLongError, match="bytes of text; more than 240000 cannot fit") as caught:
            await intake.prepare(UncheckedRequest(prompt=text, sampling={"max_tokens": 1}))
        assert caught.value.param == "prompt"
    assert (
        await intake.prepare(UncheckedRequest(prompt="a" * 240_000, sampling={"max_tokens": 1}))
    ).prompt.token_ids == (1,)
    cut = UncheckedRequest(prompt="a " * 200_000, sampling={"max_tokens": 1}, truncate_prompt_tokens=5)
    assert len((await intake.prepare(cut)).prompt.token_ids) == 5


async def test_short_prompts_do_not_wait_behind_long_ones(intake, words):
    long = [
        asyncio.create_task(intake.prepare(UncheckedRequest(prompt="wait" + "a" * 100_000, sampling={"max_tokens": 1})))
        for _ in "abc"
    ]
    await waiting.until(lambda: words.seen, "a long prompt is being cut")
    assert (await intake.prepare(UncheckedRequest(prompt="a b", sampling={"max_tokens": 1}))).prompt.token_ids == (1, 1)
    assert not any(task.done() for task in long)
    words.go.set()
    await asyncio.gather(*long)
    assert {name.rpartition("_")[0] for name in words.seen} == {"tokenizer", "tokenizer-long"}


async def test_no_request_waits_for_the_tokenizer_beyond_its_deadline(intake):
    with pytest.raises(RequestDeadlineError):
        await intake.prepare(UncheckedRequest(prompt="wait", sampling={"max_tokens": 1}, timeout_s=0.01))


async def test_what_waits_is_bounded_by_its_bytes():
    lanes, go = BoundedExecutor("texts", "lane", max_wait_s=60.0), threading.Event()
    work = [asyncio.create_task(lanes.run(partial(go.wait, 60), MAX_WAITING_BYTES // 4)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="too many texts are waiting"):
        await lanes.run(lambda: None, 1)
    go.set()
    await asyncio.gather(*work)
    assert await lanes.run(lambda: 5, 2 * MAX_WAITING_BYTES) == 5, "alone, anything may come"
    lanes.close()


grpc.aio.init_grpc_aio()
