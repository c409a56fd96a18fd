"""The runner on a virtual clock: what it measures of a scripted target must be the script."""

from __future__ import annotations

import gc
import math

import msgspec
import pytest

from diptych.client.request_parts import add_message
from diptych.loadtest.figures.record import CountedBy, Outcome
from diptych.loadtest.figures.slo import parse_slo
from diptych.loadtest.figures.stats import Dist, summarise
from diptych.loadtest.runs.lag import LagReport, warnings_of
from diptych.loadtest.runs.runner import Runner
from diptych.loadtest.workloads import sizes
from diptych.loadtest.workloads.items import Message
from diptych.loadtest.workloads.prompts import TOOL_NAME
from diptych.loadtest.workloads.schedule import ClosedLoop, OpenLoop
from diptych.loadtest.workloads.workload import WorkloadSpec, generate
from diptych.router.tools.options import ChatMessage, template_messages
from diptych.rpc.v1 import router_pb2


def spec(**more) -> WorkloadSpec:
    return WorkloadSpec(**({"num_requests": 20, "output_len": sizes.fixed(34), "input_len": sizes.fixed(8)} | more))


@pytest.mark.parametrize("already", [True, False])
def test_what_is_exempt_from_garbage_collection_stays_so(scripted, virtual, monkeypatch, already):
    """Of the process that measures: each later collection of a test process walked all that it had loaded, for a second."""
    calls = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 7 if already else 0)
    for name in ("freeze", "disable", "unfreeze", "enable"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    virtual(Runner(scripted(), OpenLoop(10.0), seed=3).run(generate(spec(num_requests=1))))
    assert calls == ["freeze", "disable", *(() if already else ("unfreeze",)), "enable"]


@pytest.mark.parametrize("says", ["ids", "usage"])
def test_every_figure_is_the_scripts(scripted, virtual, says):
    target = scripted(says=says)
    result = virtual(
        Runner(target, OpenLoop(10.0), seed=3).run(generate(spec()), warmup=generate(spec(num_requests=2)))
    )
    summary = summarise(result.records, parse_slo("ttft:101,tpot:21"))
    assert (summary.completed, summary.failed, summary.warmup_requests) == (20, 0, 2)
    assert summary.ttft.median == pytest.approx(0.1, rel=0.001)
    assert summary.tpot.median == pytest.approx(0.02, rel=0.001)
    assert summary.itl.p99 == pytest.approx(0.02, rel=0.001 if says == "ids" else 0.2)
    assert summary.itl.mean == pytest.approx(0.02, rel=0.001)
    assert summary.itl.count == 20 * 33
    assert summary.chunk_gap.median == pytest.approx(0.08, rel=0.001)
    assert summary.e2e.median == pytest.approx(0.1 + 33 * 0.02, rel=0.001)
    assert summary.output_tokens == 20 * 34
    assert summary.slo_attainment == 1.0
    assert summary.goodput == pytest.approx(summary.request_rate)
    assert summary.counted_by == {says if says == "usage" else "token_ids": 20}
    assert result.lag.loop.high == 0.0


def test_chunks_are_counted_as_tokens_only_when_no_count_is_reported(scripted, virtual):
    result = virtual(Runner(scripted(says="nothing"), OpenLoop(10.0)).run(generate(spec(num_requests=1))))
    assert result.records[0].counted_by is CountedBy.CHUNKS


def test_open_loop_does_not_wait_for_a_slow_server(scripted, virtual):
    target = scripted(first_s=50.0)
    result = virtual(Runner(target, OpenLoop(10.0, math.inf)).run(generate(spec(output_len=sizes.fixed(1)))))
    assert target.peak == 20
    assert [record.sent_s for record in result.records] == pytest.approx([0.1 * i for i in range(20)])


def test_waiting_for_a_slot_counts_from_the_intended_time(scripted, virtual):
    """Coordinated omission: one at a time, 1 s each, intended every 0.1 s. The last one waited 18 s, which must be
    counted."""
    target = scripted(first_s=1.0)
    run = Runner(target, OpenLoop(10.0, math.inf, max_concurrency=1))
    result = virtual(run.run(generate(spec(output_len=sizes.fixed(1)))))
    assert target.peak == 1
    assert max(record.ttft_s for record in result.records) == pytest.approx(20.0 - 1.9)
    assert max(record.chunk_times[0] - record.sent_s for record in result.records) == pytest.approx(1.0)


def test_closed_loop_keeps_its_users_busy(scripted, virtual):
    target = scripted(first_s=1.0)
    result = virtual(Runner(target, ClosedLoop(4)).run(generate(spec(output_len=sizes.fixed(1)))))
    assert target.peak == 4
    assert max(record.end_s for record in result.records) == pytest.approx(5.0)
    assert all(record.ttft_s == pytest.approx(1.0) for record in result.records)


def test_turns_follow_after_think_time_with_the_real_history(scripted, virtual):
    items = generate(
        spec(kind="conversation", num_requests=3, turns=3, think_time=sizes.fixed(5.0), output_len=sizes.fixed(5))
    )
    target = scripted()
    result = virtual(Runner(target, OpenLoop(1.0)).run(items))
    first, second, third = sorted(result.records, key=lambda record: record.intended_s)
    assert second.intended_s == pytest.approx(first.end_s + 5.0)
    assert third.ttft_s == pytest.approx(0.1)
    asks = target.asks
    assert asks[1].token_ids == items[0].token_ids + (7,) * 5 + items[1].token_ids
    assert asks[2].token_ids[: len(asks[1].token_ids)] == asks[1].token_ids


@pytest.mark.parametrize("kind", ["conversation", "agent"])
def test_history_as_text(scripted, virtual, kind):
    items = generate(spec(kind=kind, num_requests=2, turns=2, form="text", output_len=sizes.fixed(2)))
    target = scripted()
    virtual(Runner(target, OpenLoop(1.0)).run(items))
    assert target.asks[1].text == f"{items[0].text}abab\n{items[1].text}"


def test_a_conversations_history_as_messages(scripted, virtual):
    items = generate(spec(kind="conversation", num_requests=2, turns=2, form="messages", output_len=sizes.fixed(2)))
    target = scripted()
    virtual(Runner(target, OpenLoop(1.0)).run(items))
    user, answer, more = target.asks[1].messages
    assert (user, more) == (*items[0].messages, *items[1].messages)
    assert answer == Message("assistant", "abab")


def test_an_agents_turns_are_calls_and_results_that_both_of_our_apis_take(scripted, virtual):
    items = generate(spec(kind="agent", num_requests=3, turns=3, form="messages", output_len=sizes.fixed(2)))
    target = scripted()
    virtual(Runner(target, OpenLoop(1.0)).run(items))
    messages = target.asks[2].messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    for call, result in (messages[1:3], messages[3:5]):
        assert call.content == "abab"  # the server's real answer
        assert call.tool_calls[0].id == result.tool_call_id
    assert len({message.tool_call_id for message in messages if message.role == "tool"}) == 2
    sent = msgspec.json.decode(msgspec.json.encode(messages))
    read = template_messages([ChatMessage.model_validate(message) for message in sent])
    assert set(read[1]["tool_calls"][0]["function"]["arguments"]) == {"query"}
    chat = router_pb2.ChatInput()
    for message in sent:
        add_message(chat, message)
    assert chat.messages[3].tool_calls[0].name == TOOL_NAME
    assert [message.tool_call_id for message in chat.messages] == [m.tool_call_id for m in messages]


def test_failures_are_counted_and_never_dropped(scripted, virtual):
    faults = {1: "refuse", 2: "cut", 3: "cut"}
    target = scripted(fault=lambda number: faults.get(number, ""))
    result = virtual(Runner(target, OpenLoop(10.0)).run(generate(spec())))
    summary = summarise(result.records, parse_slo("ttft:500"))
    assert summary.outcomes == {"ok": 17, "refused": 1, "cut": 2}
    assert summary.failed == 3
    assert summary.requests == 20
    assert summary.slo_attainment == pytest.approx(17 / 20)
    assert summary.output_tokens == 17 * 34 + 2 * 1
    assert any("cut" in text for text in summary.errors)


def test_a_broken_conversation_counts_its_missing_turns(scripted, virtual):
    items = generate(spec(kind="conversation", num_requests=3, turns=3))
    result = virtual(Runner(scripted(fault=lambda number: "cut" if number == 1 else ""), OpenLoop(1.0)).run(items))
    assert sorted(record.outcome.value for record in result.records) == ["cut", "error", "ok"]
    assert len(result.records) == 3


def test_clients_that_leave_are_no_failures(scripted, virtual):
    target = scripted()
    items = generate(spec(cancel_rate=0.5, seed=4))
    wanted = sum(item.cancel_after_tokens is not None for item in items)
    result = virtual(Runner(target, OpenLoop(10.0)).run(items))
    summary = summarise(result.records, parse_slo("ttft:500"))
    assert 0 < wanted < 20
    assert summary.outcomes == {"ok": 20 - wanted, "cancelled": wanted}
    assert target.left == wanted
    assert summary.failed == 0
    assert summary.slo_attainment == 1.0
    for record in result.records:
        if record.outcome is Outcome.CANCELLED:
            assert record.output_tokens >= items[record.index].cancel_after_tokens


def test_a_count_that_contradicts_the_stream_is_a_cut(scripted, virtual):
    class Liar(scripted):
        async def send(self, ask):
            async for event in super().send(ask):
                if hasattr(event, "output_tokens"):
                    event.output_tokens = 99
                yield event

    result = virtual(Runner(Liar(), OpenLoop(1.0)).run(generate(spec(num_requests=1))))
    assert result.records[0].outcome is Outcome.CUT
    assert "99" in result.records[0].error


def test_too_much_lag_says_so():
    summary = summarise([], parse_slo("ttft:500"))
    late = Dist(count=9, percentiles={50: 0.001, 99: 0.05})
    calm = Dist(count=9, percentiles={50: 0.0, 99: 0.001})
    assert not warnings_of(LagReport(calm, calm, 0.1), summary, limited=False)
    assert "TOO MUCH LAG" in warnings_of(LagReport(late, calm, 0.1), summary, limited=False)[0]
    assert "TOO MUCH LAG" in warnings_of(LagReport(calm, late, 0.1), summary, limited=False)[0]
    assert not warnings_of(LagReport(calm, late, 0.1), summary, limited=True)
    assert "core" in warnings_of(LagReport(calm, calm, 0.95), summary, limited=False)[0]
