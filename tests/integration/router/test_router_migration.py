"""Decode workers that die, stop, drain or are cut off in mid-answer: the same stream goes on, over real gRPC."""

import asyncio
from dataclasses import replace

import pytest

from diptych.common.block_identity import block_keys
from diptych.common.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    StaleReferenceError,
    WorkerDrainedError,
    WorkerLostError,
)
from diptych.common.grammar import Grammar, GrammarKind
from diptych.common.secret import tenant_salt
from diptych.common.tiers import TierState
from diptych.router.requests import slow_grammars
from diptych.router.requests.messages import (
    ChoiceFinishedEvent,
    FinishedEvent,
    StartedEvent,
    TokenEvent,
    UncheckedRequest,
)
from diptych.rpc.errors import to_failure
from diptych.rpc.v1 import decode_pb2
from diptych_tests.router_fleet import running

NUM_TOKENS, AT = 8, 3
"""Tokens of every answer; the worker holds in front of this one."""


async def begun(fleet, worker, at=AT, **changes):
    """An answer that holds at token `at` on this worker. Returns: (its events so far, the rest)."""
    worker.hold_from = at
    spec = {"token_ids": [1] * 20, "sampling": {"max_tokens": NUM_TOKENS}, "explain": True} | changes
    events = fleet.frontend.generate(await fleet.frontend.prepare(UncheckedRequest(**spec)))
    seen = [await anext(events)]
    while num_tokens(seen) < at:
        seen.append(await anext(events))
    return seen, events


def num_tokens(events):
    return sum(len(event.token_ids) for event in events if isinstance(event, TokenEvent))


def num_ended(events):
    return sum(isinstance(event, ChoiceFinishedEvent) for event in events)


async def rest_of(events):
    async with asyncio.timeout(60):
        return [event async for event in events]


def check_whole(events):
    """No token is lost, doubled or changed; one start, one end; usage counts once."""
    assert [type(event) for event in events[:1] + events[-1:]] == [StartedEvent, FinishedEvent]
    tokens = events[1:-1]
    assert all(isinstance(event, TokenEvent) for event in tokens)
    assert [token for event in tokens for token in event.token_ids] == list(range(NUM_TOKENS))
    assert "".join(event.text for event in tokens) == "".join(f"t{i} " for i in range(NUM_TOKENS))
    assert sum(event.cached_tokens for event in tokens) == 16
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (20, NUM_TOKENS, 16)


async def first_and_rest(fleet, number=2, **changes):
    """Workers, of which the first one holds an answer."""
    await fleet.add("p0", "prefill")
    first = await fleet.add("d0")
    await fleet.until_ready()
    seen, events = await begun(fleet, first, **changes)
    others = [await fleet.add(f"d{i}") for i in range(1, number)]
    await fleet.until_ready(decode=number)
    return first, others, seen, events


def migrations(fleet):
    return fleet.frontend.metrics.totals()["migrations"]


async def kill_holder(fleet, alive):
    """Kill the worker that has the request, and wait for it if need be."""
    await fleet.until(lambda: any(worker.submits for worker in alive))
    holder = next(worker for worker in alive if worker.submits)
    alive.remove(holder)
    await holder.kill()


async def test_a_killed_worker(fleet):
    first, (second,), seen, events = await first_and_rest(fleet)
    await first.kill()
    whole = seen + await rest_of(events)
    check_whole(whole)
    (submit,) = second.submits
    assert list(submit.output_token_ids) == [0, 1, 2]
    assert submit.attempt != first.submits[0].attempt
    assert submit.sampling.seed == first.submits[0].sampling.seed
    assert submit.remaining_s < first.submits[0].remaining_s
    why = whole[-1].explanation
    assert [(a.decode, a.num_tokens, a.failure) for a in why.attempts] == [("d0", 3, "WORKER_LOST"), ("d1", 0, "")]
    assert why.attempts[0].submitted_s < why.attempts[1].submitted_s
    assert "decode d0 WORKER_LOST after 3 tokens: placed again" in why.notes
    assert migrations(fleet) == {"WORKER_LOST,moved": 1.0}
    assert fleet.frontend.metrics.value("generation_tokens_total") == NUM_TOKENS
    assert fleet.frontend.metrics.totals()["request_success"] == {"length": 1.0}
    assert fleet.no_reservations()


