"""Placement tickets: router and SDK over real gRPC, decode workers without an engine."""

import asyncio
import time

import pytest

from diptych.client import AsyncClient, Client, RetryPolicy, StreamBrokenError
from diptych.client import lookaside as client_lookaside
from diptych.common.clock import FakeClock
from diptych.common.errors import (
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestCancelledError,
    RequestDeadlineError,
    WorkerLostError,
)
from diptych.common.secret import derive_key
from diptych.common.ticket import PURPOSE
from diptych.router.requests import lookaside

PROMPT = [1] * 40


@pytest.fixture
async def world(fleet):
    """(fleet, decode worker, client that goes directly)"""
    key = derive_key(fleet.secret, PURPOSE)
    await fleet.add("p0", "prefill")
    decode = await fleet.add("d0", ticket_key=key)
    await fleet.until_ready()
    await fleet.until(lambda: fleet.frontend._cluster.direct_endpoint(("d0", "i1")) is not None)
    async with fleet.served() as address, AsyncClient(address, lookaside=True, timeout_s=600.0) as client:
        yield fleet, decode, client


def relayed(fleet):
    """Requests that the router itself sent to decode."""
    return fleet.frontend.metrics.placements.labels("remote").value - tickets(fleet, "granted")


def tickets(fleet, outcome):
    return fleet.frontend.metrics.tickets.labels(outcome).value


async def test_the_answer_is_the_routers_own_and_the_router_never_sees_it(world):
    fleet, decode, client = world
    direct = await client.generate(token_ids=PROMPT, max_tokens=5, explain=True, request_id="mine")
    assert relayed(fleet) == 0
    async with AsyncClient(client.address) as other:
        routed = await other.generate(token_ids=PROMPT, max_tokens=5, explain=True)
    assert relayed(fleet) == 1
    assert (direct.token_ids, direct.text, direct.usage) == (routed.token_ids, routed.text, routed.usage)
    assert direct.finish_reason == routed.finish_reason
    facts = direct.explanation
    assert facts.decode == "d0"
    assert facts.kv_bytes == 4096
    assert [terms.chosen for terms in facts.placement] == [True]
    assert facts.notes[-1] == "decode's note"
    assert facts.ttft_s > 0
    await fleet.until(fleet.no_reservations)
    assert tickets(fleet, "finished") == 1
    assert (await fleet.frontend.explain("mine", "")).outcome == "finished"
    assert decode.submits[0].prompt_token_ids == decode.submits[1].prompt_token_ids


async def test_the_routers_metrics_and_explanations_cover_it(world):
    fleet, _, client = world
    answer = await client.generate(token_ids=PROMPT, max_tokens=5, request_id="mine")
    await client.generate(token_ids=PROMPT, max_tokens=5, request_id="mine too")  # prepared again
    await fleet.until(lambda: tickets(fleet, "finished") == 2)
    metrics = fleet.frontend.metrics
    value = metrics.registry.get_sample_value
    assert value("diptych_request_success_total", {"finished_reason": "length"}) == 2
    for name, count in {
        "time_to_first_token_seconds": 2,
        "inter_token_latency_seconds": 8,
        "e2e_request_latency_seconds": 2,
        "request_inference_time_seconds": 2,
        "placement_regret_seconds": 2,
        "predicted_ttft_error_seconds": 2,
    }.items():
        assert value(f"diptych_{name}_count") == count, name
    for name, total in {
        "generation_tokens": 10,
        "prompt_tokens": 80,
        "prompt_tokens_cached": 32,
        "predicted_cached_tokens_error": 32,
        "kv_transfer_bytes": 8192,
    }.items():
        assert value(f"diptych_{name}_total") == total, name
    assert sum(point["finished"] for point in fleet.frontend.status("")["series"]) == 2
    for name in ("mine", "mine too", answer.request_id):
        reported = await fleet.frontend.explain(name, "")
        assert reported.outcome == "finished"
        assert reported.explanation.ttft_s > 0
        assert reported.explanation.cached_tokens == 16
        assert reported.explanation.kv_bytes == 4096


