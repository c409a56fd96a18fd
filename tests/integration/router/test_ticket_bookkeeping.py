"""What becomes of placement tickets: each has one end at the router, and what its answer cost is charged, whenever and in which
messages decode reports it."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import OverloadedError, RequestCancelledError
from diptych.common.ids import new_request_id
from diptych.common.secret import derive_key
from diptych.common.ticket import PURPOSE
from diptych.decode.ticket_verifier import EPOCH_S
from diptych.router.requests.lookaside import FRESH_S, LATE_S, SILENT_S, UNREDEEMED_S
from diptych.router.requests.messages import UncheckedRequest
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2

PROMPT_TOKENS = 40
VALID_S = 2 * EPOCH_S
"""Decode accepts a ticket for at most as long."""


class Tickets:
    """A router's tickets on a clock that the test moves. Nothing here awaits, so nothing else of the router runs meanwhile."""

    def __init__(self, fleet, prepared) -> None:
        self.clock = FakeClock(time.monotonic())
        self.lookaside = fleet.frontend._models["tiny"].lookaside
        self.lookaside._clock = self.clock
        self.reservations = fleet.frontend._cluster.reservations
        self._fleet, self._prepared = fleet, prepared
        self.spent = Counter[str]()

    def place(self, tenant="acme", timeout_s=600.0) -> str:
        now = self.clock.now()
        request = replace(
            self._prepared, request_id=new_request_id(), tenant=tenant, arrived=now, deadline=now + timeout_s
        )
        (placed,) = self._fleet.frontend.place([request], self._spend)
        assert isinstance(placed, router_pb2.Placed), placed
        return placed.attempt

    def _spend(self, tenant: str, tokens: int) -> None:
        self.spent[tenant] += tokens

    def outcomes(self) -> dict[str, int]:
        names = ("granted", "finished", "failed", "lapsed")
        return {name: int(self._fleet.frontend.metrics.tickets.labels(name).value) for name in names}

    def check(self) -> None:
        counts = self.outcomes()
        assert counts.pop("granted") == sum(counts.values()) + len(self.lookaside)
        unredeemed = Counter(grant.tenant for grant in self.lookaside._grants.values() if not grant.redeemed)
        assert self.lookaside._unredeemed == unredeemed
        assert len(self.reservations) <= len(self.lookaside)


@pytest.fixture
async def tickets(fleet):
    await fleet.add("p0", "prefill")
    await fleet.add("d0", ticket_key=derive_key(fleet.secret, PURPOSE))
    await fleet.until_ready()
    await fleet.until(lambda: fleet.frontend._cluster.direct_endpoint(("d0", "i1")) is not None)
    spec = UncheckedRequest(token_ids=[1] * PROMPT_TOKENS, sampling={"max_tokens": 5})
    return Tickets(fleet, await fleet.frontend.prepare(spec))


def last(attempt: str, tokens: int, reason: str = "") -> decode_pb2.TicketStatus:
    """The last status; `reason`: of a failure."""
    status = decode_pb2.TicketStatus(attempt=attempt, ended=True, completion_tokens=tokens, reason=reason)
    if not reason:
        usage = types_pb2.Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=tokens)
        status.finished.CopyFrom(
            router_pb2.Finished(finish_reason=types_pb2.FINISH_REASON_LENGTH, usage=usage),
        )
    return status


