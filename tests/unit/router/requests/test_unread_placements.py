"""A stream of placements whose client does not read: what waits for it stays bounded, and the stream ends typed."""

import asyncio

import grpc
import pytest

from diptych.router.api.fake import FakeRouterApi
from diptych.router.requests import placements
from diptych.router.requests.placements import serve_placements
from diptych.rpc.v1 import router_pb2

PLACES = 16


class Context:
    """Context of a call whose writes end when `read` is set."""

    def __init__(self):
        self.read = asyncio.Event()
        self.written = []
        self.code = None

    async def write(self, message):
        await self.read.wait()
        self.written.append(message)

    async def abort(self, code, details, trailers):
        self.code = code
        raise grpc.aio.AbortError


class Bodies:
    """Endless messages."""

    def __init__(self, most=10**6):
        self.most, self.taken = most, 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.taken == self.most:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        self.taken += 1
        asked = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIdsInput(token_ids=[1, 2, 3]))
        asked.sampling.max_tokens = 2
        first = PLACES * self.taken
        places = [router_pb2.PlaceRequest(id=first + i, request=asked) for i in range(PLACES)]
        return router_pb2.PlacementsRequest(places=places).SerializeToString()


class RouterApi(FakeRouterApi):
    given_back = 0

    def tickets_left(self, attempts):
        self.given_back += 1


def ids(context):
    replies = [router_pb2.PlacementsResponse.FromString(message).replies for message in context.written]
    return [reply.id for message in replies for reply in message]


async def test_nothing_more_is_taken_in_and_the_stream_ends_typed(monkeypatch):
    monkeypatch.setattr(placements, "MAX_UNREAD_BYTES", 5000)
    monkeypatch.setattr(placements, "UNREAD_S", 0.05)
    context, bodies, router_api = Context(), Bodies(), RouterApi([])
    with pytest.raises(grpc.aio.AbortError):
        await serve_placements(router_api, bodies, context)
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 2 < bodies.taken < 20
    assert router_api.given_back == 1


async def test_a_client_that_reads_late_gets_everything(monkeypatch):
    monkeypatch.setattr(placements, "MAX_UNREAD_BYTES", 5000)
    context, bodies = Context(), Bodies(most=200)
    serving = asyncio.create_task(serve_placements(RouterApi([]), bodies, context))
    for _ in range(500):
        await asyncio.sleep(0)
    assert 2 < bodies.taken < 20
    context.read.set()
    await asyncio.wait_for(serving, 60)
    assert ids(context) == list(range(PLACES, PLACES * 201))