async def test_what_fails_there_is_counted_once(world):
    fleet, decode, client = world
    value = fleet.frontend.metrics.registry.get_sample_value
    decode.refuse = WorkerLostError("lost")
    with pytest.raises(WorkerLostError):
        await client.generate(token_ids=PROMPT, max_tokens=5)  # the router tried it, too
    await fleet.until(lambda: tickets(fleet, "failed") == 1)
    assert value("diptych_request_errors_total", {"reason": "WORKER_LOST"}) == 1
    decode.refuse = InvalidRequestError("bad", param="x")
    with pytest.raises(InvalidRequestError):
        await client.generate(token_ids=PROMPT, max_tokens=5)
    await fleet.until(lambda: tickets(fleet, "failed") == 2)
    assert value("diptych_request_errors_total", {"reason": "INVALID_ARGUMENT"}) == 1


async def test_no_explanation_unless_it_was_asked_for(world):
    _, _, client = world
    assert (await client.generate(token_ids=PROMPT, max_tokens=2)).explanation is None


async def test_a_request_like_one_before_is_checked_for_its_tokens_alone(world):
    fleet, decode, client = world
    for prompt in (PROMPT, [2] * 50, [3] * 20):
        answer = await client.generate(token_ids=prompt, max_tokens=3, temperature=0.5)
        assert answer.token_ids == (0, 1, 2)
        assert list(decode.submits[-1].prompt_token_ids) == prompt
    first, second, third = decode.submits
    assert len({submit.request_id for submit in decode.submits}) == 3
    assert len({submit.sampling.seed for submit in decode.submits}) == 3
    for submit in (second, third):
        submit.sampling.seed = first.sampling.seed
        assert submit.sampling == first.sampling
    for seed in (5, 5, 6):
        await client.generate(token_ids=PROMPT, max_tokens=3, temperature=0.5, seed=seed)
        assert decode.submits[-1].sampling.seed == seed
    for wrong, param in (([64], "token_ids"), ([], "token_ids"), ([1] * 300, "token_ids"), ([1] * 254, "max_tokens")):
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate(token_ids=wrong, max_tokens=3, temperature=0.5)
        assert caught.value.param == param
    assert relayed(fleet) == 0
    assert len(decode.submits) == 6
    await fleet.until(fleet.no_reservations)


async def test_many_at_once_share_two_streams(world):
    fleet, decode, client = world
    answers = await asyncio.gather(*(client.generate(prompt="w1 w2 w3", max_tokens=4) for _ in range(40)))
    assert {answer.token_ids for answer in answers} == {(0, 1, 2, 3)}
    assert relayed(fleet) == 0
    assert decode.num_client_streams == 1
    await fleet.until(fleet.no_reservations)


async def test_pending_placements_are_seen_until_the_end(world):
    fleet, decode, client = world
    decode.hold_from = 1
    stream = client.stream(token_ids=PROMPT, max_tokens=3)
    steps = aiter(stream)
    await anext(steps)
    reservations = fleet.frontend._cluster.reservations
    await fleet.until(lambda: reservations.tokens("p0") == 0)  # its first token was reported
    assert reservations.requests("d0") == 1
    decode.go.set()
    decode.hold_from = -1
    assert [delta.offset async for delta in steps] == [1, 2]
    await fleet.until(fleet.no_reservations)


async def test_leaving_cancels_on_decode(world):
    fleet, decode, client = world
    decode.hold_from = 2
    async with client.stream(token_ids=PROMPT, max_tokens=5) as stream:
        async for delta in stream:
            if delta.offset == 1:
                break
    await fleet.cancelled(decode)
    assert decode.cancels == [decode.submits[0].attempt]


async def test_closing_elsewhere_ends_the_reader_typed(world):
    fleet, decode, client = world
    decode.go.clear()
    stream = client.stream(token_ids=PROMPT, max_tokens=5)

    async def read():
        async for _ in stream:
            pass

    reading = asyncio.create_task(read())
    await fleet.until(lambda: decode.submits)
    await stream.aclose()
    with pytest.raises(RequestCancelledError):
        await reading


