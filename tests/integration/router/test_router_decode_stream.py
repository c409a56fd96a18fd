"""The multiplexed stream over real gRPC on loopback."""

import asyncio

import pytest

from diptych.common.clock import FakeClock, MonotonicClock
from diptych.common.errors import OverloadedError, WorkerLostError
from diptych.common.tiers import LOWER_TIERS
from diptych.router.cluster.decode_stream import Attempt, DecodeStream
from diptych.router.cluster.fake_decode import FakeDecode
from diptych.router.cluster.token_pace import TokenPace
from diptych.router.cluster.worker_link import WorkerLink
from diptych.rpc.channels import open_channel
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2
from diptych_tests.records import worker_record
from diptych_tests.waiting import until


def submit(attempt, count=3):
    return decode_pb2.Submit(
        attempt=attempt, prompt_token_ids=[1], sampling=types_pb2.SamplingParams(max_tokens=count), remaining_s=600
    )


@pytest.fixture
async def worker():
    worker = await FakeDecode().start()
    yield worker
    await worker.kill()


@pytest.fixture
async def stream(worker):
    channel = open_channel(worker.address)
    stream = DecodeStream(channel, "d0", max_buffered_bytes=2000)
    stream.start()
    await until(lambda: stream.up)
    yield stream
    await stream.close()
    await channel.close()


async def read(attempt):
    events = []
    while not events or events[-1].WhichOneof("event") != "end":
        events.append(await attempt.next())
    return events


async def test_many_attempts_share_one_stream(worker, stream):
    attempts = [stream.open(submit(f"a{i}")) for i in range(20)]
    for answer in await asyncio.gather(*(read(attempt) for attempt in attempts)):
        assert answer[0].HasField("accepted")
        assert [i for event in answer[1:-1] for i in event.tokens.token_ids] == [0, 1, 2]
    assert (worker.num_streams, stream.num_attempts) == (1, 0)
    attempts[0].cancel()  # after the end: no message
    await read(stream.open(submit("last")))  # a cancel would have arrived before it
    assert worker.cancels == []


async def test_tokens_that_wait_are_merged(stream):
    attempt = stream.open(submit("a", 20))
    await until(lambda: attempt.over)
    accepted, tokens, end = await read(attempt)
    assert list(tokens.tokens.token_ids) == list(range(20))
    assert tokens.tokens.text.startswith("t0 t1 ")


async def test_a_reader_that_never_reads_is_cancelled(worker, stream):
    attempt = stream.open(submit("a", 100_000))
    async with asyncio.timeout(300):
        await worker.cancelled.wait()
    with pytest.raises(OverloadedError, match="too slowly"):
        await attempt.next()
    assert await read(stream.open(submit("b")))  # the others go on


async def test_a_broken_stream_fails_its_attempts_and_reconnects(worker, stream):
    worker.go.clear()
    attempt = stream.open(submit("a"))
    assert (await attempt.next()).HasField("accepted")
    port = int(worker.address.rpartition(":")[2])
    await worker.kill()
    with pytest.raises(WorkerLostError, match="d0 was lost"):
        async with asyncio.timeout(300):
            await attempt.next()
    await until(lambda: not stream.up)
    with pytest.raises(WorkerLostError, match="cannot be reached"):
        stream.open(submit("b"))
    await worker.start(port)
    await until(lambda: stream.up)
    assert await read(stream.open(submit("c")))
    assert stream.num_drops == 1


async def test_close_fails_what_runs(worker, stream):
    worker.go.clear()
    attempt = stream.open(submit("a"))
    await attempt.next()
    await stream.close("the router is stopping")
    with pytest.raises(WorkerLostError, match="the router is stopping"):
        await attempt.next()


async def test_tokens_after_the_first_are_due_together_under_load_and_ends_at_once():
    clock = FakeClock()
    pace = TokenPace()
    pace.on_wake()
    for _ in range(1000):  # the loop is busy
        pace.on_wake()
        pace.on_served(1.0)
    stream = DecodeStream(None, "d0", pace=pace, clock=clock)
    attempt = stream._attempts["a"] = Attempt(stream, "a", 10_000)

    def tell(**event):
        stream._deliver(decode_pb2.Event(attempt="a", **event))

    def tokens(offset):
        return router_pb2.TokenDelta(offset=offset, token_ids=[offset], text=f"{offset} ")

    tell(accepted=decode_pb2.Accepted())
    assert attempt.has_event
    await attempt.next()
    tell(tokens=tokens(0))
    assert (await attempt.next()).tokens.token_ids == [0]
    for offset in (1, 2, 3):
        tell(tokens=tokens(offset))
    assert not attempt.has_event
    stream._wake_late()
    assert (await attempt.next()).tokens.token_ids == [1, 2, 3]
    tell(tokens=tokens(4))
    assert not attempt.has_event
    tell(end=decode_pb2.End())
    assert (await attempt.next()).tokens.token_ids == [4]
    assert (await attempt.next()).HasField("end")
    stream._down("the test is over")


async def test_a_dump_of_a_tier_that_is_unknown_here_keeps_the_others(worker, monkeypatch):
    whole = worker.DumpBlocks

    async def with_tape(request, context):
        async for part in whole(request, context):
            part.tiers.add(tier="tape", sequence=9, block_keys=bytes(32))
            yield part

    monkeypatch.setattr(worker, "dump", (3, 5, (bytes(16),)))
    monkeypatch.setattr(FakeDecode, "DumpBlocks", lambda self, request, context: with_tape(request, context))
    record = worker_record("d0", address=worker.address)
    link = WorkerLink(record, receiving_s=MonotonicClock().now, probe_s=1.0, dead_s=1.0, on_change=lambda: None)
    try:
        dump = await link.dump_blocks()
    finally:
        await link.close("the test is over")
    assert dump.epoch == 3
    assert [(tier.sequence, list(tier.keys)) for tier in dump.tiers] == [
        (5, [bytes(16)]),
        *[(0, [])] * len(LOWER_TIERS),
    ]


@pytest.fixture
async def link(worker):
    """Its next probe is due in an hour."""
    record = worker_record("d0", address=worker.address)
    link = WorkerLink(record, receiving_s=MonotonicClock().now, probe_s=3600.0, dead_s=60.0, on_change=lambda: None)
    link.start()
    await until(lambda: not link.why_not())
    yield link
    await link.close("the test is over")


async def test_a_stream_that_broke_is_followed_by_a_probe(worker, link):
    await worker.kill()
    await until(lambda: link.refused)
    assert link.why_not() == "reports that it is not serving"


async def test_a_connection_that_was_only_reset_is_no_refusal(worker, link):
    stream = worker._routers[0]
    refusals = []
    link._on_change = lambda: refusals.append(link.refused)
    link.decode._down("reset by the test")
    await link.decode.close()
    assert stream not in worker._routers or worker.num_streams == 1
    link.decode.start()
    await until(lambda: not link.why_not())
    assert not any(refusals)
    assert refusals
