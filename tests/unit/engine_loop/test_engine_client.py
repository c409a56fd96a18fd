from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from diptych.common.block_identity import IdentityHeader
from diptych.common.clock import FakeClock
from diptych.common.errors import InternalError, InvalidRequestError, RequestCancelledError, WorkerLostError
from diptych.common.request import Prompt
from diptych.common.sampling import SamplingParams
from diptych.engine import loop
from diptych.engine.api import EngineClient
from diptych.engine.config import EngineConfig
from diptych.engine.executor import LocalExecutor
from diptych.engine.fake_device import FakeDeviceRunner
from diptych.engine.fake_runner import FakeRunner
from diptych.engine.messages import (
    Admitted,
    BlocksStored,
    CacheCleared,
    Cancel,
    EndPull,
    EngineRequest,
    Failed,
    Finished,
    FirstToken,
    GrantSlabs,
    KvComplete,
    KvMode,
    PrefillComplete,
    PublishCached,
    PullBlocks,
    Pulled,
    RangePacked,
    RangeUnpacked,
    SlabGrant,
    TokensOut,
    UnpackRange,
)

BLOCK = 4
DEADLINE_S = 60.0


def make_request(attempt="a", num_prompt=9, max_tokens=6, **fields):
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(attempt, Prompt(tuple(range(100, 100 + num_prompt))), sampling, **fields)


class Bench:
    """An EngineClient that notes its events, one list a step."""

    def __init__(self, runner=None, clock=None, **changes):
        self.runner = runner or FakeRunner(64, BLOCK)
        self.steps = []
        self._changed = asyncio.Event()
        config = EngineConfig(num_blocks=64, block_size=BLOCK, check_invariants=True, **changes)
        identity = IdentityHeader(b"k" * 32, "model", "tokenizer", "uint8", BLOCK)
        self.client = EngineClient(LocalExecutor(self.runner), config, identity, None, self._on_events, clock=clock)

    def _on_events(self, events):
        self.steps.append(events)
        self._changed.set()

    @property
    def events(self):
        return [event for step in self.steps for event in step]

    async def until(self, condition):
        """Wait for an event that fulfils the condition."""
        async with asyncio.timeout(DEADLINE_S):
            while not (found := [e for e in self.events if condition(e)]):
                self._changed.clear()
                await self._changed.wait()
        return found[0]

    async def end_of(self, attempt="a"):
        return await self.until(lambda e: isinstance(e, (Finished, Failed, PrefillComplete)) and e.attempt == attempt)

    async def __aenter__(self):
        self.client.start()
        return self

    async def __aexit__(self, *exc):
        await self.client.close(DEADLINE_S)


class Gate:
    """Holds the step thread inside a step, from the `after`-th on."""

    def __init__(self, after=0):
        self.inside, self.go = threading.Event(), threading.Event()
        self._left = after

    def __call__(self, seqs):
        self._left -= 1
        if self._left >= 0:
            return
        self.inside.set()
        assert self.go.wait(DEADLINE_S)

    async def wait_inside(self):
        assert await asyncio.to_thread(self.inside.wait, DEADLINE_S)


async def test_one_list_of_events_a_step_in_order():
    async with Bench() as bench:
        bench.client.send(make_request(max_tokens=3))
        await bench.end_of()
    kinds = [[type(e).__name__ for e in step] for step in bench.steps]
    assert kinds == [["Admitted", "TokensOut", "BlocksStored"], ["TokensOut"], ["TokensOut", "Finished"]]


async def test_who_has_an_answer_finds_it_counted(monkeypatch):
    """A test on a loaded machine compared counters right after an answer, and read those of the step before."""
    counted = []
    deliver = EngineClient._deliver

    def note(client, events):
        tokens = sum(len(event.token_ids) for event in events if isinstance(event, TokensOut))
        counted.append((tokens, client.stats().generation_tokens_total, client.stats().num_running))
        deliver(client, events)

    monkeypatch.setattr(EngineClient, "_deliver", note)
    async with Bench() as bench:
        bench.client.send(make_request(max_tokens=3))
        await bench.end_of()
    assert counted == [(1, 1, 1), (1, 2, 1), (1, 3, 0)]


