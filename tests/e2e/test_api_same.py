"""One request through HTTP, gRPC, the SDK and past the router (lookaside): the same ids and the same text, streamed as whole;
and a stream that goes on where it was cut."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from diptych.client import AsyncClient, Client, DuplicateRequestError, InvalidRequestError, lookaside
from diptych.rpc.channels import open_channel
from diptych.rpc.v1 import router_pb2, router_pb2_grpc, types_pb2
from diptych_tests import waiting

pytestmark = pytest.mark.multiproc

TEXTS = [
    "空は青い。\U0001f30d Repeat: 空は青い。\U0001f30d 空",
    "Zürich, größer, naïve — and \U0001f469\u200d\U0001f680!",
    "안녕하세요 \U0001f1e8\U0001f1ed 你好，世界！ 你好，世界！ 你好，",
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "stop": ["。", "the"]},
    {"temperature": 0, "stop": ["世界", " sky", "\u200d\U0001f680"], "include_stop_str_in_output": True},
    {"temperature": 0, "choice": ["空は青い \U0001f30d", "größer"]},
]


Answer = tuple[list[int], str, str]
"""Token ids, text, finish_reason."""


def tickets(cluster, outcome: str) -> float:
    """Granted: to clients, which then are answered by a decode worker directly. Finished: decode has told the router so."""
    for line in httpx.get(f"{cluster.http_url}/metrics", timeout=300.0).text.splitlines():
        if line.startswith(f'diptych_placement_tickets_total{{outcome="{outcome}"'):
            return float(line.rpartition(" ")[2])
    return 0.0


async def over_http(url: str, body: dict[str, Any]) -> Answer:
    """Asserts that a whole answer and a stream are the same."""
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=body | {"return_token_ids": True}))
        ids, parts, finish = [], [], ""
        async with http.stream(
            "POST", "/v1/completions", json=body | {"return_token_ids": True, "stream": True}
        ) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        ids += choice.get("token_ids", [])
                        parts.append(choice["text"])
                        finish = choice["finish_reason"] or finish
        answered = await asked
    assert answered.status_code == 200, answered.text
    whole = answered.json()["choices"][0]
    said = [part for part in parts if part]
    assert "\ufffd" not in "".join(said[:-1])  # no piece ends within a character, unless the answer was cut there
    assert (ids, "".join(parts), finish) == (whole["token_ids"], whole["text"], whole["finish_reason"])
    return ids, "".join(parts), finish


async def over_grpc(address: str, request: router_pb2.GenerateRequest) -> Answer:
    ids, texts, finish = [], [], ""
    async with open_channel(address) as channel:
        async for message in router_pb2_grpc.RouterStub(channel).Generate(request, timeout=300.0):
            ids += message.tokens.token_ids
            texts.append(message.tokens.text)
            if message.HasField("finished"):
                name = types_pb2.FinishReason.Name(message.finished.finish_reason)
                finish = name.removeprefix("FINISH_REASON_").lower()
    return ids, "".join(texts), finish


async def over_sdk(client: AsyncClient, ask: dict[str, Any], *, at_once: bool = True) -> Answer:
    """Asserts that a whole answer and a stream are the same. `at_once`: ask for them beside each other."""

    async def streamed() -> list[Any]:
        return [delta async for delta in client.stream(**ask)]

    if at_once:
        whole, deltas = await asyncio.gather(client.generate(**ask), streamed())
    else:
        whole, deltas = await client.generate(**ask), await streamed()
    reported = ([token for delta in deltas for token in delta.token_ids], "".join(delta.text for delta in deltas))
    assert reported == (list(whole.token_ids), whole.text)
    return *reported, whole.finish_reason


CASES = [
    pytest.param(
        text, options, marks=[] if j == i % len(TEXTS) else [pytest.mark.slow], id=f"text {j}: {'+'.join(options)}"
    )
    for i, options in enumerate(OPTIONS)
    for j, text in enumerate(TEXTS)
]


@pytest.mark.parametrize(("text", "options"), CASES)
async def test_the_same_through_every_api(cluster, text, options, monkeypatch) -> None:
    monkeypatch.setattr(
        lookaside, "PLACE_PATIENCE_S", 300.0
    )  # else the router is asked for the answer on a busy machine
    ask = {"prompt": text, "max_tokens": 14, "seed": 11, "local_prefill_max_tokens": 0}
    sampling = {name: value for name, value in options.items() if name != "choice"}
    body = ask | sampling | ({"guided_choice": options["choice"]} if "choice" in options else {})
    request = router_pb2.GenerateRequest(
        prompt=text,
        local_prefill_max_tokens=0,
        sampling=types_pb2.SamplingParams(max_tokens=14, seed=11, **sampling),
    )
    if "choice" in options:
        request.sampling.grammar.kind = types_pb2.GRAMMAR_KIND_CHOICE
        request.sampling.grammar.source = json.dumps(options["choice"])
    granted, finished = [await asyncio.to_thread(tickets, cluster, name) for name in ("granted", "finished")]

    def synchronous(*, directly: bool) -> Answer:
        with Client(cluster.grpc_address, timeout_s=300.0, lookaside=directly) as client:
            stream = client.stream(**ask, **options)
            deltas = list(stream)
            ids = [token for delta in deltas for token in delta.token_ids]
            return ids, "".join(delta.text for delta in deltas), stream.result.finish_reason

    address = cluster.grpc_address
    async with (
        AsyncClient(address, timeout_s=300.0) as client,
        AsyncClient(address, timeout_s=300.0, lookaside=True) as direct,
    ):
        expected, *others = await asyncio.gather(  # at once: a step of several is hardly dearer than that of one
            over_http(cluster.http_url, body),
            over_grpc(address, request),
            over_sdk(client, ask | options),
            asyncio.to_thread(synchronous, directly=False),
        )
        # One after another: a request that would wait for its turn at the router gets no ticket, and the router relays it.
        others.append(await over_sdk(direct, ask | options, at_once=False))
        others.append(await asyncio.to_thread(synchronous, directly=True))
    assert others == [expected] * 5
    assert await asyncio.to_thread(tickets, cluster, "granted") - granted == 3, "the router relayed some of them"

    async def reported() -> bool:
        return await asyncio.to_thread(tickets, cluster, "finished") - finished >= 3

    await waiting.until(reported, "decode tells the router of them now and then", every_s=0.05)


@pytest.mark.parametrize("local", [0, 4000])
async def test_a_cut_stream_goes_on_byte_for_byte(cluster, local) -> None:
    """Cut behind every token: within a character, within a stop string, under a grammar, at the end."""
    cases: list[dict[str, Any]] = [
        {"prompt": TEXTS[0], "temperature": 0, "stop": ["the sky is"], "max_tokens": 10},
        {"prompt": TEXTS[1], "temperature": 1.0, "regex": "[a-c]{2}空\U0001f30d!", "max_tokens": 12},
    ]
    async with AsyncClient(cluster.grpc_address, timeout_s=300.0) as client:
        for case in cases:
            stream = client.stream(**case, local_prefill_max_tokens=local)
            deltas = [delta async for delta in stream]
            ids, text, seed = list(stream.result.token_ids), stream.result.text, stream.seed
            cuts = [  # but not where tokens arrived in one message
                cut
                for cut in range(1, len(ids) + 1)
                if not any(delta.offset < cut < delta.offset + len(delta.token_ids) for delta in deltas)
            ]
            rests = await asyncio.gather(
                *(
                    client.generate(**case | {"seed": seed}, resume_after=ids[:cut], local_prefill_max_tokens=local)
                    for cut in cuts
                )
            )
            for cut, rest in zip(cuts, rests, strict=True):
                sent = "".join(delta.text for delta in deltas if delta.offset < cut)
                assert ids[:cut] + list(rest.token_ids) == ids
                assert sent + rest.text == text, (cut, sent, rest.text)
                assert rest.finish_reason == stream.result.finish_reason
                assert rest.usage == stream.result.usage or rest.usage.completion_tokens == len(ids)
    await asyncio.to_thread(cluster.wait_idle)


@pytest.mark.parametrize(("given", "options"), [([2, 2, 2, 2], {}), ([65, 65, 65], {"stop": ["a"]})])
async def test_an_end_within_the_tokens_that_are_there_is_the_callers_error(cluster, given, options) -> None:
    async with AsyncClient(cluster.grpc_address, timeout_s=300.0) as client:
        if "stop" in options:
            given = (await client.generate(prompt="b", max_tokens=4, choice=["a a a"])).token_ids[:3]
        with pytest.raises(InvalidRequestError, match="ends before the last") as caught:
            await client.generate(prompt="a b c", max_tokens=12, seed=5, resume_after=list(given), **options)
    assert caught.value.param == "resume_after"
    await asyncio.to_thread(cluster.wait_idle)


async def test_an_idempotency_key_runs_once(cluster) -> None:
    ask: dict[str, Any] = {"prompt": "Once", "max_tokens": 4, "idempotency_key": f"key-{cluster.grpc_address}"}
    async with AsyncClient(cluster.grpc_address, timeout_s=300.0) as client:
        await client.generate(**ask)
        with pytest.raises(DuplicateRequestError):
            await client.generate(**ask)
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=300.0) as http:
        body = {"prompt": "Once", "max_tokens": 4}
        headers = {"idempotency-key": "over http"}
        codes = [(await http.post("/v1/completions", json=body, headers=headers)).status_code for _ in range(2)]
        assert codes == [200, 409]
