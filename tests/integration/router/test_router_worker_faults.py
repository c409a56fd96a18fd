"""Workers that fail, refuse, die, return or stop answering, behind the frontend over real gRPC."""

import asyncio

import pytest

from diptych.common.errors import (
    DiptychError,
    InternalError,
    InvalidRequestError,
    RequestDeadlineError,
    StaleReferenceError,
    WorkerLostError,
)
from diptych.router.requests.messages import StartedEvent, TokenEvent, UncheckedRequest
from diptych_tests.router_fleet import drain


async def test_a_decode_worker_that_fails_is_left_alone_and_comes_back(fleet):
    await fleet.add("p0", "prefill")
    workers = [await fleet.add(f"d{i}") for i in range(2)]
    await fleet.until_ready(decode=2)
    cluster = fleet.frontend._cluster
    workers[0].refuse = InternalError("broken")
    failures = 0
    for _ in range(40):
        try:
            await fleet.ask()
        except InternalError:
            failures += 1
    assert failures == 5
    assert "excluded" in cluster.snapshot().unusable["d0"]
    workers[0].refuse = InvalidRequestError("the caller's fault")
    cluster.breakers._breakers["d0"].open_until = 0.0
    cluster._fleet_is_old = True
    assert not cluster.snapshot().unusable
    refused = 0
    while not refused:
        try:
            await fleet.ask()
        except InvalidRequestError:  # an inconclusive probe
            refused += 1
    workers[0].refuse = None
    for _ in range(20):
        await fleet.ask()
    assert cluster.breakers.num_out(0.0) == 0


async def test_worker_killed_in_mid_stream_is_a_typed_error(fleet):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    await fleet.until_ready()
    decode.hold_from = 1  # the answer cannot be over before the kill
    prepared = await fleet.frontend.prepare(UncheckedRequest(token_ids=[1] * 20, sampling={"max_tokens": 200}))
    events = fleet.frontend.generate(prepared)
    assert isinstance(await anext(events), StartedEvent)
    assert isinstance(await anext(events), TokenEvent)
    await decode.kill()
    with pytest.raises(WorkerLostError):
        await asyncio.wait_for(drain(events), 60)
    assert fleet.no_reservations()
    await fleet.until(lambda: not fleet.frontend._cluster.snapshot().decode)


async def test_worker_killed_before_a_token_is_replaced(fleet):
    await fleet.add("p0", "prefill")
    first = await fleet.add("d0")
    await fleet.until_ready()
    first.go.clear()
    prepared = await fleet.frontend.prepare(
        UncheckedRequest(token_ids=[1] * 20, sampling={"max_tokens": 2}, explain=True)
    )
    events = fleet.frontend.generate(prepared)
    assert isinstance(await anext(events), StartedEvent)
    second = await fleet.add("d1")
    await fleet.until_ready(decode=2)
    await first.kill()
    rest = [event async for event in events]
    assert not any(isinstance(event, StartedEvent) for event in rest)
    assert rest[-1].explanation.decode == "d1"
    assert rest[-1].explanation.notes == ["decode d0 WORKER_LOST: placed again", "decode's note"]
    assert len(second.submits) == 1


async def test_stale_refusal_is_placed_again_once_and_then_typed(fleet):
    await fleet.add("p0", "prefill")
    workers = [await fleet.add(f"d{i}") for i in range(3)]
    await fleet.until_ready(decode=3)
    for worker in workers:
        worker.refuse = StaleReferenceError("another life")
    with pytest.raises(StaleReferenceError):
        await fleet.ask()
    assert sum(len(worker.submits) for worker in workers) == 2
    with pytest.raises(StaleReferenceError):
        await fleet.ask(failure_policy="fail")
    assert sum(len(worker.submits) for worker in workers) == 3


async def test_leaving_the_iterator_cancels_on_decode(fleet):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    await fleet.until_ready()
    decode.hold_from = 1
    events = fleet.frontend.generate(
        await fleet.frontend.prepare(UncheckedRequest(token_ids=[1] * 20, sampling={"max_tokens": 200}))
    )
    await anext(events)
    await anext(events)
    await events.aclose()
    await fleet.cancelled(decode)
    assert decode.cancels == [decode.submits[0].attempt]
    assert fleet.no_reservations()
    assert fleet.frontend.metrics.value("num_requests_running") == 0.0


async def test_a_hole_in_the_tokens_stops_the_answer(fleet):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    decode.skip_offset = 1
    await fleet.until_ready()
    with pytest.raises(InternalError, match="protocol"):
        await fleet.ask()


async def test_deadline_before_accepted(fleet):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    decode.accept.clear()
    await fleet.until_ready()
    with pytest.raises(RequestDeadlineError):
        await fleet.ask(timeout_s=0.1)
    await fleet.cancelled(decode)


async def test_failures_of_decode_keep_their_type(fleet):
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    decode.refuse = InvalidRequestError("no", param="stop")
    await fleet.until_ready()
    with pytest.raises(InvalidRequestError) as caught:
        await fleet.ask()
    assert caught.value.param == "stop"


async def test_restarted_worker_takes_over(fleet):
    await fleet.add("p0", "prefill")
    await fleet.add("d0")
    await fleet.until_ready()
    again = await fleet.add("d0", incarnation="i2")
    await fleet.until(lambda: [w.record.incarnation for w in fleet.frontend._cluster.snapshot().decode] == ["i2"])
    await fleet.ask()
    assert len(again.submits) == 1


async def test_prefill_gone_is_local_and_said(fleet):
    prefill = await fleet.add("p0", "prefill")
    decode = await fleet.add("d0")
    await fleet.until_ready()
    assert fleet.frontend.ready()[0]
    await prefill.kill()
    await fleet.until(lambda: not fleet.frontend._cluster.snapshot().prefill)
    finished = (await fleet.ask())[-1]
    assert decode.submits[-1].placement.local_prefill
    assert "no usable prefill worker: local prefill" in finished.explanation.notes
    assert fleet.frontend.ready()[0]
    with pytest.raises(DiptychError, match="no usable prefill worker"):
        await fleet.ask(failure_policy="fail")