@pytest.mark.parametrize("ended", [False, True])
async def test_each_choice_goes_on_by_itself(fleet, ended):
    """Over two deaths; `ended`: one of the choices ends before the second."""
    lengths = {1: AT + 1} if ended else {}
    await fleet.add("p0", "prefill")
    first = await fleet.add("d0")
    await fleet.until_ready()
    first.hold_from = AT
    sampling = {"max_tokens": NUM_TOKENS, "n": 3}
    spec = UncheckedRequest(token_ids=[1] * 20, sampling=sampling, explain=True)
    events = fleet.frontend.generate(await fleet.frontend.prepare(spec))
    seen = [await anext(events)]
    while num_tokens(seen) < 3 * AT:
        seen.append(await anext(events))
    await fleet.add("d9")  # it does not know choices, and is not asked
    second = await fleet.add("d1", request_fields=("choice",))
    await fleet.until_ready(decode=3)
    second.hold_from, second.lengths = AT + 1, lengths
    await first.kill()
    while num_tokens(seen) < 3 * (AT + 1) or num_ended(seen) < ended:
        seen.append(await anext(events))
    third = await fleet.add("d2", request_fields=("choice",))
    await fleet.until_ready(decode=3)
    await second.kill()
    seen += await rest_of(events)
    for choice in range(3):
        mine = [event for event in seen if isinstance(event, TokenEvent) and event.choice == choice]
        size = lengths.get(choice, NUM_TOKENS)
        assert [token for event in mine for token in event.token_ids] == [10 * choice + i for i in range(size)]
    assert sorted(event.choice for event in seen if isinstance(event, ChoiceFinishedEvent)) == [0, 1, 2]
    assert [len(submit.output_token_ids) for submit in second.submits] == [AT] * 3
    assert [submit.choice for submit in second.submits] == [0, 1, 2]
    assert [submit.choice for submit in third.submits] == ([0, 2] if ended else [0, 1, 2])
    assert {submit.sampling.n for submit in second.submits} == {1}
    assert seen[-1].usage.completion_tokens == num_tokens(seen)
    assert sum(event.cached_tokens for event in seen if isinstance(event, TokenEvent)) == 16
    assert fleet.no_reservations()


async def test_killed_before_the_first_token_costs_no_retry_budget(fleet):
    await fleet.add("p0", "prefill")
    first = await fleet.add("d0")
    await fleet.until_ready()
    first.go.clear()
    spec = UncheckedRequest(token_ids=[1] * 20, sampling={"max_tokens": NUM_TOKENS, "n": 2}, explain=True)
    events = fleet.frontend.generate(await fleet.frontend.prepare(spec))
    started = await anext(events)
    second = await fleet.add("d1")
    second.refuse = InternalError("n is not spoken here")
    await fleet.until_ready(decode=2)
    left = fleet.frontend._cluster.retry_budget.left
    await first.kill()
    with pytest.raises(InternalError, match="not spoken"):
        await rest_of(events)
    assert isinstance(started, StartedEvent)
    assert not second.submits[0].output_token_ids
    assert fleet.frontend._cluster.retry_budget.left == left


async def test_it_goes_on_where_the_most_of_its_prompt_and_its_tokens_is_held(fleet):
    """With the prompt alone all the others would do as well as each other."""
    count, at = 30, 25
    salted = replace(fleet.header, salt=tenant_salt(fleet.secret, ""))
    keys = tuple(block_keys(salted, [1] * 20 + list(range(at))))
    assert len(keys) == 2, "the second block ends with the answer's tokens"
    await fleet.add("p0", "prefill")
    first = await fleet.add("d0")
    await fleet.until_ready()
    seen, events = await begun(fleet, first, at, sampling={"max_tokens": count})
    others = [await fleet.add(f"d{i}", event_epoch=0, tiers=(TierState("device", 5),)) for i in range(1, 5)]
    for worker in others:
        worker.dump = (0, 5, keys if worker is others[2] else keys[:1])
    await fleet.until_ready(decode=5)
    index = fleet.frontend._cluster._index
    held = [2 if worker is others[2] else 1 for worker in others]
    await fleet.until(lambda: [index.hit_blocks(worker.worker_id, keys) for worker in others] == held)
    await first.kill()
    whole = seen + await rest_of(events)
    assert [len(worker.submits) for worker in others] == [0, 0, 1, 0]
    (chosen,) = [one for one in whole[-1].explanation.candidates if one.chosen]
    assert (chosen.decode_worker_id, chosen.decode_hit_tokens) == ("d3", 32)


async def test_a_grammar_that_takes_long_is_compiled_elsewhere_before_it_is_needed_there(fleet, monkeypatch):
    monkeypatch.setattr(slow_grammars, "SLOW_S", 0.0)
    await fleet.add("p0", "prefill")
    workers = [await fleet.add(f"d{i}") for i in range(5)]
    await fleet.until_ready(decode=5)
    for worker in workers:
        worker.hold_from = AT
    grammar = Grammar(GrammarKind.REGEX, "a{1,200}b")
    sampling = {"max_tokens": NUM_TOKENS}
    spec = UncheckedRequest(token_ids=[1] * 20, sampling=sampling, grammar=grammar, explain=True)
    events = fleet.frontend.generate(await fleet.frontend.prepare(spec))
    seen = [await anext(events)]
    while num_tokens(seen) < AT:
        seen.append(await anext(events))
    (first,) = [worker for worker in workers if worker.submits]
    await fleet.until(lambda: sum(bool(worker.prepared) for worker in workers) == 2)
    ready = [worker for worker in workers if worker.prepared]
    assert first not in ready
    assert [worker.prepared for worker in ready] == [[grammar.source]] * 2
    for worker in workers:
        if worker is not first:  # which would end its answer, if it were quicker than its end
            worker.hold_from = -1
    await first.kill()
    check_whole(seen + await rest_of(events))
    (second,) = [worker for worker in workers if worker.submits and worker is not first]
    assert second in ready