async def test_who_has_an_answer_of_one_token_that_came_from_elsewhere_finds_it_counted(monkeypatch):
    counted = []
    deliver = EngineClient._deliver

    def note(client, events):
        if any(isinstance(event, Finished) for event in events):
            counted.append((client.stats().generation_tokens_total, client.stats().num_waiting_remote))
        deliver(client, events)

    monkeypatch.setattr(EngineClient, "_deliver", note)
    async with Bench() as bench:
        bench.client.send(make_request(max_tokens=1, mode=KvMode.REMOTE))
        await bench.until(lambda event: isinstance(event, Admitted))
        bench.client.send(FirstToken("a", 7))
        await bench.end_of()
    assert counted == [(1, 0)]


async def test_generate_streams_and_hides_its_events_from_the_others():
    async with Bench() as bench:
        events = [event async for event in bench.client.generate(make_request(max_tokens=4))]
    assert [type(e) for e in events] == [TokensOut] * 4 + [Finished]
    assert all(isinstance(e, BlocksStored) for e in bench.events)


async def test_generate_raises_the_typed_error():
    async with Bench() as bench:
        with pytest.raises(InvalidRequestError):
            async for _ in bench.client.generate(make_request(num_prompt=0)):
                pass


async def test_leaving_generate_cancels_and_frees():
    gate = Gate()
    gate.go.set()
    async with Bench(FakeRunner(64, BLOCK, before_execute=gate)) as bench:
        stream = bench.client.generate(make_request(max_tokens=200))
        async for _ in stream:
            gate.go.clear()
            break
        await stream.aclose()
        gate.go.set()
        audit = await bench.client.audit(full=True)
        assert audit.attempts == {}
        assert audit.blocks.running == 0
        assert audit.violations == ()
    assert all(isinstance(e, BlocksStored) for e in bench.events)


async def test_a_running_step_does_not_hold_up_the_event_loop_and_shows_as_busy():
    gate = Gate()
    async with Bench(FakeRunner(64, BLOCK, before_execute=gate)) as bench:
        bench.client.send(make_request())
        await gate.wait_inside()
        for i in range(100):
            bench.client.send(make_request(f"x{i}", max_tokens=1))
        assert bench.client.stats().busy_since is not None, "all were sent while the step was held"
        with pytest.raises(InternalError, match="did not answer"):
            await bench.client.audit(deadline_s=0.01)
        gate.go.set()
        await bench.end_of("x99")
        assert (await bench.client.audit(full=True)).violations == ()


async def test_a_cancel_gives_up_the_step_that_serves_nobody_else():
    gate = Gate()
    async with Bench(FakeRunner(64, BLOCK, before_execute=gate)) as bench:
        bench.client.send(make_request())
        await gate.wait_inside()
        bench.client.send(Cancel("a"))
        gate.go.set()
        failed = await bench.end_of()
        assert isinstance(failed.error, RequestCancelledError)
    assert bench.runner.computed_tokens == 0


async def test_an_idle_engine_sleeps():
    async with Bench() as bench:
        bench.client.send(make_request(max_tokens=2))
        await bench.end_of()
        await bench.client.audit()
        stats = bench.client.stats()
        assert stats.busy_since is None
        assert (stats.num_running, stats.steps, stats.generation_tokens_total) == (0, 2, 2)
        # The thread is in its inbox: no step is taken until a command comes.
        thread = bench.client._thread
        taken = []
        step = thread._core.step
        thread._core.step = lambda cancelled: taken.append(1) or step(cancelled)
        await bench.client.audit()
        await bench.client.audit()
        assert len(taken) <= 2


async def test_a_step_that_raises_fails_typed_and_the_loop_lives_on():
    def explode(seqs):
        if seqs[0].attempt == "bomb":
            raise MemoryError("no room")

    async with Bench(FakeRunner(64, BLOCK, before_execute=explode)) as bench:
        bench.client.send(make_request("bomb"))
        failed = await bench.end_of("bomb")
        assert isinstance(failed.error, InternalError)
        bench.client.send(make_request("after"))
        assert isinstance(await bench.end_of("after"), Finished)
        assert bench.client.stats().alive


