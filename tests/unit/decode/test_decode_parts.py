"""Coverage, link rates, life cycle and outbox."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.common.errors import OverloadedError, TransferError
from diptych.decode.lifecycle import AttemptLifecycle, State
from diptych.decode.outbox import Outbox
from diptych.engine.messages import TokensOut
from diptych.rpc.v1 import decode_pb2
from diptych.worker.reads.coverage import Coverage
from diptych.worker.reads.link_rate import LinkRates


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 10), st.randoms())
def test_coverage_is_complete_after_the_last_range_in_any_order(sizes: list[int], first: int, rng) -> None:
    ranges, position = [], first
    for size in sizes:
        ranges.append((position, size))
        position += size
    coverage = Coverage(first, position)
    rng.shuffle(ranges)
    for start, size in ranges:
        assert not coverage.complete
        coverage.add(start, size)
    assert coverage.complete
    assert coverage.num_ranges == len(sizes)


@pytest.mark.parametrize(("first", "num"), [(0, 16), (16, 0), (90, 16), (40, 8), (20, 60)])
def test_coverage_refuses_what_is_outside_empty_or_twice(first: int, num: int) -> None:
    coverage = Coverage(16, 100)
    coverage.add(32, 16)
    with pytest.raises(TransferError):
        coverage.add(first, num)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 10), st.randoms())
def test_coverage_counts_layers(num_layers: int, num_tokens: int, first: int, rng) -> None:
    cut = first + rng.randint(1, num_tokens)
    whole = [(first, cut - first, 0, num_layers)] if cut > first else []
    rest = [(cut, first + num_tokens - cut, layer, 1) for layer in range(num_layers) if cut < first + num_tokens]
    ranges = [*whole, *rest]
    rng.shuffle(ranges)
    coverage = Coverage(first, first + num_tokens, num_layers)
    for one in ranges:
        assert not coverage.complete
        coverage.add(*one)
        with pytest.raises(TransferError, match="overlaps"):
            coverage.add(*one)
    assert coverage.complete


@pytest.mark.parametrize(("low", "num"), [(0, 0), (-1, 2), (3, 2), (4, 1), (1, 2), (0, 4)])
def test_coverage_refuses_layers_outside_empty_or_twice(low: int, num: int) -> None:
    coverage = Coverage(0, 32, num_layers=4)
    coverage.add(0, 16, 1, 2)
    coverage.add(0, 16, 0, 1)
    with pytest.raises(TransferError):
        coverage.add(0, 16, low, num)


def test_what_a_link_does_is_measured_over_reads_that_overlap() -> None:
    rates = LinkRates(window_bytes=4_000_000)
    rates.began("p0", 0.0)
    rates.ended("p0", 1_000, 0.9)
    assert rates.link("p0") == 0.0, "the first one connects"
    rates.began("p0", 1.0)
    rates.began("p0", 1.0)
    rates.began("p1", 1.0)
    rates.ended("p0", 4_000_000, 2.0)
    assert rates.link("p0") == 0.0, "the burst is not over"
    rates.ended("p0", 4_000_000, 2.0)
    assert rates.link("p0") == 8_000_000.0, "not the four million of each read"
    rates.began("p0", 5.0)
    rates.ended("p0", 0, 9.0)
    assert rates.link("p0") == 8_000_000.0, "a read that failed says nothing"
    rates.began("p0", 10.0)
    rates.ended("p0", 4_000_000, 11.0)
    assert rates.link("p0") == 6_000_000.0
    assert rates.link("p1") == 0.0


def test_link_rates_follow_the_readings_and_bound_the_deadline() -> None:
    rates = LinkRates(window_bytes=4_000_000, floor_bytes_per_s=1e6)
    assert rates.read_deadline_s("p0", 1_000_000, base_s=3.0) == 7.0
    rates.observe("p0", 1, 0.0, 1.0)  # connects
    rates.observe("p0", 8_000_000, 1.0, 2.0)
    rates.observe("p0", 4_000_000, 2.0, 3.0)
    rates.observe("p0", 0, 3.0, 4.0)
    assert rates.snapshot() == {"p0": 6_000_000.0}
    assert rates.read_deadline_s("p0", 6_000_000, base_s=3.0) == 7.0


def test_a_read_that_connects_and_small_reads_do_not_set_the_rate() -> None:
    """On a new cluster a link of 2 GB/s was reported at 5 MB/s, from one small read that also connected."""
    rates = LinkRates()
    rates.observe("p0", 200_000, began=0.0, now=0.04)
    rates.observe("p0", 200_000, began=0.01, now=0.05)  # waited for the same connection
    assert rates.snapshot() == {}, "not measured"
    assert rates.read_deadline_s("p0", 1_000_000, base_s=3.0) == 7.0, "at the lenient minimum until then"
    rates.observe("p0", 10_000, began=1.0, now=1.002)
    rates.observe("p0", 4_000_000, began=2.0, now=2.002)
    assert rates.snapshot()["p0"] == pytest.approx(2e9, rel=0.01)
    for i in range(10):
        rates.observe("p0", 10_000, began=3.0 + i, now=3.002 + i)
    assert rates.snapshot()["p0"] == pytest.approx(2e9, rel=0.05), "their fixed cost is no rate"
    rates.observe("p0", 16 << 20, began=20.0, now=20.16)
    assert rates.snapshot()["p0"] < 0.6e9, "a slower link is soon seen"


def test_an_illegal_move_names_the_moves_before_it() -> None:
    life = AttemptLifecycle("a")
    life.move(State.FETCHING)
    life.move(State.ENDED)
    with pytest.raises(RuntimeError, match="a: admitting -> fetching -> ended cannot go to decoding"):
        life.move(State.DECODING)


async def test_outbox_merges_what_waits_and_keeps_the_order() -> None:
    outbox = Outbox()
    outbox.accepted("a")
    outbox.tokens(TokensOut("a", 0, (1,), "x"))
    outbox.tokens(TokensOut("b", 4, (7,), "q"))
    outbox.tokens(TokensOut("a", 1, (2, 3), "yz"))
    outbox.end("b", decode_pb2.End())
    batch = await outbox.next_batch()
    assert batch is not None
    kinds = [(event.attempt, event.WhichOneof("event")) for event in batch.events]
    assert kinds == [("a", "accepted"), ("a", "tokens"), ("b", "tokens"), ("b", "end")]
    assert list(batch.events[1].tokens.token_ids) == [1, 2, 3]
    assert batch.events[1].tokens.text == "xyz"
    outbox.tokens(TokensOut("a", 3, (4,), ""))
    outbox.close()
    batch = await outbox.next_batch()
    assert batch is not None
    assert batch.events[0].tokens.offset == 3, "a batch that left is not extended"
    assert await outbox.next_batch() is None


async def test_outbox_wakes_a_waiting_reader() -> None:
    outbox = Outbox()
    reader = asyncio.create_task(outbox.next_batch())
    await asyncio.sleep(0)
    outbox.accepted("a")
    batch = await reader
    assert batch is not None
    assert len(batch.events) == 1


async def test_outbox_is_bounded() -> None:
    reported: list[bool] = []
    outbox = Outbox(max_bytes=200, on_overflow=lambda: reported.append(True))
    for i in range(100):
        outbox.tokens(TokensOut("a", i, (1,), "text"))
    assert reported == [True]
    outbox.close()
    with pytest.raises(OverloadedError):
        await outbox.next_batch()


async def test_news_of_one_ticket_that_wait_come_as_one() -> None:
    outbox = Outbox()
    outbox.ticket_status(decode_pb2.TicketStatus(attempt="a", taken=True))
    outbox.ticket_status(decode_pb2.TicketStatus(attempt="b", taken=True))
    outbox.ticket_status(decode_pb2.TicketStatus(attempt="a", first_token=True))
    outbox.ticket_status(decode_pb2.TicketStatus(attempt="a", ended=True, completion_tokens=3))
    batch = await outbox.next_batch()
    whole = decode_pb2.TicketStatus(attempt="a", taken=True, first_token=True, ended=True, completion_tokens=3)
    assert list(batch.ticket_status) == [whole, decode_pb2.TicketStatus(attempt="b", taken=True)]
    outbox.ticket_status(decode_pb2.TicketStatus(attempt="b", first_token=True))
    batch = await outbox.next_batch()
    assert list(batch.ticket_status) == [decode_pb2.TicketStatus(attempt="b", first_token=True)]
