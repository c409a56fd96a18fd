"""A real decode worker's server for clients: tickets are verified, and routers are notified of their outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import ModuleType

import grpc
import pytest

from diptych.common.errors import ConfigError, StaleReferenceError, TicketRefusedError
from diptych.common.secret import derive_key, load_secret
from diptych.common.ticket import PURPOSE, seal
from diptych.rpc.channels import open_channel
from diptych.rpc.errors import from_failure
from diptych.rpc.stubs import DecodeStub, LookasideStub
from diptych.rpc.v1 import decode_pb2

OPEN = 1 << 30
"""Steps: more than any test takes."""
PROMPT = [(7 * i + 3) % 1000 for i in range(100)]


class Guest:
    """One client."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = LookasideStub(channel).Attach()
        self._events: dict[str, list[decode_pb2.Event]] = {}

    async def redeem(self, attempt: str, ticket: bytes, *, cancel_after_first: bool = False) -> list[decode_pb2.Event]:
        """The events of the attempt up to its end."""
        events = self._events.setdefault(attempt, [])
        redeem = decode_pb2.Redeem(attempt=attempt, ticket=ticket, remaining_s=600.0)
        await self._call.write(decode_pb2.TicketCommands(redeem=[redeem]))
        async with asyncio.timeout(300):
            while not events or not events[-1].HasField("end"):
                batch = await self._call.read()
                assert not batch.HasField("direct_endpoint")
                assert not batch.ticket_status
                for event in batch.events:
                    self._events[event.attempt].append(event)
                if cancel_after_first and events:
                    cancel_after_first = False
                    await self._call.write(decode_pb2.TicketCommands(cancel=[attempt]))
        return events

    def leave(self) -> None:
        self._call.cancel()


