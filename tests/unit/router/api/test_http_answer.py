"""The ASGI response without a server: pings, stuck clients, status before the first byte."""

# ruff: noqa: ASYNC110 - the fake has no event for what is waited for

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from diptych.common.errors import NoWorkerError
from diptych.router.api.fake import FakeRouterApi, Step, hello_script
from diptych.router.api.http.response import GenerationResponse
from diptych.router.api.openai.fields import UnknownFields, reject_unsupported
from diptych.router.api.openai.requests import chat_call
from diptych.router.requests.messages import ModelFeatures, TokenEvent
from diptych_tests import waiting

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}


class Connection:
    """ASGI's receive and send; `stuck` makes send wait for ever after so many messages."""

    def __init__(self, stuck_after: int | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._stuck_after = stuck_after

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if self._stuck_after is not None and len(self.sent) > self._stuck_after:
            await asyncio.Event().wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def make_response(router_api: FakeRouterApi, *, stream: bool = True, **settings: Any) -> GenerationResponse:
    body = {"messages": [{"role": "user", "content": "a"}], "stream": stream}
    return GenerationResponse(
        router_api, chat_call(body, features=ModelFeatures(), unknown=UnknownFields()), **settings
    )


async def test_silence_is_filled_with_pings() -> None:
    gate = asyncio.Event()
    script: list[Step] = [TokenEvent(0, (1,), "a"), gate, *hello_script()[-1:]]
    connection = Connection()
    answer = asyncio.create_task(
        make_response(FakeRouterApi(script), ping_s=0.003)(SCOPE, connection.receive, connection.send)
    )
    async with asyncio.timeout(60):
        while connection.body.count(b": ping\n") < 3:
            await asyncio.sleep(0)
    gate.set()
    await answer
    assert connection.body.endswith(b"data: [DONE]\n\n")
    assert [message.get("more_body") for message in connection.sent[-2:]] == [True, False]


async def test_no_ping_before_the_answer_began() -> None:
    gate = asyncio.Event()
    connection = Connection()
    router_api = FakeRouterApi(hello_script(), before_start=[gate])
    answer = asyncio.create_task(make_response(router_api, ping_s=0.001)(SCOPE, connection.receive, connection.send))
    async with asyncio.timeout(60):
        while not router_api.running:
            await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    due = loop.time() + 0.02  # of twenty pings
    await waiting.until(lambda: loop.time() > due)
    assert connection.sent == []
    gate.set()
    await answer
    assert connection.sent[0]["status"] == 200


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    router_api = FakeRouterApi([TokenEvent(0, (1,), "a"), None])
    connection = Connection(stuck_after=2)
    async with asyncio.timeout(60):
        await make_response(router_api, ping_s=0.003, send_timeout_s=0.01)(SCOPE, connection.receive, connection.send)
    assert (router_api.running, router_api.cancelled) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_request(stream: bool) -> None:
    router_api = FakeRouterApi([None])
    connection = Connection()
    answer = asyncio.create_task(make_response(router_api, stream=stream)(SCOPE, connection.receive, connection.send))
    async with asyncio.timeout(60):
        while not router_api.running:
            await asyncio.sleep(0)
        connection.gone.set()
        await answer
    assert (router_api.running, router_api.cancelled) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_start_has_its_own_status(stream: bool) -> None:
    connection = Connection()
    router_api = FakeRouterApi([], before_start=[NoWorkerError("nobody", retry_after_s=0.2)])
    await make_response(router_api, stream=stream)(SCOPE, connection.receive, connection.send)
    start = connection.sent[0]
    headers = dict(start["headers"])
    assert (start["status"], headers[b"retry-after"], headers[b"retry-after-ms"]) == (503, b"1", b"200")
    assert headers[b"x-request-id"] == b"req-fake"


def test_true_is_not_one_and_false_is_not_zero() -> None:
    reject_unsupported(
        {"n": 1, "logprobs": False, "top_logprobs": 0}, {"n": (1,), "logprobs": (False,), "top_logprobs": (0,)}
    )
    for body in ({"n": True}, {"n": False}, {"n": "1"}, {"n": [1]}):
        with pytest.raises(Exception, match="n is not supported"):
            reject_unsupported(body, {"n": (1,)})


def test_unknown_names_are_remembered_within_bounds(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields(limit=2)
    reported = unknown.note(["a", "b", "a", "c", "\n" * 100], known=())
    assert len(reported) == 5
    assert len(caplog.records) == 2