async def test_a_bug_in_the_loop_ends_it_loudly_and_everything_is_answered(caplog):
    bench = Bench()
    bench.client.start()
    bench.client.send(make_request("remote", mode=KvMode.REMOTE))
    await bench.until(lambda e: getattr(e, "attempt", "") == "remote")
    bench.client.send("no command")  # type: ignore[arg-type]
    failed = await bench.end_of("remote")
    assert isinstance(failed.error, WorkerLostError)
    assert "the engine died" in str(failed.error)
    assert not bench.client.stats().alive
    assert "step thread died" in caplog.text
    bench.client.send(make_request("late"))
    assert isinstance((await bench.end_of("late")).error, WorkerLostError)
    bench.client.send(UnpackRange("late", 5, 0, 4, memoryview(b"")))
    await bench.until(lambda e: e == RangeUnpacked("late", 5, False))
    with pytest.raises(WorkerLostError):
        await bench.client.audit()
    await bench.client.close()


async def test_close_ends_what_runs():
    gate = Gate()
    bench = Bench(FakeRunner(64, BLOCK, before_execute=gate))
    bench.client.start()
    bench.client.send(make_request())
    await gate.wait_inside()
    with pytest.raises(InternalError, match="did not end"):
        await bench.client.close(0.01)
    gate.go.set()
    await bench.client.close(DEADLINE_S)
    await bench.client.close(DEADLINE_S)
    assert isinstance((await bench.end_of()).error, WorkerLostError)
    assert bench.runner.computed_tokens == 0
    assert not bench.client.stats().alive


async def test_close_before_start_does_nothing():
    await Bench().client.close()


async def test_dump_and_reset_agree_with_the_events():
    async with Bench() as bench:
        async for _ in bench.client.generate(make_request(max_tokens=8)):
            pass
        dump = await bench.client.dump_blocks()
        stored = [e for e in bench.events if isinstance(e, BlocksStored)]
        assert dump.tiers[0].sequence == stored[-1].sequence
        assert set(dump.tiers[0].keys) == {key for e in stored for key in e.keys}
        await bench.client.reset_cache()
        assert await bench.until(lambda e: isinstance(e, CacheCleared)) == CacheCleared(1)
        assert (await bench.client.dump_blocks()).tiers[0].keys == ()


async def test_grants_wake_an_engine_that_waits_with_computed_blocks():
    async with Bench() as bench:
        bench.client.send(make_request(mode=KvMode.PREFILL))
        await bench.until(lambda e: isinstance(e, TokensOut))
        assert (await bench.client.audit()).attempts == {"packing": 1}
        grant = SlabGrant(0, 7, memoryview(bytearray(4096)))
        await asyncio.to_thread(bench.client.send, GrantSlabs((grant,)))
        assert isinstance(await bench.end_of(), PrefillComplete)
        packed = await bench.until(lambda e: isinstance(e, RangePacked))
        assert (packed.generation, packed.num_tokens, packed.size_bytes) == (7, 9, 9 * bench.runner.kv_bytes_per_token)


async def test_a_first_token_of_prefills_does_not_wait_for_the_next_step():
    first, before, behind = Gate(), Gate(after=1), Gate()
    async with Bench(FakeRunner(64, BLOCK, before_execute=first)) as bench:
        bench.client.send(make_request("b", max_tokens=40))
        await first.wait_inside()
        bench.client.send(make_request("a", mode=KvMode.REMOTE))
        bench.runner.before_execute = before
        first.go.set()
        await bench.until(lambda e: isinstance(e, Admitted) and e.attempt == "a")
        await before.wait_inside()
        bench.client.send(FirstToken("a", 7))
        bench.runner.before_execute = behind
        before.go.set()
        await behind.wait_inside()
        try:
            token = await bench.until(lambda e: isinstance(e, TokensOut) and e.attempt == "a")
        finally:
            bench.runner.before_execute = None
            behind.go.set()
        assert token.token_ids == (7,)


class HeldBetweenLayers:
    """Holds the first step of a request in front of its first and of its second look between layers."""

    def __init__(self):
        self.first, self.second = Gate(), Gate()

    def __call__(self, num_layers):
        {1: self.first, 2: self.second}[num_layers](())


LATER = EngineRequest("later", Prompt(tuple(range(500, 512))), SamplingParams(max_tokens=3, ignore_eos=True))


def pull_of(request):
    """The commands of a pull of its first two blocks, which brings nothing but zeros, up to its end."""
    tokens = request.prompt.token_ids[: 2 * BLOCK]
    payload = memoryview(bytes(2 * BLOCK * FakeRunner(1, BLOCK, num_layers=3).kv_bytes_per_token))
    return PullBlocks("pull", Prompt(tokens)), UnpackRange("pull", 1, 0, 2 * BLOCK, payload, pull=True), EndPull("pull")


