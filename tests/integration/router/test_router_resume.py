"""A router dies in mid-answer, and another one goes on with it: two routers between fake decode workers, HTTP and gRPC.

What the caller got before and after is what it gets undisturbed, byte for byte."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from diptych.client import AsyncClient
from diptych.common.errors import InvalidRequestError, QuotaExceededError
from diptych.router.api.auth.limits import MeteredRouterApi, TenantQuotas
from diptych.router.api.http.options import HttpOptions
from diptych.router.api.http.response import GenerationResponse
from diptych.router.server import ApiServers
from diptych_tests import waiting
from diptych_tests.event_stream import messages, numbers_of, plain, undisturbed, undisturbed_after
from diptych_tests.router_fleet import other_router, running

NUM_TOKENS, AT = 8, 3
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
KEEPS = {"request_fields": ("resume",)}
FINDS = {"request_fields": ("resume", "idempotency")}
KEY = {"idempotency-key": "mine"}


@asynccontextmanager
async def served(frontend, options=None):
    servers = ApiServers("127.0.0.1", 0, 0, options=options)
    try:
        at = await servers.start(frontend, frontend.metrics)
        async with httpx.AsyncClient(base_url=f"http://{at.http}", timeout=60) as client:
            yield client
    finally:
        await servers.stop(1.0)


@pytest.fixture
async def fleet(model_folder, tmp_path):
    async with running(model_folder, tmp_path, dead_s=60.0) as fleet:
        await fleet.add("p0", "prefill")
        yield fleet


def body_of(path, **changes):
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "w1 w2 w3"}], "max_tokens": NUM_TOKENS}
    elif path == COMPLETIONS:
        body = {"prompt": [1] * 20, "max_tokens": NUM_TOKENS}
    else:
        body = {"input": "w1 w2 w3", "max_output_tokens": NUM_TOKENS}
    return body | {"stream": True} | changes


async def until_held(client, fleet, worker, path, body, tokens):
    """What a caller got of an answer that holds there, and its open response; the router is then as good as dead."""
    worker.hold_from = tokens
    seen = []
    response = await client.send(client.build_request("POST", path, json=body), stream=True)
    response.reader = stream = messages(response)  # without it the response would be closed, and the request cancelled
    n = body.get("n", 1)
    while not seen or numbers_of(seen[-1][1])[0] < tokens * n:
        async with asyncio.timeout(60):
            seen.append(await anext(stream))
    return seen, response


@pytest.mark.parametrize("kept", [True, False], ids=["attached", "computed again"])
@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (CHAT, {}),
        (CHAT, {"n": 3, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        (CHAT, {"return_token_ids": True}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"n": 2, "stream_options": {"include_usage": True}}),
        (RESPONSES, {}),
    ],
)
async def test_a_plain_client_goes_on_at_another_router(fleet, path, changes, kept) -> None:
    """At every message that a client may have got last, it gets the rest."""
    worker = await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    worker.forgets = not kept
    body = body_of(path, **changes)
    async with served(fleet.frontend) as first, other_router(fleet) as frontend, served(frontend) as second:
        seen, response = await until_held(first, fleet, worker, path, body, AT)
        (submit,) = worker.submits
        assert submit.keep
        worker.hold_from = -1
        resumed = asyncio.create_task(undisturbed_after(second, path, body, seen[-1][1]))
        await waiting.until(lambda: worker.resumes == [submit.attempt])
        worker.go.set()
        rest = await resumed
        await response.aclose()
        whole = seen + rest
        request_id = json.loads(seen[0][0].split("data: ", 1)[1])
        assert len(worker.submits) == (1 if kept else 2)
        if not kept:
            again = worker.submits[1]
            assert (again.sampling.seed, list(again.output_token_ids)) == (submit.sampling.seed, [])
        # From here on the answer is complete at the worker, or is computed each time: go on after each message.
        text, ends, heads = plain(whole)
        assert len(heads) <= 1, request_id
        for number in range(len(whole) - 1):
            if not whole[number][1].startswith(whole[0][1].partition(".")[0]):
                break  # of a second ref: it is another attempt
            again = whole[: number + 1] + await undisturbed_after(second, path, body, whole[number][1])
            assert plain(again) == (text, ends, heads), number
        outcomes = frontend.metrics.totals()["resumes"]
        assert set(outcomes) == ({"attached"} if kept else {"computed"})
    spoken = {i: "".join(f"{f'c{i}' if i else ''}t{k} " for k in range(NUM_TOKENS)) for i in range(body.get("n", 1))}
    if path == RESPONSES:
        assert list(text.values()) == [spoken[0]]
    else:
        echo = " ".join(["w1"] * 20) if body.get("echo") else ""
        assert {i: one for i, one in text.items() if isinstance(i, int)} == {i: echo + t for i, t in spoken.items()}
        assert ends[-1] == "[DONE]"
    if body.get("stream_options"):
        usage = ends[-2]["usage"]
        assert usage["completion_tokens"] == NUM_TOKENS * body["n"]


async def test_a_whole_answer_of_a_broken_stream_and_by_the_body(fleet) -> None:
    worker = await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    body = body_of(CHAT)
    async with served(fleet.frontend) as first, other_router(fleet) as frontend, served(frontend) as second:
        seen, response = await until_held(first, fleet, worker, CHAT, body, AT)
        worker.go.set()
        whole = await second.post(CHAT, json=body | {"stream": False, "resume_after": seen[-1][1]})
        await response.aclose()
        assert whole.status_code == 200, whole.text
        answer = whole.json()
        assert answer["choices"][0]["message"]["content"] == "".join(f"t{i} " for i in range(NUM_TOKENS))
        assert answer["id"] == json.loads(seen[0][0].split("data: ", 1)[1])["id"]
        assert answer["usage"]["completion_tokens"] == NUM_TOKENS
        assert len(worker.submits) == 1


@pytest.mark.parametrize("what", ["forged", "position", "body", "temperature", "seed", "salt", "junk", "huge"])
async def test_an_id_that_is_not_of_this_answer_is_refused(fleet, what) -> None:
    worker = await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    body = body_of(CHAT)
    async with served(fleet.frontend) as client:
        seen = await undisturbed(client, CHAT, body)
        ref, _, position = seen[2][1].partition(".")
        event_id = {
            "forged": f"{'A' if ref[20] != 'A' else 'B'}".join([ref[:20], ref[21:]]) + "." + position,
            "position": f"{ref}.1-0",
            "junk": "x\N{LATIN SMALL LETTER E WITH ACUTE}".encode("latin-1").decode("latin-1"),
            "huge": f"{ref}.{'1-' * 3000}1",
        }.get(what, seen[2][1])
        changed = {
            "body": {"max_tokens": 5},
            "temperature": {"temperature": 0.5},
            "seed": {"seed": 7},
            "salt": {"cache_salt": "other"},
        }.get(what, {})
        answer = await client.post(CHAT, json=body | changed, headers={"last-event-id": event_id.encode("latin-1")})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "last-event-id"
        expected = "not the one of this id" if changed else "no answer of yours with this id"
        assert expected in error["message"]
        assert len(worker.submits) == 1


async def test_another_tenants_key_gets_what_an_unknown_id_gets(fleet) -> None:
    from diptych.router.requests.messages import UncheckedRequest

    await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    spec = {"token_ids": [1] * 20, "sampling": {"max_tokens": 3}}
    prepared = await fleet.frontend.prepare(UncheckedRequest(**spec, tenant="a", resumable=True))
    started = [event async for event in fleet.frontend.generate(prepared)][0]
    assert started.resume_ref
    event_id = f"{started.resume_ref}.1-0-0-0-0-0-0-0"
    again = await fleet.frontend.prepare(UncheckedRequest(**spec, tenant="a", resume_id=event_id))
    assert again.request_id == prepared.request_id
    said = []
    for tenant, value in (("b", event_id), ("a", "A" + event_id[1:] if event_id[0] != "A" else "B" + event_id[1:])):
        with pytest.raises(InvalidRequestError) as refused:
            await fleet.frontend.prepare(UncheckedRequest(**spec, tenant=tenant, resume_id=value))
        said.append((refused.value.message, refused.value.param))
    assert said[0] == said[1]


@pytest.mark.parametrize("kept", [True, False])
async def test_a_tenant_pays_once_for_what_is_computed_once(fleet, kept) -> None:
    """Even one whose quota is used up gets the rest; if it must be computed again it waits as for any other request."""
    from diptych.router.requests.messages import UncheckedRequest

    worker = await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    worker.forgets = not kept
    limits = {"a": 30}
    quotas = TenantQuotas(limits.__getitem__, now=lambda: 0.0)
    metered = MeteredRouterApi(fleet.frontend, quotas)
    spec = {"token_ids": [1] * 20, "sampling": {"max_tokens": NUM_TOKENS}, "tenant": "a", "resumable": True}
    worker.hold_from = AT
    events = metered.generate(await metered.prepare(UncheckedRequest(**spec)))
    started = await anext(events)
    have = 0
    while have < AT:
        have += len((await anext(events)).token_ids)
    quotas.spend("a", 10)  # another request: the rest is below zero
    level = quotas._level("a", 30)
    assert level == 30 - 20 - AT - 10
    event_id = f"{started.resume_ref}.1-0-0-{AT}-{3 * AT}-{crc(range(AT))}-0-0"
    resumed = metered.generate(await metered.prepare(UncheckedRequest(**spec, resume_id=event_id)))
    assert quotas._level("a", 30) == level
    if not kept:
        with pytest.raises(QuotaExceededError):
            await anext(resumed)
        await events.aclose()
        return
    worker.go.set()
    assert (await anext(resumed)).attached
    rest = [event async for event in resumed]
    assert quotas._level("a", 30) == level - (NUM_TOKENS - AT)
    assert rest[-1].usage.completion_tokens == NUM_TOKENS
    assert fleet.frontend.metrics.value("generation_tokens_total") == NUM_TOKENS
    with pytest.raises(Exception, match="another"):
        [event async for event in events]


def crc(ids):
    from diptych.router.requests.resume import checksum

    return checksum(list(ids))


async def test_the_worker_dies_after_another_router_has_taken_over(fleet) -> None:
    """Migration goes on from the tokens that came again."""
    worker = await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    body = body_of(CHAT)
    async with served(fleet.frontend) as first, other_router(fleet) as frontend, served(frontend) as second:
        seen, response = await until_held(first, fleet, worker, CHAT, body, AT)
        resumed = asyncio.create_task(undisturbed_after(second, CHAT, body, seen[-1][1]))
        await waiting.until(lambda: worker.resumes)
        other = await fleet.add("d1", **KEEPS)
        await waiting.until(lambda: len(frontend._cluster.snapshot().decode) == 2)
        await worker.kill()
        whole = seen + await resumed
        await response.aclose()
        assert plain(whole)[0] == {0: "".join(f"t{i} " for i in range(NUM_TOKENS))}
        assert list(other.submits[-1].output_token_ids) == [0, 1, 2]
        assert not other.submits[-1].keep, "its transcript would begin in the middle"


async def test_a_router_that_lives_cancels_what_the_worker_keeps(fleet) -> None:
    """Its stream to the worker broke, the answer went elsewhere."""
    worker = await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    async with served(fleet.frontend) as first:
        seen, response = await until_held(first, fleet, worker, CHAT, body_of(CHAT), AT)
        other = await fleet.add("d1", **KEEPS)
        await fleet.until_ready(decode=2)
        for out in list(worker._routers):
            out.fail()
        await waiting.until(lambda: other.submits)
        await waiting.until(lambda: worker.cancels == [worker.submits[0].attempt])
        await response.aclose()


async def test_an_older_worker_is_not_asked_to_keep(fleet) -> None:
    worker = await fleet.add("d0")
    await fleet.until_ready()
    async with served(fleet.frontend) as client:
        seen = await undisturbed(client, CHAT, body_of(CHAT))
    assert {event_id for _, event_id in seen} == {""}
    assert not worker.submits[0].keep


async def test_the_openai_client_reads_over_the_ids(fleet) -> None:
    await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    async with served(fleet.frontend) as http:
        url = str(http.base_url) + "v1" if str(http.base_url).endswith("/") else f"{http.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            asked = {"model": "", "max_tokens": NUM_TOKENS, "stream": True}
            chat = await client.chat.completions.create(messages=[{"role": "user", "content": "w1"}], **asked)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
            assert text == "".join(f"t{i} " for i in range(NUM_TOKENS))
            events = await client.responses.create(model="", input="w1", max_output_tokens=NUM_TOKENS, stream=True)
            numbers = [event.sequence_number async for event in events]
            assert numbers == list(range(len(numbers)))


async def test_the_openai_client_reads_over_pings(fleet, monkeypatch) -> None:
    """It takes every blank line after an id for the end of an event, also the one after a comment."""
    worker = await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    worker.hold_from = AT
    pings, ping = [], GenerationResponse._ping

    async def counted(response, send) -> None:
        await ping(response, send)
        pings.append(response)

    monkeypatch.setattr(GenerationResponse, "_ping", counted)
    monkeypatch.setitem(GenerationResponse.__init__.__kwdefaults__, "ping_s", 0.003)
    async with (
        served(fleet.frontend) as http,
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        asked = {"model": "", "messages": [{"role": "user", "content": "w1"}], "max_tokens": NUM_TOKENS, "stream": True}
        chat = await client.chat.completions.create(**asked)
        text = ""
        async for chunk in chat:
            text += chunk.choices[0].delta.content or ""
            if text.split() == [f"t{i}" for i in range(AT)]:
                await waiting.until(lambda: len(pings) >= 3)
                worker.hold_from = -1
                worker.go.set()
    assert text == "".join(f"t{i} " for i in range(NUM_TOKENS))


async def test_ids_can_be_left_out(fleet) -> None:
    """Then the worker need not keep anything."""
    worker = await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    async with served(fleet.frontend, HttpOptions(event_ids=False)) as client:
        seen = await undisturbed(client, CHAT, body_of(CHAT))
    assert {event_id for _, event_id in seen} == {""}
    assert not worker.submits[0].keep


async def test_whole_answers_are_not_kept(fleet) -> None:
    worker = await fleet.add("d0", **KEEPS)
    await fleet.until_ready()
    async with served(fleet.frontend) as client:
        assert (await client.post(CHAT, json=body_of(CHAT, stream=False))).status_code == 200
        several = body_of(COMPLETIONS, prompt=["w1", "w2"])
        seen = await undisturbed(client, COMPLETIONS, several)
        assert {event_id for _, event_id in seen} == {""}
        refused = await client.post(COMPLETIONS, json=several | {"resume_after": "x.1"})
        assert refused.json()["error"]["param"] == "resume_after"
    assert not any(submit.keep for submit in worker.submits)


# ---- by the idempotency key: a caller that has no id of the answer ----


def text_of(path, answer):
    if path == RESPONSES:
        return {0: answer["output"][-1]["content"][0]["text"]}
    return {one["index"]: one["message"]["content"] if path == CHAT else one["text"] for one in answer["choices"]}


def spoken(n=1):
    return {i: "".join(f"{f'c{i}' if i else ''}t{k} " for k in range(NUM_TOKENS)) for i in range(n)}


@pytest.mark.parametrize("when", ["running", "ended"])
@pytest.mark.parametrize(("path", "changes"), [(CHAT, {}), (CHAT, {"n": 3}), (COMPLETIONS, {}), (RESPONSES, {})])
async def test_a_whole_answer_is_found_at_another_router_by_its_key(fleet, path, changes, when) -> None:
    """It is computed once, whether its router dies before its end or after."""
    worker = await fleet.add("d0", **FINDS)
    await fleet.until_ready()
    worker.hold_from = AT if when == "running" else -1
    body = body_of(path, **changes) | {"stream": False}
    n = changes.get("n", 1)
    async with served(fleet.frontend) as first, other_router(fleet) as frontend, served(frontend) as second:
        before = asyncio.create_task(first.post(path, json=body, headers=KEY))
        tokens = (AT if when == "running" else NUM_TOKENS) * n
        await waiting.until(lambda: worker.submits and worker.sent.get(worker.submits[0].attempt) == tokens)
        if when == "ended":
            assert (await before).status_code == 200
        again = asyncio.create_task(second.post(path, json=body, headers=KEY))
        await waiting.until(lambda: worker.resumes == [worker.submits[0].attempt])
        worker.go.set()
        answer = await again
        assert answer.status_code == 200, answer.text
        assert text_of(path, answer.json()) == spoken(n)
        assert len(worker.submits) == 1
        assert worker.submits[0].request_id.removeprefix("req-") in answer.json()["id"]
        assert frontend.metrics.totals()["resumes"] == {"attached": 1}
        if when == "ended":
            assert text_of(path, (await before).json()) == spoken(n)
        else:
            assert (await before).status_code >= 400, "its router lives: it learns that another one has the answer"


async def test_a_stream_without_an_id_begins_again_by_its_key(fleet) -> None:
    """Its router died before the first message, so that there is no id: it gets all messages."""
    worker = await fleet.add("d0", **FINDS)
    await fleet.until_ready()
    body = body_of(CHAT)
    async with served(fleet.frontend) as first, other_router(fleet) as frontend, served(frontend) as second:
        worker.hold_from = AT
        request = first.build_request("POST", CHAT, json=body, headers=KEY)
        before = await first.send(request, stream=True)
        worker.hold_from = -1
        attempt = worker.submits[-1].attempt
        again = asyncio.create_task(second.post(CHAT, json=body, headers=KEY))
        await waiting.until(lambda: worker.resumes == [attempt])
        worker.go.set()
        events = [event.split("data: ", 1)[1] for event in (await again).text.split("\n\n") if event]
        await before.aclose()
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        text = "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks if one["choices"])
        assert text == spoken()[0]


async def test_a_key_whose_answer_is_lost_is_computed_again(fleet) -> None:
    worker = await fleet.add("d0", **FINDS)
    await fleet.until_ready()
    body = body_of(CHAT) | {"stream": False}
    async with served(fleet.frontend) as first, other_router(fleet) as frontend, served(frontend) as second:
        assert (await first.post(CHAT, json=body, headers=KEY)).status_code == 200
        worker.forgets = True
        assert text_of(CHAT, (await second.post(CHAT, json=body, headers=KEY)).json()) == spoken()
        assert len(worker.submits) == 2
        assert worker.submits[0].sampling.seed == worker.submits[1].sampling.seed
        worker.kept.clear()
        other = {"idempotency-key": "another"}
        assert text_of(CHAT, (await second.post(CHAT, json=body, headers=other)).json()) == spoken()
        assert len(worker.submits) == 3


@pytest.mark.parametrize("changes", [{"max_tokens": 5}, {"seed": 7}, {"n": 2}, {"cache_salt": "other"}])
async def test_a_key_with_another_body_is_refused(fleet, changes) -> None:
    worker = await fleet.add("d0", **FINDS)
    await fleet.until_ready()
    body = body_of(CHAT) | {"stream": False}
    async with served(fleet.frontend) as first, other_router(fleet) as frontend, served(frontend) as second:
        assert (await first.post(CHAT, json=body, headers=KEY)).status_code == 200
        answer = await second.post(CHAT, json=body | changes, headers=KEY)
        assert answer.status_code == 409, answer.text
        assert answer.json()["error"]["message"] == "another request has this idempotency key"
        assert len(worker.submits) == 1


async def test_a_key_of_another_tenant_finds_nothing(fleet) -> None:
    from diptych.router.requests.messages import UncheckedRequest

    worker = await fleet.add("d0", **FINDS)
    await fleet.until_ready()
    spec = {"token_ids": [1] * 20, "sampling": {"max_tokens": 3}, "idempotency_key": "k", "resumable": True}
    async with other_router(fleet) as frontend:
        for router, tenant in ((fleet.frontend, "a"), (frontend, "b"), (frontend, "a")):
            prepared = await router.prepare(UncheckedRequest(**spec, tenant=tenant))
            assert prepared.found_by_key == (router is frontend and tenant == "a")
            assert [event async for event in router.generate(prepared)]
    mine, theirs = (submit.idempotency for submit in worker.submits)
    assert len(mine) == len(theirs) == 16
    assert mine != theirs
    assert worker.finds == [mine, theirs, mine]


async def test_a_router_that_has_the_key_refuses_it_as_before(fleet) -> None:
    """Also while it runs: it is not taken away from itself."""
    worker = await fleet.add("d0", **FINDS)
    await fleet.until_ready()
    worker.hold_from = AT
    body = body_of(CHAT) | {"stream": False}
    async with served(fleet.frontend) as client:
        running = asyncio.create_task(client.post(CHAT, json=body, headers=KEY))
        await waiting.until(lambda: worker.submits and worker.sent.get(worker.submits[0].attempt) == AT)
        assert (await client.post(CHAT, json=body, headers=KEY)).status_code == 409
        worker.go.set()
        assert text_of(CHAT, (await running).json()) == spoken()
        assert (await client.post(CHAT, json=body, headers=KEY)).status_code == 409
    assert not worker.resumes
    assert len(worker.submits) == 1


async def test_a_worker_that_does_not_say_what_it_keeps_holds_nobody_up(fleet, monkeypatch) -> None:
    from diptych.router.cluster import worker_link

    worker = await fleet.add("d0", **FINDS)
    await fleet.until_ready()
    worker.answer_gate.clear()
    async with served(fleet.frontend) as client:
        for deadline_s in (0.01, 0.1, 1.0, 10.0, 100.0):
            monkeypatch.setattr(worker_link, "FIND_S", deadline_s)
            headers = {"idempotency-key": f"mine within {deadline_s:g} s"}
            answer = await client.post(CHAT, json=body_of(CHAT) | {"stream": False}, headers=headers)
            assert text_of(CHAT, answer.json()) == spoken()
            if worker.finds:  # on a slow machine the deadline may pass before the question is there
                break
    assert len(worker.finds) == 1


@pytest.mark.parametrize("what", ["an older worker", "no key", "several prompts"])
async def test_workers_are_asked_only_for_keys_that_they_may_have(fleet, what) -> None:
    worker = await fleet.add("d0", **(KEEPS if what == "an older worker" else FINDS))
    await fleet.until_ready()
    body = body_of(COMPLETIONS) | {"stream": False}
    if what == "several prompts":
        body["prompt"] = [[1] * 20, [2] * 20]
    async with served(fleet.frontend) as client:
        answer = await client.post(COMPLETIONS, json=body, headers={} if what == "no key" else KEY)
    assert answer.status_code == 200, answer.text
    assert not worker.finds
    assert {submit.idempotency for submit in worker.submits} == {b""}
    assert {submit.keep for submit in worker.submits} == {what == "an older worker"}


async def test_a_key_makes_no_ids_where_they_are_left_out(fleet) -> None:
    worker = await fleet.add("d0", **FINDS)
    await fleet.until_ready()
    async with served(fleet.frontend, HttpOptions(event_ids=False)) as client:
        answer = await client.post(CHAT, json=body_of(CHAT), headers=KEY)
    assert "id: " not in answer.text
    assert worker.submits[0].keep


async def test_the_sdks_answer_is_found_by_its_key_too(fleet) -> None:
    """Another process of the same caller asks again, at another router: it gets all of it."""
    worker = await fleet.add("d0", **FINDS)
    await fleet.until_ready()
    asked = {"token_ids": [1] * 20, "max_tokens": NUM_TOKENS, "idempotency_key": "mine"}
    answers = []
    async with other_router(fleet) as second:
        for frontend in (fleet.frontend, second):
            servers = ApiServers("127.0.0.1", 0, 0)
            at = await servers.start(frontend, frontend.metrics)
            try:
                async with AsyncClient(at.grpc, timeout_s=60.0) as client:
                    answers.append(await client.generate(**asked))
            finally:
                await servers.stop(1.0)
    assert [list(answer.token_ids) for answer in answers] == [list(range(NUM_TOKENS))] * 2
    assert answers[0].text == answers[1].text == spoken()[0]
    assert len(worker.submits) == len(worker.resumes) == 1
