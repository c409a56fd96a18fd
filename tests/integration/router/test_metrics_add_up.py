"""Issue 15, 4.10: the router's figures add up whatever becomes of its requests: answered, left before and after the first token,
refused, placed again, failed in the middle; relayed, and with placement tickets."""

import asyncio

import pytest

from diptych.client import AsyncClient
from diptych.common.errors import DiptychError, DuplicateRequestError, InvalidRequestError, OverloadedError
from diptych.common.secret import derive_key
from diptych.common.ticket import PURPOSE
from diptych.router.requests.messages import StartedEvent, TokenEvent, UncheckedRequest


async def leave(fleet, *, after_tokens):
    """A request that is cancelled after this many tokens."""
    request = await fleet.frontend.prepare(UncheckedRequest(token_ids=[1] * 40, sampling={"max_tokens": 50}))
    events = fleet.frontend.generate(request)
    seen = 0
    async for event in events:
        assert isinstance(event, (StartedEvent, TokenEvent))
        seen += len(event.token_ids) if isinstance(event, TokenEvent) else 0
        if seen >= after_tokens:
            break
    await events.aclose()


def figures_of(fleet, metric_laws):
    return metric_laws.Figures.parse(fleet.frontend.metrics.expose().decode())


async def test_of_relayed_requests(fleet, metric_laws):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    await fleet.until_ready()
    for tokens in (1, 3):
        await fleet.ask(max_tokens=tokens)
    for tokens in (0, 1, 2):
        decode.hold_from = tokens  # this many tokens, and no more
        await leave(fleet, after_tokens=tokens)
        await asyncio.wait_for(decode.cancelled.wait(), 60)
        decode.cancelled.clear()
        decode.hold_from = -1
        decode.go.set()
    with pytest.raises(InvalidRequestError):
        await fleet.frontend.prepare(UncheckedRequest(token_ids=[10**6]))
    await fleet.ask(idempotency_key="once")
    with pytest.raises(DuplicateRequestError):
        await fleet.ask(idempotency_key="once")
    decode.skip_offset = 1
    with pytest.raises(DiptychError):
        await fleet.ask(max_tokens=3)  # breaks the protocol after its first token
    decode.skip_offset = -1
    decode.refuse = OverloadedError("full")
    with pytest.raises(DiptychError):
        await fleet.ask(failure_policy="fail")
    second = await fleet.add("d1")
    await fleet.until_ready(decode=2)
    await fleet.ask()  # on d1, perhaps after d0 has refused it
    assert second.submits
    figures = figures_of(fleet, metric_laws)
    assert not metric_laws.check_router(figures)
    assert figures.total("requests_total") == 11
    assert figures.total("request_success_total") == 4
    assert figures.total("request_errors_total", reason="CLIENT_LEFT") == 3
    assert figures.total("unfinished_tokens_total", of="prompt") == 3 * 40
    assert figures.total("unfinished_tokens_total", of="generation") >= 1 + 2 + 1
    assert figures.total("prompt_tokens_cached_total") == 16 * 7


async def test_of_requests_with_tickets(fleet, metric_laws):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0", ticket_key=derive_key(fleet.secret, PURPOSE))
    await fleet.until_ready()
    await fleet.until(lambda: fleet.frontend._cluster.direct_endpoint(("d0", "i1")) is not None)
    async with fleet.served() as address, AsyncClient(address, lookaside=True, timeout_s=300.0) as client:
        await client.generate(token_ids=[1] * 40, max_tokens=5)
        await client.generate(token_ids=[1] * 40, max_tokens=1)
        decode.hold_from = 2
        stream = client.stream(token_ids=[1] * 40, max_tokens=5)
        async for _ in stream:
            break
        await stream.aclose()
        await asyncio.wait_for(decode.cancelled.wait(), 60)
        await fleet.until(lambda: len(fleet.frontend._models["tiny"].lookaside) == 0)
    figures = figures_of(fleet, metric_laws)
    assert figures.total("placement_tickets_total", outcome="granted") == 3
    assert not metric_laws.check_router(figures)
    assert figures.total("request_success_total") == 2
    assert figures.total("inter_token_latency_seconds_count") == 5  # the mean of the received ones
    assert figures.total("prompt_tokens_cached_total") == 3 * 16