@pytest.mark.parametrize(
    ("timeout_s", "redeemed_s", "first_token_s", "end_s"),
    [
        pytest.param(600.0, 0.1, 120.0, 121.0, id="a first token after two minutes"),
        pytest.param(600.0, 59.0, 10.0, 599.0, id="redeemed at the last moment"),
        pytest.param(2.0, 30.0, 1.0, 1.9, id="redeemed after its deadline, to which decode runs it from then on"),
        pytest.param(2.0, 1.5, 1.0, 2.0, id="the last status a little after decode's deadline"),
    ],
)
async def test_an_answer_that_decode_gives_is_charged(tickets, timeout_s, redeemed_s, first_token_s, end_s):
    """Such tickets lapsed while their answers went on: their tokens counted in no limit, and nothing was reserved."""
    attempt = tickets.place(timeout_s=timeout_s)
    began = tickets.clock.now()

    def at(seconds: float) -> None:
        tickets.clock.advance(began + seconds - tickets.clock.now())
        tickets.lookaside.sweep()

    at(redeemed_s)
    tickets.lookaside.on_ticket_status(decode_pb2.TicketStatus(attempt=attempt, taken=True))
    at(redeemed_s + first_token_s)
    assert len(tickets.reservations) == 1
    tickets.lookaside.on_ticket_status(decode_pb2.TicketStatus(attempt=attempt, first_token=True))
    at(redeemed_s + end_s)
    tickets.lookaside.on_ticket_status(last(attempt, 5))
    assert tickets.spent == {"acme": 5}
    assert tickets.outcomes() == {"granted": 1, "finished": 1, "failed": 0, "lapsed": 0}
    assert len(tickets.reservations) == len(tickets.lookaside) == 0


@pytest.mark.parametrize("has_token", [False, True])
async def test_what_a_worker_reports_after_its_stream_broke_still_counts(tickets, fleet, monkeypatch, has_token):
    """Answers go on while the router's stream to decode is down; their tickets lapsed."""
    cluster = fleet.frontend._cluster
    attempt, unused = tickets.place(), tickets.place()
    first = decode_pb2.TicketStatus(attempt=attempt, taken=True, first_token=has_token)
    tickets.lookaside.on_ticket_status(first)
    loads = [(len(tickets.reservations), tickets.reservations.tokens("p0"), tickets.reservations.requests("d0"))]
    with monkeypatch.context() as down:
        down.setattr(cluster, "direct_endpoint", lambda incarnation: None)
        tickets.lookaside.sweep()
        tickets.clock.advance(0.9 * SILENT_S)
        tickets.lookaside.sweep()
        assert len(tickets.reservations) == 0
    tickets.lookaside.sweep()
    tickets.lookaside.on_ticket_status(first)
    held = PROMPT_TOKENS * (not has_token)
    loads.append((len(tickets.reservations), tickets.reservations.tokens("p0"), tickets.reservations.requests("d0")))
    assert loads == [(2, held + PROMPT_TOKENS, 2), (1, held, 1)]
    tickets.lookaside.on_ticket_status(last(attempt, 5))
    assert tickets.spent == {"acme": 5}
    assert tickets.outcomes() == {"granted": 2, "finished": 1, "failed": 0, "lapsed": 0}
    tickets.lookaside.on_ticket_status(last(unused, 3))
    assert tickets.spent == {"acme": 8}
    tickets.check()


@pytest.mark.parametrize("is_member", [False, True])
async def test_tickets_of_a_worker_that_does_not_come_back_lapse(tickets, fleet, monkeypatch, is_member):
    cluster = fleet.frontend._cluster
    attempt = tickets.place()
    tickets.lookaside.on_ticket_status(decode_pb2.TicketStatus(attempt=attempt, taken=True))
    monkeypatch.setattr(cluster, "direct_endpoint", lambda incarnation: None)
    monkeypatch.setattr(cluster, "is_member", lambda incarnation: is_member)
    tickets.lookaside.sweep()
    assert tickets.outcomes()["lapsed"] == (not is_member)
    tickets.clock.advance(SILENT_S + 1.0)
    tickets.lookaside.sweep()
    assert tickets.outcomes()["lapsed"] == 1
    assert len(tickets.reservations) == 0
    tickets.check()


async def test_a_first_token_counts_once(tickets, fleet):
    attempt = tickets.place()
    for _ in range(3):
        tickets.lookaside.on_ticket_status(decode_pb2.TicketStatus(attempt=attempt, first_token=True))
    tickets.lookaside.on_ticket_status(last(attempt, 5))
    value = fleet.frontend.metrics.registry.get_sample_value
    assert value("diptych_time_to_first_token_seconds_count") == 1
    assert value("diptych_prompt_tokens_total") == PROMPT_TOKENS