async def test_commands_of_pulls_do_not_wait_for_the_running_step():
    held = HeldBetweenLayers()
    async with Bench(FakeRunner(64, BLOCK, num_layers=3, between_layers=held)) as bench:
        bench.client.send(make_request("running"))
        await held.first.wait_inside()
        for command in (*pull_of(LATER), LATER):
            bench.client.send(command)
        bench.client.send(PublishCached("source/pull", (bytes(16),), 0, "reader"))
        held.first.go.set()
        await held.second.wait_inside()
        pulled = await bench.until(lambda e: isinstance(e, Pulled))
        assert pulled == Pulled("pull", 2 * BLOCK, 2 * BLOCK)
        await bench.end_of("source/pull")
        assert not any(isinstance(e, Admitted) and e.attempt == "later" for e in bench.events)
        assert bench.client.stats().busy_since is not None, "all of that in the midst of a step"
        held.second.go.set()
        await bench.end_of("later")
        admitted = await bench.until(lambda e: isinstance(e, Admitted) and e.attempt == "later")
        assert admitted.num_cached_tokens == 2 * BLOCK
        assert (await bench.client.audit(full=True)).violations == ()


async def test_what_is_sent_behind_the_end_of_a_pull_finds_its_blocks():
    """Where a step has no layers to look between, all of it is handled at its end: at once, and in this order."""

    class Whole(FakeRunner):
        @property
        def capabilities(self):
            return replace(super().capabilities, reports_layers=False)

    gate = Gate()
    async with Bench(Whole(64, BLOCK, num_layers=3, before_execute=gate)) as bench:
        bench.client.send(make_request("running"))
        await gate.wait_inside()
        for command in (*pull_of(LATER), LATER):
            bench.client.send(command)
        gate.go.set()
        await bench.end_of("later")
        admitted = await bench.until(lambda e: isinstance(e, Admitted) and e.attempt == "later")
        assert admitted.num_cached_tokens == 2 * BLOCK


async def test_a_dead_engine_answers_the_commands_of_pulls():
    bench = Bench()
    bench.client.start()
    await bench.client.close(DEADLINE_S)
    begin, unpack, end = pull_of(make_request())
    for command in (begin, unpack, end):
        bench.client.send(command)
    await bench.until(lambda e: e == RangeUnpacked("pull", 1, False))
    await bench.until(lambda e: sum(isinstance(other, Failed) for other in bench.events) == 2)


async def test_the_interval_of_polls_is_that_of_layers_and_of_whole_steps_without():
    """In the time of a clock that rises by a second between two layers."""

    async def interval(reports_layers):
        clock = FakeClock()

        class Steps(FakeRunner):
            @property
            def capabilities(self):
                return replace(super().capabilities, reports_layers=reports_layers)

        runner = Steps(64, BLOCK, num_layers=5, between_layers=lambda num_layers: clock.advance(1.0))
        async with Bench(runner, clock=clock) as bench:
            assert bench.client.stats().poll_interval_s == 0.0
            bench.client.send(make_request(max_tokens=40))
            await bench.end_of()
            await bench.client.audit()
            return bench.client.stats().poll_interval_s

    assert await interval(True) == pytest.approx(1.0, rel=0.01)
    assert await interval(False) == pytest.approx(4.0, rel=0.01)


async def test_sixteen_streams_at_once_equal_each_alone():
    async def ids(client, attempt, num_prompt):
        request = make_request(attempt, num_prompt)
        return [t async for e in client.generate(request) if isinstance(e, TokensOut) for t in e.token_ids]

    async with Bench() as together:
        got = await asyncio.gather(*(ids(together.client, f"r{i}", 3 + i) for i in range(16)))
    async with Bench() as alone:
        assert got == [await ids(alone.client, f"r{i}", 3 + i) for i in range(16)]


async def test_streams_of_an_engine_that_launches_ahead_equal_each_alone():
    async def ids(client, attempt, num_prompt):
        request = make_request(attempt, num_prompt, max_tokens=20)
        return [t async for e in client.generate(request) if isinstance(e, TokensOut) for t in e.token_ids]

    async with Bench(FakeDeviceRunner(64, BLOCK)) as together:
        got = await asyncio.gather(*(ids(together.client, f"r{i}", 3 + i) for i in range(8)))
        assert together.runner.most_in_flight == 2
        audit = await together.client.audit(full=True)
        assert not audit.violations
        assert audit.blocks.running == 0
    async with Bench() as alone:
        assert got == [await ids(alone.client, f"r{i}", 3 + i) for i in range(8)]


