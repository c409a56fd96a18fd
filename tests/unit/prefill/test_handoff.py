"""The hand-off of one prompt, with a scripted engine and publisher: order of events, settlement, and what a cancel frees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from diptych.common.errors import (
    InternalError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestDeadlineError,
    StaleReferenceError,
    TransferError,
)
from diptych.common.sampling import SamplingParams
from diptych.engine.messages import (
    Admitted,
    Cancel,
    Command,
    ComputedFrom,
    EngineRequest,
    Failed,
    KvMode,
    PrefillComplete,
    PromptComputed,
    RangePacked,
    TokensOut,
)
from diptych.kvtransfer.slabs.handle import SlabHandle
from diptych.prefill.sessions import PrefillSessions
from diptych.rpc.convert import sampling_to_proto
from diptych.rpc.v1 import prefill_pb2, types_pb2
from diptych.worker.incoming import Limits
from diptych_tests import waiting


class ScriptedEngine:
    def __init__(self) -> None:
        self.commands: list[Command] = []

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def cancelled(self) -> list[str]:
        return [command.attempt for command in self.commands if isinstance(command, Cancel)]


class FakePublisher:
    def __init__(self) -> None:
        self.released: list[str] = []
        self.returned: list[int] = []

    def publish(self, peer: str, packed: RangePacked) -> SlabHandle:
        return SlabHandle(
            "p0", "life", packed.attempt, packed.slab, packed.generation, packed.first_token, packed.num_tokens,
            0, 2, 1, packed.size_bytes, packed.checksum, 1, b"mac",
        )  # fmt: skip

    def return_grant(self, slab: int) -> None:
        self.returned.append(slab)

    def release(self, attempt: str) -> None:
        self.released.append(attempt)


@pytest.fixture
def parts() -> tuple[PrefillSessions, ScriptedEngine, FakePublisher]:
    engine, publisher = ScriptedEngine(), FakePublisher()
    limits = Limits("p0", "life", vocab_size=100, max_model_len=256, block_size=16)
    return PrefillSessions(engine, publisher, limits, max_sessions=2), engine, publisher  # type: ignore[arg-type]


def request(attempt: str = "a/1", **changes: object) -> prefill_pb2.PrefillRequest:
    fields: dict[str, object] = {
        "attempt": attempt,
        "prompt_token_ids": range(40),
        "sampling": sampling_to_proto(SamplingParams(8)),
        "want_kv": True,
        "prefill": types_pb2.WorkerRef(worker_id="p0", incarnation="life", address="h:1"),
        "decode": types_pb2.WorkerRef(worker_id="d0", incarnation="x", address="h:2"),
        "remaining_s": 30.0,
    }
    return prefill_pb2.PrefillRequest(**{**fields, **changes})  # type: ignore[arg-type]


def packed(slab: int, first: int, num: int, attempt: str = "a/1") -> RangePacked:
    return RangePacked(attempt, slab, 1, first, num, num * 16, 5)


async def kind(events: AsyncIterator[prefill_pb2.PrefillEvent]) -> str:
    return (await anext(events)).WhichOneof("event")  # type: ignore[return-value]


async def test_events_in_order_and_open_until_settled(parts) -> None:
    handoffs, engine, publisher = parts
    async with aclosing(handoffs.serve(request(decode_cached_tokens=16))) as events:
        # The request reaches the engine before the first event.
        task = asyncio.ensure_future(events.__anext__())
        await asyncio.sleep(0)
        add = engine.commands[0]
        assert isinstance(add, EngineRequest)
        assert (add.mode, add.peer, add.decode_cached_tokens) == (KvMode.PREFILL, "d0", 16)
        handoffs.on_step([Admitted("a/1", 0)])
        assert (await task).WhichOneof("event") == "started"
        handoffs.on_step([packed(3, 16, 16)])
        computed = (await anext(events)).computed
        assert (computed.first_token, computed.num_tokens, computed.handles[0].slab) == (16, 16, 3)
        handoffs.on_settled("a/1", 3)
        computed_from = PromptComputed("a/1", ComputedFrom(40, b"as the runner says", 16), compute_s=0.5)
        handoffs.on_step([computed_from, TokensOut("a/1", 0, (7,), ""), packed(4, 32, 8), PrefillComplete("a/1")])
        first = (await anext(events)).first_tokens
        assert first.tokens[0].token_id == 7
        assert first.computed_from == prefill_pb2.ComputedFrom(
            num_tokens=40, digest=b"as the runner says", block_size=16
        )
        assert (first.num_ranges_overlapped, first.compute_s) == (1, 0.5)
        assert await kind(events) == "computed"
        assert (await anext(events)).finished == prefill_pb2.PrefillFinished(num_ranges=2)
        last = asyncio.ensure_future(events.__anext__())
        await asyncio.sleep(0)
        assert not last.done(), "slab 4 was not acknowledged"
        assert handoffs.states() == {"settling": 1}
        handoffs.on_settled("a/1", 4)
        with pytest.raises(StopAsyncIteration):
            await last
    assert handoffs.num_sessions == 0
    assert engine.cancelled() == []
    assert publisher.released == ["a/1"]
    await handoffs.drained("prefill")


async def test_a_session_that_samples_nothing_is_vouched_for(parts) -> None:
    handoffs, _, _ = parts
    async with aclosing(handoffs.serve(request(output_token_ids=[5]))) as events:
        task = asyncio.ensure_future(events.__anext__())
        await asyncio.sleep(0)
        handoffs.on_step([Admitted("a/1", 0), PromptComputed("a/1", ComputedFrom(40, b"x", 16), 0.5)])
        await task
        first = (await anext(events)).first_tokens
        assert (list(first.tokens), first.computed_from.num_tokens) == ([], 40)


async def test_a_cancel_frees_all_and_later_ranges_go_back(parts) -> None:
    handoffs, engine, publisher = parts
    events = handoffs.serve(request())
    task = asyncio.ensure_future(events.__anext__())
    await asyncio.sleep(0)
    handoffs.on_step([Admitted("a/1", 0), packed(1, 0, 16)])
    await task
    await events.aclose()
    assert engine.cancelled() == ["a/1"]
    assert publisher.released == ["a/1"]
    handoffs.on_step([packed(2, 16, 16), Failed("a/1", InternalError("cancelled"))])
    assert publisher.returned == [2]


async def test_a_silent_decode_worker_loses_every_session_and_no_other_does(parts) -> None:
    """Waiting for slabs one after the other, each of its legs would take a lease for each of its ranges."""
    handoffs, engine, publisher = parts
    theirs = asyncio.ensure_future(anext(handoffs.serve(request())))
    restarted = types_pb2.WorkerRef(worker_id="d0", incarnation="next life", address="h:2")
    other = asyncio.ensure_future(anext(handoffs.serve(request("b/1", decode=restarted))))
    await asyncio.sleep(0)
    handoffs.on_silent("d0@x")
    with pytest.raises(TransferError, match="d0@x"):
        await theirs
    assert (engine.cancelled(), publisher.released, handoffs.states()) == (["a/1"], ["a/1"], {"queued": 1})
    handoffs.on_step([Admitted("b/1", 0)])
    assert (await other).WhichOneof("event") == "started"


async def test_the_engines_failure_and_the_deadline_end_the_session(parts) -> None:
    handoffs, _, publisher = parts
    task = asyncio.ensure_future(anext(handoffs.serve(request())))
    await asyncio.sleep(0)
    handoffs.on_step([Failed("a/1", InternalError("NaN"))])
    with pytest.raises(InternalError, match="NaN"):
        await task
    with pytest.raises(RequestDeadlineError):
        await anext(handoffs.serve(request("b/1", remaining_s=0.001)))
    assert publisher.released == ["a/1", "b/1"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"attempt": ""}, InvalidRequestError),
        ({"prompt_token_ids": []}, InvalidRequestError),
        ({"prompt_token_ids": [100]}, InvalidRequestError),
        ({"decode_cached_tokens": 8}, InvalidRequestError),
        ({"decode_cached_tokens": 48}, InvalidRequestError),
        ({"remaining_s": 0.0}, InvalidRequestError),
        ({"link_bytes_per_s": -1.0}, InvalidRequestError),
        ({"link_bytes_per_s": float("nan")}, InvalidRequestError),
        ({"prompt_token_ids": [1] * 256}, InvalidRequestError),
        ({"prefill": types_pb2.WorkerRef(worker_id="p0", incarnation="former")}, StaleReferenceError),
    ],
)
async def test_refused_before_any_work(parts, changes: dict[str, object], error: type[Exception]) -> None:
    handoffs, engine, _ = parts
    message = request()
    for name in changes:
        message.ClearField(name)
    message.MergeFrom(prefill_pb2.PrefillRequest(**changes))
    with pytest.raises(error):
        await anext(handoffs.serve(message))
    assert engine.commands == []
    assert handoffs.num_sessions == 0


async def test_the_queue_is_bounded_and_a_draining_worker_takes_nothing(parts) -> None:
    handoffs, _, _ = parts
    tasks = [asyncio.ensure_future(anext(handoffs.serve(request(f"{i}/1")))) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="already exists"):
        await anext(handoffs.serve(request("0/1")))
    with pytest.raises(OverloadedError) as caught:
        await anext(handoffs.serve(request("2/1")))
    assert caught.value.retry_after_s
    handoffs.stop_accepting("prefill")
    with pytest.raises(NoWorkerError):
        await anext(handoffs.serve(request("3/1")))
    handoffs.fail_all()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert handoffs.num_sessions == 0


async def test_an_idle_session_sends_keep_alives_but_not_for_a_stuck_engine(parts) -> None:
    _, engine, publisher = parts
    why, asked = "", 0

    def why_stuck() -> str:
        nonlocal asked
        asked += 1
        return why

    limits = Limits("p0", "life", vocab_size=100, max_model_len=256, block_size=16)
    handoffs = PrefillSessions(engine, publisher, limits, max_sessions=2, alive_every_s=0.01, why_stuck=why_stuck)
    async with aclosing(handoffs.serve(request())) as events:
        assert await kind(events) == "alive"
        handoffs.on_step([Admitted("a/1", 0), packed(1, 0, 16)])
        assert [await kind(events), await kind(events), await kind(events)] == ["started", "computed", "alive"]
        why = "a step has been running for 11.0 s"
        silent = asyncio.ensure_future(events.__anext__())
        until = asked + 5
        await waiting.until(lambda: asked >= until, "it looks five times whether the engine is stuck")
        assert not silent.done()
        why = ""
        assert (await silent).WhichOneof("event") == "alive"
    assert publisher.released == ["a/1"]