@dataclass
class Fate:
    """What becomes of one ticket. `statuses`: (seconds from its grant, status); none: it is never redeemed, or refused."""

    tenant: str
    timeout_s: float
    end: str
    tokens: int = 0
    statuses: list[tuple[float, decode_pb2.TicketStatus]] | None = None


def fate(rng: random.Random) -> Fate:
    end = rng.choice(["lapsed", "finished", "finished", "failed"])
    drawn = Fate(rng.choice(["acme", "other"]), rng.choice([0.5, 3.0, 70.0, 600.0]), end)
    if end == "lapsed":
        return drawn
    delay = rng.choice([0.0, 0.01, 0.9 * LATE_S])
    taken_s = rng.choice([0.01, 0.9 * FRESH_S, 2 * FRESH_S, rng.uniform(0.0, VALID_S)])
    end_s = taken_s + rng.choice([0.0, 1.0, rng.random()]) * drawn.timeout_s
    first_s = rng.choice([taken_s, end_s, rng.uniform(taken_s, end_s)])
    drawn.tokens = rng.choice([0, 1, 5]) if end == "failed" else rng.choice([1, 5])
    messages = [(taken_s, decode_pb2.TicketStatus(taken=True))]
    if drawn.tokens:
        messages.append((first_s, decode_pb2.TicketStatus(first_token=True, cached_tokens=16)))
    reason = rng.choice([OverloadedError.reason, RequestCancelledError.reason]) if end == "failed" else ""
    messages.append((end_s, last("", drawn.tokens, reason)))
    whole: list[tuple[float, decode_pb2.TicketStatus]] = []
    for at, status in messages:  # merged, as in an outbox whose router does not read for a while
        if whole and at - whole[-1][0] < 0.3 and rng.random() < 0.7:
            merged = decode_pb2.TicketStatus()
            merged.MergeFrom(whole.pop()[1])
            merged.MergeFrom(status)
            status = merged
        whole.append((at, status))
    if rng.random() < 0.3:
        whole.append(whole[-1])  # repeated after its end
    drawn.statuses = [(at + delay, status) for at, status in whole]
    return drawn


@pytest.mark.parametrize("seed", range(4))
async def test_each_ticket_has_one_end_and_nothing_stays_behind(tickets, seed):
    rng = random.Random(seed)
    fates = [fate(rng) for _ in range(120)]
    began = tickets.clock.now()
    todo = [(rng.uniform(0.0, 100.0), number, None) for number in range(len(fates))]
    attempts: dict[int, str] = {}
    while todo:
        todo.sort(key=lambda one: one[0])
        at, number, status = todo.pop(0)
        tickets.clock.advance(max(0.0, began + at - tickets.clock.now()))
        if rng.random() < 0.5:
            tickets.lookaside.sweep()
        if status is None:
            mine = fates[number]
            attempts[number] = tickets.place(mine.tenant, mine.timeout_s)
            todo += [(at + later, number, what) for later, what in mine.statuses or []]
        else:
            status.attempt = attempts[number]
            tickets.lookaside.on_ticket_status(status)
        if rng.random() < 0.1:
            tickets.lookaside.left(rng.sample(sorted(attempts.values()), k=min(5, len(attempts))))
        tickets.check()
    tickets.clock.advance(UNREDEEMED_S + 1.0)
    tickets.lookaside.sweep()
    ends = Counter(one.end for one in fates)
    assert tickets.outcomes() == {
        "granted": len(fates),
        **{name: ends[name] for name in ("finished", "failed", "lapsed")},
    }
    spent = Counter[str]()
    for one in fates:
        spent[one.tenant] += one.tokens
    assert tickets.spent == spent
    assert len(tickets.lookaside) == len(tickets.reservations) == 0
    assert not tickets.lookaside._unredeemed
    assert not tickets.lookaside._fresh