class Ear:
    """A router's stream on which nothing is submitted."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._call = DecodeStub(self._channel).Attach()
        self.door: decode_pb2.DirectEndpoint | None = None
        self.news: list[decode_pb2.TicketStatus] = []

    async def until(self, condition) -> None:
        async with asyncio.timeout(300):
            while not condition():
                batch = await self._call.read()
                if batch.HasField("direct_endpoint"):
                    self.door = batch.direct_endpoint
                self.news += batch.ticket_status

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


def words(events: list[decode_pb2.Event]) -> list[int]:
    return [token for event in events for token in event.tokens.token_ids]


def error_of(events: list[decode_pb2.Event]) -> Exception:
    return from_failure(events[-1].end.failure)


@pytest.fixture
async def place(pd: ModuleType) -> AsyncIterator[tuple[object, Ear, Guest, bytes]]:
    key = derive_key(load_secret(pd.SECRET_FILE), PURPOSE)
    config = {"client_port": 0}
    gate = pd.Gate(OPEN)
    async with pd.cluster(decode=lambda: pd.fake_model(before_execute=gate), decode_config=config) as cluster:
        cluster.gate = gate
        ear = Ear(pd.worker_channel(cluster.decode.address))
        await ear.until(lambda: ear.door is not None)
        assert ear.door is not None
        decode = cluster.decode.role.services["decode"]
        assert ear.door.address == decode.client_address != cluster.decode.address
        channel = open_channel(ear.door.address)
        guest = Guest(channel)
        yield cluster, ear, guest, key
        gate.open()
        guest.leave()
        await channel.close()
        await ear.close()
        await cluster.nothing_left()


def ticket_of(key: bytes, submit: decode_pb2.Submit, epoch: int = 1) -> bytes:
    return seal(key, decode_pb2.TicketClaims(submit=submit, epoch=epoch).SerializeToString())


async def test_a_ticket_is_as_good_as_a_routers_submit(pd, place):
    cluster, ear, guest, key = place
    async with pd.FakeRouter(cluster.decode.address) as router:
        expected = await router.run(cluster.submit_message(attempt="r", prompt=PROMPT))
    events = await guest.redeem("a", ticket_of(key, cluster.submit_message(attempt="a", prompt=PROMPT)))
    assert events[0].HasField("accepted")
    assert words(events) == expected.token_ids
    assert events[-1].end.finished.usage.completion_tokens == 8
    await ear.until(lambda: ear.news and ear.news[-1].ended)
    assert {news.attempt for news in ear.news} == {"a"}
    assert (ear.news[0].taken, ear.news[0].ended) == (True, False)
    reported = decode_pb2.TicketStatus()
    for news in ear.news:  # buffered messages are merged
        reported.MergeFrom(news)
    assert (reported.first_token, reported.completion_tokens, reported.reason) == (True, 8, "")
    assert reported.finished == events[-1].end.finished
    assert reported.finished.explanation.decode


async def test_refusals_are_typed_and_leave_the_stream_alone(pd, place):
    cluster, _, guest, key = place
    submit = cluster.submit_message(attempt="a", prompt=PROMPT)
    forged = await guest.redeem("a", ticket_of(bytes(32), submit))
    assert isinstance(error_of(forged), TicketRefusedError)
    guest._events.clear()
    old = await guest.redeem("a", ticket_of(key, submit, epoch=9))
    assert isinstance(error_of(old), TicketRefusedError)
    guest._events.clear()
    other = cluster.submit_message(attempt="a", prompt=PROMPT)
    other.placement.decode.worker_id = "decode-1"
    elsewhere = await guest.redeem("a", ticket_of(key, other))
    assert isinstance(error_of(elsewhere), StaleReferenceError)
    guest._events.clear()
    submit = cluster.submit_message(attempt="b", prompt=PROMPT)
    assert len(words(await guest.redeem("b", ticket_of(key, submit)))) == 8
    guest._events.clear()
    again = await guest.redeem("b", ticket_of(key, submit))
    assert isinstance(error_of(again), TicketRefusedError)


async def test_a_cancel_is_reported_to_routers_with_its_reason(pd, place):
    cluster, ear, guest, key = place
    submit = cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=400)
    cluster.gate.close(after=5)
    await guest.redeem("a", ticket_of(key, submit), cancel_after_first=True)
    await ear.until(lambda: ear.news and ear.news[-1].ended)
    assert ear.news[-1].reason == "CANCELLED"


async def test_a_router_whose_stream_broke_is_told_what_it_missed(pd, place):
    """What ended meanwhile, and what still runs."""
    cluster, ear, guest, key = place
    await ear.close()
    await guest.redeem("a", ticket_of(key, cluster.submit_message(attempt="a", prompt=PROMPT)))
    cluster.gate.close(after=5)
    submit = cluster.submit_message(attempt="b", prompt=PROMPT, max_tokens=400)
    running = asyncio.create_task(guest.redeem("b", ticket_of(key, submit)))
    again = Ear(pd.worker_channel(cluster.decode.address))
    await again.until(lambda: {news.attempt for news in again.news} == {"a", "b"})
    (missed,) = [news for news in again.news if news.attempt == "a"]
    assert (missed.taken, missed.first_token, missed.ended, missed.completion_tokens) == (True, True, True, 8)
    assert not any(news.ended for news in again.news if news.attempt == "b")
    guest.leave()
    await asyncio.gather(running, return_exceptions=True)
    await again.until(lambda: any(news.attempt == "b" and news.ended for news in again.news))
    await again.close()


async def test_a_client_that_goes_takes_its_requests_along(pd, place):
    cluster, ear, guest, key = place
    submit = cluster.submit_message(attempt="a", prompt=PROMPT, max_tokens=400)
    cluster.gate.close(after=5)
    task = asyncio.create_task(guest.redeem("a", ticket_of(key, submit)))
    await ear.until(lambda: any(news.first_token for news in ear.news))
    guest.leave()
    await asyncio.gather(task, return_exceptions=True)
    await ear.until(lambda: ear.news[-1].ended)
    assert ear.news[-1].reason == "CANCELLED"


async def test_the_direct_endpoint_serves_nothing_else(pd, place):
    _, ear, _, _ = place
    async with open_channel(ear.door.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await DecodeStub(channel).Attach().read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"client_port": 0, "secret_file": ""}, "secret_file"),
        ({"client_port": 70_000, "secret_file": "x"}, "client_port"),
        ({"client_port": 0, "secret_file": "x", "client_tls_cert": "c"}, "client_tls_key"),
        ({"client_port": 0, "secret_file": "x", "role": "prefill"}, "client_port"),
    ],
)
def test_settings_of_the_direct_endpoint_are_checked(pd, changes, field):
    role = changes.pop("role", "decode")
    with pytest.raises(ConfigError) as caught:
        pd.worker_config(role, "w", **changes)
    assert caught.value.field == field
