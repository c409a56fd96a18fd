"""Unused tickets and unread replies must not cost other clients anything."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from diptych.client import AsyncClient
from diptych.common.errors import NoWorkerError
from diptych.common.secret import derive_key
from diptych.common.store.worker_record import WorkerLoad
from diptych.common.ticket import PURPOSE
from diptych.router.requests import lookaside, placements
from diptych.rpc.channels import open_channel
from diptych.rpc.errors import from_failure
from diptych.rpc.v1 import router_pb2

PROMPT = [1] * 40
_PLACEMENTS = "/diptych.rpc.v1.Router/Placements"


@pytest.fixture
async def world(fleet):
    """(fleet, address of its router). Prefill computes 20 tokens a second: any prompt fills the capacity gate."""
    await fleet.add("p0", "prefill", load=WorkerLoad(prefill_tokens_per_s=20.0))
    await fleet.add("d0", ticket_key=derive_key(fleet.secret, PURPOSE))
    await fleet.until_ready()
    await fleet.until(lambda: fleet.frontend._cluster.direct_endpoint(("d0", "i1")) is not None)
    async with fleet.served() as address:
        yield fleet, address


@asynccontextmanager
async def stream(address):
    async with open_channel(address) as channel:
        method = channel.stream_stream(
            _PLACEMENTS,
            request_serializer=router_pb2.PlacementsRequest.SerializeToString,
            response_deserializer=router_pb2.PlacementsResponse.FromString,
        )
        call = method()
        yield call
        call.cancel()


async def replies_of(call, count=1):
    found = []
    async with asyncio.timeout(300):
        while len(found) < count:
            found += (await call.read()).replies
    return found


def asked(*numbers, prompt=PROMPT):
    tokens = router_pb2.TokenIdsInput(token_ids=prompt)
    request = router_pb2.GenerateRequest(token_ids=tokens, local_prefill_max_tokens=0)
    request.sampling.max_tokens = 2
    return router_pb2.PlacementsRequest(places=[router_pb2.PlaceRequest(id=n, request=request) for n in numbers])


async def test_an_unused_ticket_holds_up_no_request(world):
    fleet, address = world
    async with stream(address) as call:
        await call.write(asked(1, 2))
        replies = await replies_of(call, 2)
        assert replies[0].HasField("placed")
        # another ticket would be one too many; a waiting request does not count what may never arrive
        assert "turn" in from_failure(replies[1].failure).message
        assert fleet.frontend.metrics.tickets.labels("withheld").value == 1
        assert fleet.frontend._cluster.wait_queue.may_pass("", 1)
        assert fleet.frontend._cluster.reservations.tokens("p0") == 40
        async with AsyncClient(address) as other:
            answer = await asyncio.wait_for(other.generate(token_ids=PROMPT, max_tokens=2), 60)
        assert answer.token_ids == (0, 1)


async def test_what_was_not_used_within_a_round_trip_counts_nowhere(world, monkeypatch):
    fleet, address = world
    monkeypatch.setattr(lookaside, "FRESH_S", 0.05)
    async with stream(address) as call:
        await call.write(asked(1))
        assert (await replies_of(call))[0].HasField("placed")
        await fleet.until(fleet.no_reservations)
        await call.write(asked(2))
        assert (await replies_of(call))[0].HasField("placed")
        assert len(fleet.frontend._models["tiny"].lookaside) == 2  # still good


async def test_the_end_of_the_clients_stream_gives_back_what_was_not_used(world, monkeypatch):
    fleet, address = world
    monkeypatch.setattr(lookaside, "FRESH_S", 60.0)
    async with stream(address) as call:
        await call.write(asked(1))
        assert (await replies_of(call))[0].HasField("placed")
        assert not fleet.no_reservations()
    await fleet.until(fleet.no_reservations)


async def test_unused_tickets_of_a_tenant_are_bounded(world, monkeypatch):
    fleet, address = world
    monkeypatch.setattr(lookaside, "FRESH_S", 0.0)
    monkeypatch.setattr(lookaside, "MAX_UNREDEEMED", 3)
    tickets = fleet.frontend._models["tiny"].lookaside
    async with stream(address) as call:
        for number in range(3):
            await call.write(asked(number))
            assert (await replies_of(call))[0].HasField("placed")
            tickets.sweep()
        await call.write(asked(4))
        refused = from_failure((await replies_of(call))[0].failure)
    assert isinstance(refused, NoWorkerError)
    assert refused.retry_after_s == 1.0
    assert "are unused" in refused.message
    async with AsyncClient(address, lookaside=True) as client:  # goes through the router
        assert (await client.generate(token_ids=PROMPT, max_tokens=2)).token_ids == (0, 1)


async def test_a_slow_reader_gets_every_reply(world, monkeypatch):
    _, address = world
    monkeypatch.setattr(placements, "MAX_UNREAD_BYTES", 100)
    monkeypatch.setattr(lookaside, "MAX_UNREDEEMED", 0)
    async with stream(address) as call:
        for number in range(0, 64, 8):
            await call.write(asked(*range(number, number + 8)))
        await call.done_writing()
        seen = [reply.id async for message in call for reply in message.replies]
    assert seen == list(range(64))