async def test_a_worker_that_comes_is_told_of_a_grammar_that_takes_long(fleet, monkeypatch):
    """Before anybody asks for it again."""
    monkeypatch.setattr(slow_grammars, "SLOW_S", 0.0)
    grammar = Grammar(GrammarKind.REGEX, "a{1,200}b")
    first, (second,), seen, events = await first_and_rest(fleet, grammar=grammar)
    await fleet.until(lambda: second.prepared == [grammar.source])
    first.hold_from = -1
    first.go.set()
    check_whole(seen + await rest_of(events))


async def test_killed_again_and_again(fleet):
    first, others, seen, events = await first_and_rest(fleet, number=4)
    for worker in others:
        worker.hold_from = AT
    alive = [first, *others]
    ending = asyncio.create_task(rest_of(events))
    for _ in range(3):
        await kill_holder(fleet, alive)
    alive[0].hold_from = -1
    alive[0].go.set()
    whole = seen + await ending
    check_whole(whole)
    assert [a.num_tokens for a in whole[-1].explanation.attempts] == [3, 0, 0, 0]


async def test_a_request_that_kills_its_workers_does_not_kill_all(fleet):
    first, others, seen, events = await first_and_rest(fleet, number=5)
    for worker in others:
        worker.hold_from = AT
    alive = [first, *others]
    ending = asyncio.create_task(rest_of(events))
    for _ in range(4):
        await kill_holder(fleet, alive)
    with pytest.raises(WorkerLostError):
        await ending
    assert not alive[0].submits
    assert migrations(fleet)["WORKER_LOST,attempts"] == 1.0
    assert "WORKER_LOST,no_worker" not in migrations(fleet)
    assert fleet.no_reservations()


async def test_late_tokens_of_a_worker_that_is_cut_off_reach_nobody(fleet):
    """It was silent for too long, as a stopped one is, and goes on when its request runs elsewhere."""
    first, (second,), seen, events = await first_and_rest(fleet)
    second.hold_from = AT + 1
    member = fleet.frontend._cluster._members.get("d0")
    member.link.decode.fail_attempts("does not answer")
    seen.append(await anext(events))
    first.hold_from = -1
    first.go.set()  # it sends all the rest, unless its cancel is first
    await fleet.cancelled(first)
    second.hold_from = -1
    second.go.set()
    check_whole(seen + await rest_of(events))


async def test_a_drained_worker_gives_its_answers_up(fleet):
    first, (second,), seen, events = await first_and_rest(fleet)
    await fleet.store.put_worker(fleet.record(first, state="draining"), ttl_s=1000)
    await fleet.until_ready()
    failure = to_failure(WorkerDrainedError("this decode worker shuts down"))
    end = decode_pb2.End(failure=failure)
    first._routers[0].put(decode_pb2.Event(attempt=first.submits[0].attempt, end=end))
    rest = await rest_of(events)
    check_whole(seen + rest)
    assert len(second.submits) == 1
    value = fleet.frontend.metrics.registry.get_sample_value
    assert value("diptych_migrations_total", {"reason": "WORKER_DRAINED", "outcome": "moved"}) == 1