async def test_closing_waits_for_the_step_on_the_device():
    gate = Gate(after=6)
    runner = FakeDeviceRunner(64, BLOCK, before_execute=gate)
    async with Bench(runner) as bench:
        bench.client.send(make_request(max_tokens=200))
        await bench.until(lambda e: isinstance(e, TokensOut) and e.offset == 3)
        await gate.wait_inside()
        asyncio.get_running_loop().call_soon(gate.go.set)  # once the closing waits
    assert not runner._queue
    assert isinstance(await bench.end_of(), Failed)


async def test_events_of_a_large_step_go_out_while_the_next_one_is_on_the_device():
    """And none is lost or waits when the steps end."""

    class Device(FakeRunner):
        def __init__(self):
            super().__init__(64, BLOCK)
            self.on_launched = lambda: None
            self.steps_ahead = True

        def launch(self, seqs, sources=()):
            raise AssertionError("no steps ahead were asked for")

        def execute(self, seqs, should_abort=None):
            result = super().execute(seqs, should_abort)
            self.on_launched()
            return result

    attempts = [f"r{i}" for i in range(12)]
    async with Bench(Device(), steps_ahead=False) as bench:
        for attempt in attempts:
            sampling = SamplingParams(max_tokens=5, ignore_eos=True, frequency_penalty=0.5)
            bench.client.send(EngineRequest(attempt, Prompt((100, 101)), sampling))
        for attempt in attempts:
            assert isinstance(await bench.end_of(attempt), Finished)
            mine = [event for event in bench.events if getattr(event, "attempt", "") == attempt]
            assert [event.offset for event in mine if isinstance(event, TokensOut)] == [0, 1, 2, 3, 4]


class HeldLaunches(FakeDeviceRunner):
    """A step that is to be launched waits for `go`."""

    def __init__(self) -> None:
        super().__init__(64, BLOCK)
        self.go = threading.Event()

    def launch(self, seqs, sources=()):
        assert self.go.wait(DEADLINE_S)
        return super().launch(seqs, sources)


async def test_on_a_device_a_first_token_does_not_wait_for_the_launch_of_its_first_step():
    """Where its KV was here before it."""
    async with Bench(HeldLaunches()) as bench:
        bench.client.send(make_request(num_prompt=8, max_tokens=2, mode=KvMode.REMOTE))
        await bench.until(lambda e: isinstance(e, Admitted))
        payload = memoryview(bytearray(8 * bench.runner.kv_bytes_per_token))
        bench.client.send(UnpackRange("a", 1, 0, 8, payload))
        await bench.until(lambda e: isinstance(e, RangeUnpacked))
        held = threading.Event()
        query = asyncio.create_task(bench.client._query(lambda core: held.wait(DEADLINE_S), DEADLINE_S))
        await asyncio.sleep(0)
        bench.client.send(FirstToken("a", 5))
        bench.client.send(KvComplete("a"))
        held.set()  # the step thread finds both
        await query
        first = await bench.until(lambda e: isinstance(e, TokensOut))
        assert first.token_ids == (5,)
        bench.runner.go.set()
        assert isinstance(await bench.end_of(), Finished)


@pytest.mark.parametrize("runner", [FakeDeviceRunner, FakeRunner])
async def test_on_a_device_the_event_loop_gets_a_moment_for_a_hand_off(runner, monkeypatch):
    """Launching the next prompt would take the interpreter from it. Only then: not for tokens."""
    slept = []
    monkeypatch.setattr(loop, "time", SimpleNamespace(sleep=slept.append))
    async with Bench(runner(64, BLOCK)) as bench:
        bench.client.send(GrantSlabs((SlabGrant(0, 7, memoryview(bytearray(4096))),)))
        bench.client.send(make_request(mode=KvMode.PREFILL))
        await bench.end_of()
        bench.client.send(make_request("b", max_tokens=3))
        await bench.end_of("b")
    assert slept == ([loop._HAND_OVER_S] if runner is FakeDeviceRunner else [])
