"""The SDK with the addresses of two routers, of which the first one dies."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from diptych.client import AsyncClient, Client
from diptych.client.routers import Routers
from diptych.common.errors import InvalidRequestError
from diptych.common.secret import derive_key
from diptych.common.ticket import PURPOSE
from diptych.router.server import ApiServers
from diptych_tests import waiting
from diptych_tests.router_fleet import other_router, running

NUM_TOKENS, AT = 8, 3
WORDS = "".join(f"t{i} " for i in range(NUM_TOKENS))


@asynccontextmanager
async def served(frontend):
    servers = ApiServers("127.0.0.1", 0, 0)
    try:
        at = await servers.start(frontend, frontend.metrics)
        await waiting.until(lambda: servers._health.serving)
        yield servers, at.grpc
    finally:
        await servers.stop(0.1)


async def die(frontend, servers):
    """As a killed process: no word to workers or clients."""
    for member in frontend._cluster._members.all():
        if member.link.decode is not None:
            await member.link.decode.close("killed")
    await servers._grpc.stop(None)


@pytest.fixture
async def two(model_folder, tmp_path):
    """(the fleet, its worker, the first router's servers, the second router, both addresses)"""
    async with running(model_folder, tmp_path, dead_s=60.0) as fleet:
        await fleet.add("p0", "prefill")
        key = derive_key(fleet.secret, PURPOSE)
        worker = await fleet.add("d0", ticket_key=key, request_fields=("resume",))
        await fleet.until_ready()
        async with (
            served(fleet.frontend) as (servers, first),
            other_router(fleet) as frontend,
            served(frontend) as (_, second),
        ):
            yield fleet, worker, servers, frontend, [first, second]


@pytest.mark.parametrize("kept", [True, False], ids=["attached", "continued"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_goes_on_at_the_other_router(two, n, kept) -> None:
    fleet, worker, servers, frontend, addresses = two
    worker.hold_from, worker.forgets = AT, not kept
    async with AsyncClient(addresses) as client:
        stream = client.stream(token_ids=[1] * 20, max_tokens=NUM_TOKENS, n=n)
        seen = []
        async for delta in stream:
            seen.append(delta)
            if sum(len(one.token_ids) for one in seen) == AT * n:
                break_ = asyncio.create_task(die(fleet.frontend, servers))
                worker.hold_from = -1
                worker.go.set()
        await break_
        assert client.address == addresses[1]
        result = stream.result
        assert result.usage.completion_tokens == NUM_TOKENS * n
        for choice in range(n):
            mine = [one for one in seen if one.choice == choice]
            assert [token for one in mine for token in one.token_ids] == [10 * choice + i for i in range(NUM_TOKENS)]
            assert "".join(one.text for one in mine) == "".join(
                f"{f'c{choice}' if choice else ''}t{i} " for i in range(NUM_TOKENS)
            )
        outputs = [list(submit.output_token_ids) for submit in worker.submits]
        assert outputs[0] == []
        if kept:
            assert len(outputs) == 1
        elif n == 1:
            assert outputs[1] == [0, 1, 2], "from its tokens"
        else:
            assert outputs[1] == [], "computed again"
        # and the next call goes there at once
        assert (await client.generate(token_ids=[1] * 20, max_tokens=2)).text == "t0 t1 "


async def test_the_sync_client_goes_on_too(two) -> None:
    fleet, worker, servers, _, addresses = two
    worker.hold_from = AT
    reached, seen = threading.Event(), []

    def read():
        with Client(addresses) as client:
            stream = client.stream(token_ids=[1] * 20, max_tokens=NUM_TOKENS)
            for delta in stream:
                seen.append(delta)
                if sum(len(one.token_ids) for one in seen) == AT:
                    reached.set()
            return stream.result, client.address, client.list_models()

    reading = asyncio.create_task(asyncio.to_thread(read))
    assert await asyncio.to_thread(reached.wait, 60)
    await die(fleet.frontend, servers)
    worker.go.set()
    result, address, models = await reading
    assert result.text == WORDS
    assert address == addresses[1]
    assert len(models) == 1
    assert len(worker.submits) == 1


async def test_a_lookaside_stream_does_not_notice(two) -> None:
    fleet, worker, servers, _, addresses = two
    worker.hold_from = AT
    async with AsyncClient(addresses, lookaside=True) as client:
        stream = client.stream(token_ids=[1] * 20, max_tokens=NUM_TOKENS)
        text = ""
        async for delta in stream:
            text += delta.text
            if text == "t0 t1 t2 ":
                await die(fleet.frontend, servers)
                worker.go.set()
        assert text == WORDS
        assert worker.num_client_streams == 1
        assert not worker.resumes
        assert len(worker.submits) == 1
        assert (await client.generate(token_ids=[1] * 20, max_tokens=2)).text == "t0 t1 "
        assert client.address == addresses[1]
        assert len(worker.submits) == 2


async def test_a_router_that_does_not_serve_is_passed_by(two) -> None:
    """Of three, the first one is not there and the second one reports that it cannot serve."""
    fleet, worker, servers, _, addresses = two
    await servers._health.leave()
    async with AsyncClient(["127.0.0.1:1", *addresses]) as client:
        assert (await client.generate(token_ids=[1] * 20, max_tokens=2)).text == "t0 t1 "
        assert client.address == addresses[1]


async def test_one_address_resumes_only_where_asked(two) -> None:
    fleet, worker, servers, _, addresses = two
    worker.hold_from = AT
    async with AsyncClient(addresses[0]) as client:
        assert not client.stream(token_ids=[1])._resume
        assert client.stream(token_ids=[1], resume=True)._resume
    async with AsyncClient(addresses) as client:
        assert client.stream(token_ids=[1])._resume
        assert not client.stream(token_ids=[1], resume=False)._resume


def test_addresses() -> None:
    routers = Routers(["a:1", "b:1", "a:1", "c:1"])
    assert routers.addresses == ("a:1", "b:1", "c:1")
    assert routers.in_order("b:1") == ("c:1", "a:1", "b:1")
    routers.use("b:1", "c:1")  # by another call, which used it before
    assert routers.current == "a:1"
    routers.use("a:1", "c:1")
    assert routers.current == "c:1"
    for wrong in ((), [""], [1]):
        with pytest.raises(InvalidRequestError, match="address"):
            Routers(wrong)
