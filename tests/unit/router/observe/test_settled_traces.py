"""What the router keeps of a request that has ended."""

from __future__ import annotations

import gc
import random
from types import FunctionType, ModuleType

from diptych.bench.router.decision import NUM_TOKENS, Setup
from diptych.common.request import Prompt
from diptych.common.store.worker_record import WorkerRecord
from diptych.router.observe.explain import RequestTrace
from diptych.router.placement.placer import PromptBlocks
from diptych.rpc.v1 import decode_pb2


def reached(root: object) -> list[object]:
    seen: dict[int, object] = {}
    waiting: list[object] = [root]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType):
            seen[id(one)] = one
            # Not the globals of a function: they lead to all that there is.
            waiting += (one.__closure__ or ()) if isinstance(one, FunctionType) else gc.get_referents(one)
    return list(seen.values())


def test_the_state_of_all_workers_is_not_kept_with_each_request_that_has_ended() -> None:
    """Some thousand requests are remembered, and each would hold a record of every worker."""
    setup = Setup(6, 40_000)
    placement = setup.decide(PromptBlocks(Prompt(tuple(random.Random(1).randrange(99) for _ in range(NUM_TOKENS)))), 1)
    trace = RequestTrace("r", placement, ttft_s=0.5)
    assert any(isinstance(one, WorkerRecord) for one in reached(placement.chosen))
    before = trace.explanation()
    trace.settle()
    assert not [one for one in reached(trace) if isinstance(one, WorkerRecord)]
    after = trace.explanation()
    assert 1 < len(after.candidates) <= 9
    assert list(after.candidates[:-1]) == list(before.candidates[: len(after.candidates) - 1])
    assert [one for one in after.candidates if one.chosen] == [one for one in before.candidates if one.chosen]
    del before.candidates[:], after.candidates[:]
    assert after == before
    trace.settle()
    assert trace.predicted_ttft_s == before.predicted_ttft_s


def test_facts_are_copied_out_of_their_message() -> None:
    event = decode_pb2.Event()
    event.end.finished.explanation.prefill = "p0"
    trace = RequestTrace("r")
    trace.on_facts(event.end.finished.explanation)
    event.end.finished.explanation.prefill = "changed"
    assert trace.explanation().prefill == "p0"
