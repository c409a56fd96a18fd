"""Events that are kept for another router."""

from __future__ import annotations

import pytest

from diptych.common.sampling import TokenLogprobs
from diptych.decode import transcript as transcript_module
from diptych.decode.outbox import Outbox
from diptych.decode.transcript import Budget, Transcript
from diptych.engine.messages import TokensOut
from diptych.rpc.v1 import decode_pb2, types_pb2


async def batches(outbox: Outbox) -> list[decode_pb2.Event]:
    outbox.close()
    events: list[decode_pb2.Event] = []
    while (batch := await outbox.next_batch()) is not None:
        events += batch.events
    return events


async def test_all_events_come_again_in_their_order() -> None:
    first, second, budget, full = Outbox(), Outbox(), Budget(), []
    kept = Transcript("a", first, budget, lambda: full.append(1))
    kept.accepted("a")
    kept.prompt_logprobs("a", types_pb2.PromptLogprobs(first_token=1, logprobs=[types_pb2.TokenLogprobs(token_id=4)]))
    kept.tokens(TokensOut("a", 0, (5,), "h", 0, (TokenLogprobs(5, -0.5, 1, ((5, -0.5),)),)), 16)
    kept.tokens(TokensOut("a", 0, (7,), "x", 1, (TokenLogprobs(7, -0.5, 1),)))
    kept.outbox = None
    kept.tokens(TokensOut("a", 1, (6,), "", 0, (TokenLogprobs(6, -0.25, 2),)))
    kept.choice_finished("a", types_pb2.ChoiceFinished(choice=1))
    kept.attach(second)
    kept.tokens(TokensOut("a", 2, (8,), "é", 0, (TokenLogprobs(8, -1.0, 1),)))
    kept.end("a", decode_pb2.End(finished={"usage": {"completion_tokens": 4}}))
    assert kept.ended_well
    events = await batches(second)
    assert [event.WhichOneof("event") for event in events] == [
        "accepted", "prompt_logprobs", "tokens", "tokens", "choice_finished", "end",
    ]  # fmt: skip
    tokens = events[2].tokens
    assert (tokens.offset, list(tokens.token_ids), tokens.text, tokens.choice) == (0, [5, 6, 8], "hé", 0)
    assert [entry.logprob for entry in tokens.logprobs] == [-0.5, -0.25, -1.0]
    assert list(tokens.logprobs[0].top_token_ids) == [5]
    assert (events[2].cached_tokens, events[3].cached_tokens) == (16, 0)
    assert len(await batches(first)) == 4
    third = Outbox()
    kept.attach(third)  # once more, after the end
    assert [e.WhichOneof("event") for e in await batches(third)][-1] == "end"
    kept.drop()
    assert budget.left == transcript_module.MAX_TOTAL_BYTES
    assert not full


@pytest.mark.parametrize("bound", ["of one", "of all"])
async def test_beyond_the_bound_nothing_is_kept_and_the_stream_goes_on(monkeypatch, bound: str) -> None:
    if bound == "of one":
        monkeypatch.setattr(transcript_module, "MAX_BYTES", 100)
    budget, outbox, full = Budget(1000 if bound == "of one" else 100), Outbox(), []
    before = budget.left
    kept = Transcript("a", outbox, budget, lambda: full.append(1))
    for offset in range(20):
        kept.tokens(TokensOut("a", offset, (offset,), "t"))
    assert (full, kept.whole, budget.left) == ([1], False, before)
    (event,) = await batches(outbox)
    assert len(event.tokens.token_ids) == 20


async def test_to_the_same_stream_again() -> None:
    """What waited there is not merged with what comes again."""
    outbox = Outbox()
    kept = Transcript("a", outbox, Budget(), lambda: None)
    kept.accepted("a")
    kept.tokens(TokensOut("a", 0, (5,), "h"))
    outbox.tokens(TokensOut("b", 0, (9,), "o"))
    outbox.forget("a")
    kept.attach(outbox)
    kept.tokens(TokensOut("a", 1, (6,), "i"))
    events = await batches(outbox)
    assert [(e.attempt, e.WhichOneof("event"), list(e.tokens.token_ids)) for e in events] == [
        ("b", "tokens", [9]),
        ("a", "accepted", []),
        ("a", "tokens", [5, 6]),
    ]


async def test_a_batch_is_never_larger_than_a_message() -> None:
    outbox = Outbox()
    for number in range(20):
        outbox.tokens(TokensOut(f"a{number}", 0, (1,), "x" * 1_000_000))
    outbox.close()
    sizes, events = [], 0
    while (batch := await outbox.next_batch()) is not None:
        sizes.append(batch.ByteSize())
        events += len(batch.events)
    assert events == 20
    assert max(sizes) <= 4 * 1024 * 1024 < sum(sizes)