async def test_what_leaves_a_worker_that_drains_takes_its_kv_along(fleet):
    """Whatever computes the rest of the answer takes prompt and tokens so far from the worker that gave it up."""
    count, at, takes = 30, 25, {"request_fields": ("source",)}
    salted = replace(fleet.header, salt=tenant_salt(fleet.secret, ""))
    keys = tuple(block_keys(salted, [1] * 20 + list(range(at))))
    holds = {"event_epoch": 0, "tiers": (TierState("device", 5),), **takes}
    await fleet.add("p0", "prefill", **takes)
    first = await fleet.add("d0", **holds)
    first.dump = (0, 5, keys)
    await fleet.until_ready()
    await fleet.until(lambda: fleet.frontend._cluster._index.hit_blocks("d0", keys) == 2)
    seen, events = await begun(fleet, first, at, sampling={"max_tokens": count})
    second = await fleet.add("d1", **takes)
    await fleet.until_ready(decode=2)
    await fleet.store.put_worker(fleet.record(first, state="draining", leaves_in_s=30.0, **holds), ttl_s=1000)
    await fleet.until_ready()
    end = decode_pb2.End(failure=to_failure(WorkerDrainedError("this decode worker shuts down")))
    first._routers[0].put(decode_pb2.Event(attempt=first.submits[0].attempt, end=end))
    rest = await rest_of(events)
    assert [token for event in [*seen, *rest] if isinstance(event, TokenEvent) for token in event.token_ids] == list(
        range(count)
    )
    [submit] = second.submits
    plan = submit.placement.prefill_source
    assert (plan.holder.worker_id, plan.num_tokens) == ("d0", 32)
    why = rest[-1].explanation
    assert "KV is taken from d0, which drains" in why.notes
    assert {one.decode_worker_id for one in why.candidates} == {"d1"}
    (chosen,) = [one for one in why.candidates if one.chosen]
    assert (chosen.pull.holder, chosen.pull.num_tokens) == ("d0", 32)


@pytest.mark.parametrize(
    "refusal", [OverloadedError("full"), StaleReferenceError("another life"), InvalidRequestError("no room")]
)
async def test_a_worker_that_refuses_the_move_is_passed_by(fleet, refusal):
    first, (second, third), seen, events = await first_and_rest(fleet, number=3)
    second.refuse = refusal
    await first.kill()
    check_whole(seen + await rest_of(events))
    assert len(third.submits) == 1


async def test_all_workers_refuse_the_move(fleet):
    first, others, seen, events = await first_and_rest(fleet, number=3)
    for worker in others:
        worker.refuse = OverloadedError("full")
    await first.kill()
    with pytest.raises(WorkerLostError, match="decode worker d0 was lost: .*; no other worker took its request: full"):
        await rest_of(events)
    assert [len(worker.submits) for worker in others] == [1, 1]


async def test_an_error_that_is_the_requests_own_does_not_move(fleet):
    first, (second,), seen, events = await first_and_rest(fleet)
    end = decode_pb2.End(failure=to_failure(InternalError("logits that are no numbers")))
    first._routers[0].put(decode_pb2.Event(attempt=first.submits[0].attempt, end=end))
    with pytest.raises(InternalError, match="logits"):
        await rest_of(events)
    assert not second.submits


async def test_no_other_worker_is_a_typed_error_at_once(fleet):
    first, _, seen, events = await first_and_rest(fleet, number=1)
    await first.kill()
    with pytest.raises(WorkerLostError) as caught:
        await rest_of(events)
    assert caught.value.retry_after_s == 1.0
    assert migrations(fleet) == {"WORKER_LOST,no_worker": 1.0}
    assert fleet.no_reservations()


async def test_the_same_worker_goes_on_when_only_its_stream_broke(fleet):
    first, _, seen, events = await first_and_rest(fleet, number=1)
    stream = fleet.frontend._cluster._members.get("d0").link.decode
    first.hold_from = -1
    stream._down("reset by the test")
    stream._task.cancel()
    stream._task = None
    stream.start()
    await fleet.until(lambda: stream.up)
    first.go.set()
    check_whole(seen + await rest_of(events))
    assert [len(submit.output_token_ids) for submit in first.submits] == [0, 3]


@pytest.mark.parametrize(("changes", "settings"), [({"failure_policy": "fail"}, {}), ({}, {"migration_attempts": 0})])
async def test_turned_off_by_the_request_or_the_setting(model_folder, tmp_path, changes, settings):
    async with running(model_folder, tmp_path, **settings) as fleet:
        first, (second,), seen, events = await first_and_rest(fleet, **changes)
        await first.kill()
        with pytest.raises(WorkerLostError):
            await rest_of(events)
        assert not second.submits
        assert migrations(fleet) == {"WORKER_LOST,forbidden": 1.0}


async def test_an_answer_that_was_resumed_by_its_client_moves_on(fleet):
    changes = {"resume_after": [0, 1], "sampling": {"max_tokens": NUM_TOKENS, "seed": 5}}
    await fleet.add("p0", "prefill")
    first = await fleet.add("d0")
    await fleet.until_ready()
    first.hold_from = AT
    spec = UncheckedRequest(token_ids=[1] * 20, explain=True, **changes)
    events = fleet.frontend.generate(await fleet.frontend.prepare(spec))
    seen = [await anext(events), await anext(events)]
    second = await fleet.add("d1")
    await fleet.until_ready(decode=2)
    await first.kill()
    whole = seen + await rest_of(events)
    assert [token for event in whole[1:-1] for token in event.token_ids] == list(range(2, NUM_TOKENS))
    assert list(second.submits[0].output_token_ids) == [0, 1, 2]
    assert whole[-1].usage.completion_tokens == NUM_TOKENS