async def test_the_deadline_holds(world):
    fleet, decode, client = world
    decode.go.clear()
    with pytest.raises(RequestDeadlineError):
        await client.generate(token_ids=PROMPT, max_tokens=5, timeout_s=0.3)
    await fleet.cancelled(decode)


async def test_a_bad_value_is_reported_as_it_is(world):
    fleet, _, client = world
    with pytest.raises(InvalidRequestError) as caught:
        await client.generate(token_ids=PROMPT, max_tokens=5, top_p=7.0)
    assert caught.value.param == "top_p"
    with pytest.raises(InvalidRequestError):
        await client.generate(token_ids=[-1 % 2**32], max_tokens=5)
    assert (await client.generate(token_ids=PROMPT, max_tokens=2)).token_ids == (0, 1)  # the stream stands


async def test_a_refused_ticket_goes_through_the_router(world):
    fleet, decode, client = world
    decode.ticket_epoch = 7  # the router has not been notified
    assert (await client.generate(token_ids=PROMPT, max_tokens=3)).token_ids == (0, 1, 2)
    assert relayed(fleet) == 1


async def test_what_the_router_must_see_goes_through_it(world):
    fleet, _, client = world
    assert (await client.generate(token_ids=PROMPT, max_tokens=2, idempotency_key="k")).token_ids == (0, 1)
    assert relayed(fleet) == 1
    assert tickets(fleet, "granted") == 0


async def test_the_seed_is_reported_on_every_path_of_the_answer(world):
    fleet, decode, client = world
    direct = await client.generate(token_ids=PROMPT, max_tokens=2)
    assert direct.seed == decode.submits[0].sampling.seed
    assert relayed(fleet) == 0


async def test_no_direct_endpoint_no_ticket(fleet):
    await fleet.add("p0", "prefill")
    await fleet.add("d0")
    await fleet.until_ready()
    async with fleet.served() as address, AsyncClient(address, lookaside=True) as client:
        assert (await client.generate(token_ids=PROMPT, max_tokens=3)).token_ids == (0, 1, 2)
    assert relayed(fleet) == 1
    assert tickets(fleet, "granted") == 0
    assert fleet.no_reservations()


async def test_a_broken_direct_stream_is_resumed_through_the_router(world):
    fleet, decode, client = world
    decode.hold_from = 2
    seen = []
    async for delta in client.stream(token_ids=PROMPT, max_tokens=5, temperature=1.0):
        seen.append((delta.offset, delta.token_ids, delta.text))
        if delta.offset == 1:
            decode.hold_from = -1
            decode.break_clients()
            decode.go.set()
    assert [token for _, ids, _ in seen for token in ids] == list(range(5))
    assert "".join(text for _, _, text in seen) == "t0 t1 t2 t3 t4 "
    assert relayed(fleet) == 1
    first, second = decode.submits
    assert first.sampling.seed == second.sampling.seed
    await fleet.until(fleet.no_reservations)


async def test_a_resumed_answer_must_be_the_same(world):
    _, decode, client = world
    decode.hold_from = 2

    async def read():
        async for delta in client.stream(token_ids=PROMPT, max_tokens=5):
            if delta.offset == 1:
                decode.first_token = 3
                decode.hold_from = -1
                decode.break_clients()
                decode.go.set()

    with pytest.raises(StreamBrokenError, match="differs from the first one"):
        await read()


async def test_the_failure_policy_fail_is_kept(world):
    _, decode, client = world
    decode.refuse = WorkerLostError("lost")
    with pytest.raises(WorkerLostError):
        await client.generate(token_ids=PROMPT, max_tokens=5, failure_policy="fail")


async def test_overload_on_decode_is_placed_again_by_the_router(world):
    fleet, decode, client = world
    decode.refuse = OverloadedError("full", retry_after_s=1.0)
    with pytest.raises(OverloadedError):
        await client.generate(token_ids=PROMPT, max_tokens=5)
    assert relayed(fleet) >= 1


