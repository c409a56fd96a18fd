"""Every request has exactly one line in the router's log, for every API and every outcome (5.4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from diptych.client import AsyncClient
from diptych.common.errors import (
    DiptychError,
    InvalidRequestError,
    NoWorkerError,
    WorkerLostError,
)
from diptych.common.secret import derive_key
from diptych.common.ticket import PURPOSE
from diptych.router.api.auth.authenticator import Authenticator
from diptych.router.api.auth.keys import add_key
from diptych.router.observe import access_log
from diptych_tests.http_api import api_servers

Lines = list[MutableMapping[str, Any]]
PROMPT = [1] * 40
BODY = {"prompt": PROMPT, "max_tokens": 3}
WAIT_S = 60.0


@pytest.fixture
def lines() -> Iterator[Lines]:
    with capture_logs() as captured:
        yield captured


async def line_of(fleet: Any, lines: Lines, **wanted: object) -> MutableMapping[str, Any]:
    """The line of the only request since the last question."""
    await fleet.until(lambda: any(one["event"] == "request" for one in lines))
    (line,) = [one for one in lines if one["event"] == "request"]
    assert {name: line.get(name) for name in wanted} == wanted, line
    lines.clear()
    return line


@pytest.fixture
async def world(fleet: Any, tmp_path: Any) -> AsyncIterator[tuple[Any, Any, httpx.AsyncClient, AsyncClient, str]]:
    """(fleet, decode worker, HTTP client, SDK client, key of tenant acme)"""
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0", ticket_key=derive_key(fleet.secret, PURPOSE))
    await fleet.until_ready()
    key, _ = add_key(tmp_path / "keys.json", "acme", now=0.0)
    keys = Authenticator(tmp_path / "keys.json", now=lambda: 0.0)
    async with api_servers(fleet.frontend, fleet.frontend.status, keys=keys) as at:
        headers = {"authorization": f"Bearer {key}"}
        async with (
            httpx.AsyncClient(base_url=f"http://{at.http}", timeout=WAIT_S, headers=headers) as http,
            AsyncClient(at.grpc, api_key=key, timeout_s=WAIT_S) as sdk,
        ):
            yield fleet, decode, http, sdk, key


async def test_5_4_a_request_that_is_served_has_one_line(world: Any, lines: Lines) -> None:
    fleet, _, http, sdk, _ = world
    answer = await http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    line = await line_of(
        fleet, lines, face="http", route="POST /v1/completions", status=200, outcome="served", tenant="acme", label="mine",
        model="tiny", prefill="p0", decode="d0", prompt_tokens=40, completion_tokens=3, cached_tokens=16,
        finish_reason="length", log_level="info",
    )  # fmt: skip
    assert line["request_id"] == answer.headers["x-request-id"] == answer.json()["id"].removeprefix("cmpl-")
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["total_s"]
    streamed = await http.post("/v1/completions", json=BODY | {"stream": True, "request_id": "mine"})
    await line_of(fleet, lines, outcome="served", label="mine", request_id=streamed.headers["x-request-id"])
    two = await http.post("/v1/completions", json=BODY | {"prompt": [PROMPT, PROMPT]})
    line = await line_of(fleet, lines, outcome="served", prompt_tokens=80, completion_tokens=6, decode="d0")
    assert line["request_id"] == two.headers["x-request-id"]
    await sdk.generate(token_ids=PROMPT, max_tokens=3, request_id="sdk's")
    await line_of(
        fleet, lines, face="grpc", route="/diptych.rpc.v1.Router/Generate", outcome="served", tenant="acme", label="sdk's",
        prefill="p0", decode="d0", prompt_tokens=40, completion_tokens=3,
    )  # fmt: skip


async def test_5_4_a_request_that_is_refused_has_one_line(world: Any, lines: Lines) -> None:
    fleet, decode, http, sdk, _ = world

    async def refused(path: str, status: int, reason: str | None, **more: Any) -> MutableMapping[str, Any]:
        answer = await http.post(path, **more)
        assert answer.status_code == status
        shown = {"request_id": answer.headers["x-request-id"], "status": status}
        return await line_of(fleet, lines, face="http", outcome="refused", reason=reason, **shown)

    line = await refused("/v1/completions", 400, "INVALID_ARGUMENT", json=BODY | {"temperature": "hot secret"})
    assert line["error"] == "at temperature"  # a caller's words must not be logged
    await refused("/v1/completions", 400, "INVALID_ARGUMENT", content=b"{")
    await refused("/v1/completions", 404, "MODEL_NOT_FOUND", json=BODY | {"model": "other"})
    await refused("/v1/nothing", 404, None)
    await refused("/v1/completions", 401, "UNAUTHENTICATED", json=BODY, headers={"authorization": "Bearer no"})
    decode.refuse = NoWorkerError("it is full")
    line = await refused(
        "/v1/completions", 503, "NO_WORKER", json=BODY | {"request_id": "mine", "failure_policy": "fail"}
    )
    assert (line["label"], line["tenant"], line["decode"], line["error"]) == ("mine", "acme", "d0", "it is full")
    with pytest.raises(InvalidRequestError):
        await sdk.generate(token_ids=PROMPT, max_tokens=3, temperature=-1.0)
    await line_of(fleet, lines, face="grpc", outcome="refused", reason="INVALID_ARGUMENT", tenant="acme")
    async with AsyncClient(sdk.address, api_key="no") as stranger:
        with pytest.raises(DiptychError):
            await stranger.generate(token_ids=PROMPT, max_tokens=3)
    await line_of(fleet, lines, face="grpc", outcome="refused", reason="UNAUTHENTICATED")
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    writer.write(b"nonsense\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    await line_of(fleet, lines, face="http", outcome="refused", status=400)


async def test_5_4_a_request_that_fails_has_one_line(world: Any, lines: Lines) -> None:
    fleet, decode, http, _, _ = world
    decode.hold_from = 2
    async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True, "failure_policy": "fail"}) as answer:
        chunks = answer.aiter_raw()
        await anext(chunks)
        await decode.kill()
        async for _ in chunks:
            pass
    line = await line_of(
        fleet,
        lines,
        outcome="failed",
        status=200,
        reason=WorkerLostError.reason,
        request_id=answer.headers["x-request-id"],
    )
    assert "d0 was lost" in line["error"]


@pytest.mark.parametrize("face", ["http", "grpc"])
async def test_5_4_a_request_that_is_cancelled_has_one_line(world: Any, lines: Lines, face: str) -> None:
    fleet, decode, http, sdk, _ = world
    decode.hold_from = 2
    if face == "http":
        async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            await anext(answer.aiter_raw())
    else:
        async for _ in sdk.stream(token_ids=PROMPT, max_tokens=3):
            break
    line = await line_of(fleet, lines, face=face, outcome="cancelled", decode="d0", prefill="p0", prompt_tokens=40)
    assert "reason" not in line
    assert line["log_level"] == "info"


async def test_5_4_a_ticket_has_one_line_at_its_end(world: Any, lines: Lines) -> None:
    fleet, decode, _, sdk, key = world
    await fleet.until(lambda: fleet.frontend._cluster.direct_endpoint(("d0", "i1")) is not None)
    async with AsyncClient(sdk.address, api_key=key, lookaside=True, timeout_s=WAIT_S) as client:
        reported = await client.generate(token_ids=PROMPT, max_tokens=3, request_id="mine", explain=True)
        line = await line_of(
            fleet, lines, face="lookaside", outcome="served", label="mine", tenant="acme", decode="d0", prefill="p0",
            prompt_tokens=40, completion_tokens=3, finish_reason="length",
        )  # fmt: skip
        assert line["request_id"] == reported.explanation.request_id
        with pytest.raises(InvalidRequestError):
            await client.generate(token_ids=PROMPT, max_tokens=3, temperature=-1.0)
        await line_of(fleet, lines, face="lookaside", outcome="refused", reason="INVALID_ARGUMENT", tenant="acme")
        decode.hold_from = 2
        async for _ in client.stream(token_ids=PROMPT, max_tokens=3):
            break
        await line_of(fleet, lines, face="lookaside", outcome="cancelled", decode="d0")


async def test_5_4_probes_and_scrapes_are_no_news(world: Any, lines: Lines) -> None:
    _, _, http, _, _ = world
    for path in ("/health", "/ready", "/metrics"):
        await http.get(path)
    assert {one["log_level"] for one in lines if one["event"] == "request"} == {"debug"}
    await http.get("/v1/models")
    assert lines[-1]["log_level"] == "info"


async def test_5_3_explain_takes_every_id_that_a_user_sees(world: Any) -> None:
    fleet, _, http, _, _ = world
    ids = {}
    chat = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 3}
    completion = await http.post("/v1/completions", json=BODY)
    ids[completion.json()["id"]] = completion.headers["x-request-id"]
    reported = await http.post("/v1/chat/completions", json=chat)
    ids[reported.json()["id"]] = reported.headers["x-request-id"]
    response = await http.post("/v1/responses", json={"input": "w1 w2", "max_output_tokens": 3})
    ids[response.json()["id"]] = response.headers["x-request-id"]
    ids[response.json()["output"][0]["id"]] = response.headers["x-request-id"]
    assert sorted(name[:4] for name in ids) == ["chat", "cmpl", "msg_", "resp"]
    for shown, request_id in ids.items():
        for name in (shown, request_id):
            assert (await fleet.frontend.explain(name, "acme")).explanation.request_id == request_id
        with pytest.raises(InvalidRequestError):
            await fleet.frontend.explain(shown, "another")
    for name in ("cmpl-", "cmpl-req-", "chatcmpl-req-00", "xcmpl-" + request_id):
        with pytest.raises(InvalidRequestError):
            await fleet.frontend.explain(name, "acme")


async def test_5_4_a_planned_drain_is_no_warning(world: Any, lines: Lines) -> None:
    """Of an idle worker: it reports that it drains, gives up its lease and exits; then of the router itself."""
    fleet, _, _, _, _ = world
    second = await fleet.add("d1")
    await fleet.until_ready(decode=2)
    await fleet.store.put_worker(fleet.record(second, state="draining"), ttl_s=1000)
    await fleet.until_ready(decode=1)
    await fleet.store.remove_worker("d1", second.incarnation)
    await second.kill()
    await fleet.until(lambda: any(one["event"] == "worker left" for one in lines))
    await fleet.frontend.close()
    assert [one for one in lines if one["log_level"] not in ("info", "debug")] == []


async def test_the_lines_can_be_switched_off(world: Any, lines: Lines) -> None:
    _, _, http, _, _ = world
    access_log.switch(False)
    try:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    finally:
        access_log.switch(True)
    assert [one for one in lines if one["event"] == "request"] == []
