"""Claims of requests at the router: in every attempt, explained, bounded by the key; sessions that are closed; hints."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from diptych.client import AsyncClient
from diptych.client import OverloadedError as ClientOverloaded
from diptych.common.block_identity import block_keys
from diptych.common.errors import InvalidRequestError, OverloadedError
from diptych.common.secret import derive_key, session_key, tenant_salt
from diptych.common.ticket import PURPOSE, unseal
from diptych.common.tiers import TierState
from diptych.router.cluster.fake_decode import FakeDecode
from diptych.router.fairness.fair_queue import Share
from diptych.router.requests.messages import FinishedEvent, StartedEvent, UncheckedRequest
from diptych.rpc.v1 import decode_pb2, types_pb2
from diptych_tests.http_api import api_servers


def key_of(fleet, name, tenant=""):
    return session_key(tenant_salt(fleet.secret, tenant), name)


async def test_a_claim_survives_a_move_to_another_worker(fleet):
    await fleet.add("p0", "prefill")
    first = await fleet.add("d0")
    await fleet.until_ready()
    first.hold_from = 2
    spec = UncheckedRequest(
        token_ids=[1] * 20, sampling={"max_tokens": 4}, explain=True, session_id="chat", cache_ttl_s=60.0
    )
    events = fleet.frontend.generate(await fleet.frontend.prepare(spec))
    seen = [await anext(events), await anext(events), await anext(events)]
    second = await fleet.add("d1")
    await fleet.until_ready(decode=2)
    await first.kill()
    seen += [event async for event in events]
    claims = [worker.submits[0].claim for worker in (first, second)]
    assert claims == [types_pb2.CacheClaim(ttl_s=60.0, priority=50, session=key_of(fleet, "chat"))] * 2
    assert second.submits[0].output_token_ids
    report = seen[-1].explanation.claim
    assert (report.ttl_s, report.requested_ttl_s, report.priority, report.session_id) == (60.0, 60.0, 50, "chat")


async def test_a_request_without_a_claim_sends_and_explains_none(fleet):
    await fleet.add("p0", "prefill")
    worker = await fleet.add("d0")
    await fleet.until_ready()
    events = await fleet.ask()
    assert not worker.submits[0].HasField("claim")
    assert not events[-1].explanation.HasField("claim")


async def test_a_ticket_carries_the_claim(fleet):
    await fleet.add("p0", "prefill")
    key = derive_key(fleet.secret, PURPOSE)
    await fleet.add("d0", ticket_key=key)
    await fleet.until_ready()
    cluster = fleet.frontend._cluster
    await fleet.until(lambda: cluster.direct_endpoint(("d0", "i1")) is not None)
    spec = UncheckedRequest(token_ids=[1] * 20, sampling={"max_tokens": 4}, cache_priority=7)
    [placed] = fleet.frontend.place([await fleet.frontend.prepare(spec)])
    claims = decode_pb2.TicketClaims.FromString(unseal(key, placed.ticket))
    assert claims.submit.claim == types_pb2.CacheClaim(ttl_s=300.0, priority=7)


async def test_the_key_bounds_the_time_and_the_explanation_says_so(fleet):
    await fleet.add("p0", "prefill")
    worker = await fleet.add("d0")
    await fleet.until_ready()
    fleet.frontend.use_shares(lambda tenant: Share(1, 4))
    fleet.frontend.use_cache_limits(lambda tenant: {"short": 30.0}.get(tenant, 0.0))
    for tenant, most in (("short", 30.0), ("other", 86_400.0)):
        events = await fleet.ask(tenant=tenant, cache_ttl_s=1e6)
        assert (worker.submits[-1].claim.ttl_s, worker.submits[-1].claim.rank) == (most, 4)
        report = events[-1].explanation.claim
        assert (report.ttl_s, report.requested_ttl_s) == (most, 1e6)


async def test_closing_a_session_reaches_every_worker_and_names_those_that_are_silent(fleet):
    prefill, decode = await fleet.add("p0", "prefill"), await fleet.add("d0")
    await fleet.until_ready()
    closed = await fleet.frontend.close_session("chat", "a")
    assert (closed.freed_tokens, list(closed.unreached)) == (32, [])
    assert prefill.released == decode.released == [key_of(fleet, "chat", "a")]
    await decode.kill()
    closed = await fleet.frontend.close_session("chat", "b")
    assert (closed.freed_tokens, list(closed.unreached)) == (16, ["d0"])
    assert prefill.released[-1] == key_of(fleet, "chat", "b") != prefill.released[0]
    with pytest.raises(InvalidRequestError) as caught:
        await fleet.frontend.close_session("", "a")
    assert caught.value.param == "session_id"


async def test_a_worker_of_an_earlier_version_has_no_claims_to_end(fleet, monkeypatch):
    await fleet.add("p0", "prefill")
    await fleet.until_ready(decode=0)
    monkeypatch.delattr(FakeDecode, "ReleaseSession")  # what is left answers UNIMPLEMENTED, as such a worker
    await fleet.add("d0")
    await fleet.until_ready()
    closed = await fleet.frontend.close_session("chat", "a")
    assert (closed.freed_tokens, list(closed.unreached)) == (16, [])


async def test_a_hint_computes_the_prompt_and_sends_no_token(fleet):
    await fleet.add("p0", "prefill")
    worker = await fleet.add("d0")
    await fleet.until_ready()
    events = await fleet.ask(prefetch=True)
    assert [type(event) for event in events] == [StartedEvent, FinishedEvent]
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (40, 0, 16)
    assert (worker.submits[0].sampling.max_tokens, worker.submits[0].claim.ttl_s) == (1, 300.0)


async def test_20_a_hint_of_what_decode_holds_is_computed_on_prefill(fleet):
    """Decode holds the history once the answer has ended, and prefill computes the next turn: the hint brings it there."""
    keys = tuple(block_keys(replace(fleet.header, salt=tenant_salt(fleet.secret, "")), [1] * 80))
    await fleet.add("p0", "prefill")
    worker = await fleet.add("d0", event_epoch=0, tiers=(TierState("device", 5),))
    worker.dump = (0, 5, keys)
    await fleet.until_ready()
    index = fleet.frontend._cluster._index
    await fleet.until(lambda: index.hit_blocks("d0", keys) == 5)
    ask = {"num_prompt": 80, "local_prefill_max_tokens": 64}
    events = [(await fleet.ask(**ask, prefetch=hint))[-1] for hint in (False, True)]
    assert [event.explanation.candidates[0].decode_hit_tokens for event in events] == [64, 64]
    assert [submit.placement.local_prefill for submit in worker.submits] == [True, False]
    assert [ref.worker_id for ref in worker.submits[1].placement.prefill] == ["p0"]


async def test_a_hint_over_http_is_an_empty_answer(fleet):
    await fleet.add("p0", "prefill")
    worker = await fleet.add("d0")
    await fleet.until_ready()
    chat = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 50, "n": 2}
    async with api_servers(fleet.frontend) as at, httpx.AsyncClient(base_url=f"http://{at.http}", timeout=60) as client:
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": "w1 w2", "echo": True, "stream": True}),
            ("/v1/responses", {"input": "w1 w2"}),
        ):
            answer = await client.post(path, json=body | {"prefetch": True, "prompt_cache_key": "k"})
            assert answer.status_code == 200, answer.text
            assert "t0" not in answer.text, "the token that a worker computed"
            if path == "/v1/chat/completions":
                shown = answer.json()
                assert [choice["message"]["content"] for choice in shown["choices"]] == [""]
                assert (shown["usage"]["completion_tokens"], shown["choices"][0]["finish_reason"]) == (0, "length")
    assert {submit.claim.session for submit in worker.submits} == {key_of(fleet, "k")}
    assert {submit.sampling.max_tokens for submit in worker.submits} == {1}


async def test_a_hint_is_dropped_where_requests_wait(fleet, monkeypatch):
    await fleet.add("p0", "prefill")
    worker = await fleet.add("d0")
    await fleet.until_ready()
    queue = fleet.frontend._cluster.wait_queue
    monkeypatch.setattr(type(queue), "may_pass", lambda *_, **__: False)
    with pytest.raises(OverloadedError, match="hint"):
        await fleet.ask(prefetch=True)
    assert not worker.submits
    assert fleet.no_reservations()


async def test_the_sdks_session_claims_hints_and_closes(fleet, monkeypatch):
    prefill = await fleet.add("p0", "prefill")
    worker = await fleet.add("d0")
    await fleet.until_ready()
    async with fleet.served() as address, AsyncClient(address) as client:
        async with client.session(cache_ttl_s=60.0, cache_priority=80) as session:
            usage = await session.prefetch(token_ids=[1] * 20, max_tokens=9)
            answer = await session.generate(token_ids=[1] * 20, max_tokens=3, explain=True, cache_priority=20)
            assert (usage.prompt_tokens, usage.completion_tokens) == (20, 0)
            assert len(answer.token_ids) == 3
            report = answer.explanation.claim
            assert (report.ttl_s, report.priority, report.session_id) == (60.0, 20, session.id)
        claims = [submit.claim for submit in worker.submits]
        assert [(claim.ttl_s, claim.priority) for claim in claims] == [(60.0, 80), (60.0, 20)]
        assert {claim.session for claim in claims} == {key_of(fleet, session.id)}
        assert worker.released == prefill.released == [key_of(fleet, session.id)]
        assert (await client.close_session("another")).freed_tokens == 32
        monkeypatch.setattr(type(fleet.frontend._cluster.wait_queue), "may_pass", lambda *_, **__: False)
        with pytest.raises(ClientOverloaded):
            await client.prefetch(prompt="w1 w2", timeout_s=0.5)