async def test_no_worker_is_the_routers_own_word(fleet):
    async with (
        fleet.served() as address,
        AsyncClient(address, lookaside=True, retry=RetryPolicy(max_tries=1)) as client,
    ):
        with pytest.raises(NoWorkerError):
            await client.generate(token_ids=PROMPT, max_tokens=5)


async def test_the_placement_stream_is_opened_again(world):
    fleet, _, client = world
    await client.generate(token_ids=PROMPT, max_tokens=2)
    stream = client._lookaside._placer._call
    stream.cancel()
    await fleet.until(lambda: client._lookaside._placer._call is not stream)
    await client.generate(token_ids=PROMPT, max_tokens=2)
    assert relayed(fleet) == 0


async def test_an_impatient_client_asks_the_router_for_all(world, monkeypatch):
    fleet, _, client = world
    monkeypatch.setattr(client_lookaside, "PLACE_PATIENCE_S", 0.05)
    asks_for_all = asyncio.Event()
    prepare, routed = fleet.frontend.prepare, client_lookaside.RoutedAnswer.__init__

    async def slow(spec):
        # To be placed. On a slow machine the client's patience may end before this is asked for.
        if not asks_for_all.is_set():
            await asyncio.Event().wait()
        return await prepare(spec)

    def told(*args):
        asks_for_all.set()
        routed(*args)

    monkeypatch.setattr(fleet.frontend, "prepare", slow)
    monkeypatch.setattr(client_lookaside.RoutedAnswer, "__init__", told)
    assert (await client.generate(prompt="w1 w2", max_tokens=2)).token_ids == (0, 1)
    assert relayed(fleet) == 1


async def test_an_unused_ticket_lapses(world):
    fleet, decode, client = world
    clock = FakeClock(time.monotonic())
    fleet.frontend._models["tiny"].lookaside._clock = clock
    from diptych.client import wire
    from diptych.rpc.v1 import router_pb2

    request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIdsInput(token_ids=PROMPT))
    place = client._connected(client.address).unary_unary(
        wire.SERVICE + "Place",
        request_serializer=router_pb2.PlaceRequest.SerializeToString,
        response_deserializer=router_pb2.Placed.FromString,
    )
    placed = await place(router_pb2.PlaceRequest(request=request), timeout=300.0)
    assert placed.address == decode.client_address
    assert not fleet.no_reservations()
    clock.advance(lookaside.UNREDEEMED_S + 1.0)
    await fleet.until(fleet.no_reservations)
    await fleet.until(lambda: tickets(fleet, "lapsed") == 1)


async def test_a_dead_worker_holds_nothing(world):
    fleet, decode, client = world
    decode.hold_from = 1
    stream = client.stream(token_ids=PROMPT, max_tokens=3)
    steps = aiter(stream)
    await anext(steps)
    await decode.kill()
    with pytest.raises((NoWorkerError, WorkerLostError)):
        await anext(steps)
    await fleet.until(fleet.no_reservations)


async def test_the_sync_client_goes_the_same_way(world):
    fleet, _, client = world

    def ask():
        with Client(client.address, lookaside=True) as sync:
            with sync.stream(token_ids=PROMPT, max_tokens=4) as stream:
                deltas = [delta.token_ids for delta in stream]
            one = sync.generate(token_ids=PROMPT, max_tokens=2)
            for _ in sync.stream(token_ids=PROMPT, max_tokens=100):
                break  # leaves in the middle
            with pytest.raises(InvalidRequestError):
                sync.generate(token_ids=PROMPT, max_tokens=2, top_p=9.0)
            return deltas, stream.result, one

    deltas, whole, one = await asyncio.to_thread(ask)
    assert deltas == [(0,), (1,), (2,), (3,)]
    assert whole.text == "t0 t1 t2 t3 "
    assert one.token_ids == (0, 1)
    assert relayed(fleet) == 0
    await fleet.until(fleet.no_reservations)
