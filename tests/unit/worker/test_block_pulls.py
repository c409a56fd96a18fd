"""A pull's time is a timer's on the event loop: neither engine, link nor holder can hold a request up for longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.common.clock import FakeClock
from diptych.common.errors import WorkerLostError
from diptych.common.kv_format import full_format
from diptych.common.request import Prompt
from diptych.engine.messages import Command, EndPull, EngineEvent, Failed, PullBlocks, Pulled, PullStarted
from diptych.worker.reads import block_pulls
from diptych.worker.reads.block_pulls import BlockPulls, KvSource, PullFacts, _of_the_last
from diptych.worker.reads.link_rate import LinkRates
from diptych.worker.reads.range_reads import ReadContext
from diptych.worker.refs import WorkerRef

BLOCK = 4
PROMPT = Prompt(tuple(range(100, 121)))
END = 20
KEYS = tuple(bytes([i]) * 16 for i in range(END // BLOCK))
HOLDER = WorkerRef("d0", "life", "d0:1")
NEVER_S = 3600.0


class Bench:
    """Pulls of a worker whose engine answers `answers` at once: to PullBlocks, and to EndPull."""

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.begins: Callable[[str], list[EngineEvent]] = lambda name: [PullStarted(name, 0, KEYS)]
        self.ends: Callable[[str], list[EngineEvent]] = lambda name: []
        self.done: list[PullFacts] = []
        self.clock, self.links = FakeClock(), LinkRates()
        self.fetching = asyncio.Event()
        self.fetched = asyncio.Event()
        """Opens the link to the holder."""
        context: Any = ReadContext(
            peers=SimpleNamespace(drop=lambda ref: None),  # type: ignore[arg-type]
            reader=None,  # type: ignore[arg-type]
            unpacker=None,  # type: ignore[arg-type]
            links=self.links,
            clock=self.clock,
            kv=full_format(2, 1, 4, block_size=BLOCK, dtype="int8"),
        )
        self.pulls = BlockPulls(self, context, lambda: WorkerRef("p0", "life", "p0:1"), self.done.append)  # type: ignore[arg-type]
        self.pulls._fetch = self._fetch  # type: ignore[method-assign]

    async def _fetch(self, fetch: Any, started: PullStarted, facts: PullFacts) -> None:
        self.fetching.set()
        await self.fetched.wait()

    def send(self, command: Command) -> None:
        self.sent.append(command)
        if isinstance(command, PullBlocks):
            self.pulls.on_step(self.begins(command.attempt))
        elif isinstance(command, EndPull):
            self.pulls.on_step(self.ends(command.attempt))

    @property
    def kinds(self) -> list[type]:
        return [type(command) for command in self.sent]

    async def pull(self, attempt: str = "a", compute_s: float = 0.0) -> PullFacts | None:
        return await self.pulls.pull(
            KvSource(HOLDER, END, compute_s), PROMPT, attempt=attempt, request_id="r", remaining_s=NEVER_S
        )


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(block_pulls, "LEAST_S", 0.0)
    return Bench()


async def test_an_engine_that_does_not_begin_holds_nothing_up(bench: Bench) -> None:
    """Its step goes on, so it has not even looked at PullBlocks."""
    bench.begins = lambda name: []
    facts = await bench.pull()
    assert facts is not None
    assert "p0 took longer than computing would have" in facts.note
    assert bench.kinds == [PullBlocks, EndPull]
    assert not bench.done
    bench.pulls.on_step([PullStarted("pull/a", 0, KEYS), Pulled("pull/a", 0)])
    assert not len(bench.pulls)
    assert bench.done == [facts]


async def test_a_holder_that_is_too_late_is_given_up_without_the_engines_answer(bench: Bench) -> None:
    facts = await bench.pull()
    assert facts is not None
    assert bench.fetching.is_set()
    assert "d0 took longer than computing would have (0 s)" in facts.note
    assert bench.kinds == [PullBlocks, EndPull]
    assert len(bench.pulls) == 1
    bench.pulls.on_step([Pulled("pull/a", 8, 8)])  # some of it had come
    assert not len(bench.pulls)
    assert facts.num_tokens == 8
    assert bench.done == [facts]


async def test_what_has_come_is_not_waited_for_either(bench: Bench) -> None:
    """The engine enters it into the cache before it looks at the request."""
    bench.fetched.set()
    facts = await bench.pull(compute_s=NEVER_S)
    assert facts is not None
    assert bench.kinds == [PullBlocks, EndPull]
    bench.pulls.on_step([Pulled("pull/a", END, END)])
    assert (facts.num_tokens, facts.note) == (END, "")


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        (Pulled("pull/a", 0, note="no free blocks"), "no free blocks"),
        (Failed("pull/a", WorkerLostError("the engine has ended")), "the engine has ended"),
    ],
)
async def test_what_the_engine_refuses_is_over(bench: Bench, answer: EngineEvent, note: str) -> None:
    bench.begins = lambda name: [answer]
    facts = await bench.pull(compute_s=NEVER_S)
    assert facts is not None
    assert facts.note == note
    assert bench.kinds == [PullBlocks]
    assert not len(bench.pulls)
    assert bench.done == [facts]


async def test_nothing_is_said_where_nothing_was_lacking(bench: Bench) -> None:
    bench.begins = lambda name: [Pulled(name, END)]
    assert await bench.pull(compute_s=NEVER_S) is None
    assert bench.kinds == [PullBlocks]
    assert not len(bench.pulls)
    assert not bench.done


async def test_one_that_waits_for_anothers_blocks_is_given_up_in_the_same_way(bench: Bench) -> None:
    first = asyncio.create_task(bench.pull("a", NEVER_S))
    await bench.fetching.wait()
    bench.ends = lambda name: [Pulled(name, 0)]
    second = await bench.pull("b")
    assert second is not None
    assert "took longer" in second.note
    assert bench.kinds == [PullBlocks, PullBlocks, EndPull]
    assert len(bench.pulls) == 1
    bench.fetched.set()
    await first
    assert not len(bench.pulls)


async def test_one_that_waited_for_anothers_blocks_takes_the_rest(bench: Bench) -> None:
    first = asyncio.create_task(bench.pull("a", NEVER_S))
    await bench.fetching.wait()
    bench.ends = lambda name: [Pulled(name, END, END)] if name == "pull/a" else [Pulled(name, 0)]
    second = asyncio.create_task(bench.pull("b", NEVER_S))
    await asyncio.sleep(0)  # it has asked its engine, and found the first one's blocks on their way
    bench.begins = lambda name: [Pulled(name, END)]
    bench.fetched.set()
    await first
    assert await second is None
    assert bench.kinds == [PullBlocks, PullBlocks, EndPull, EndPull, PullBlocks]
    assert not bench.pulls._coming


async def test_a_cancelled_pull_ends_with_the_engine(bench: Bench) -> None:
    task = asyncio.create_task(bench.pull(compute_s=NEVER_S))
    await bench.fetching.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.kinds == [PullBlocks, EndPull]
    assert not len(bench.pulls)
    bench.pulls.on_step([Pulled("pull/a", 0)])
    assert not bench.done


async def measured(bench: Bench, attempt: str, seconds: float, *, late: bool) -> float | None:
    """The overhead from the holder after a pull that took so long."""

    async def fetch(fetch: Any, started: PullStarted, facts: PullFacts) -> None:
        bench.clock.advance(seconds)
        if late:
            await asyncio.get_running_loop().create_future()

    bench.pulls._fetch = fetch  # type: ignore[method-assign]
    bench.ends = lambda name: [Pulled(name, 0 if late else END, 0 if late else END)]
    await bench.pull(attempt, 0.0 if late else NEVER_S)
    return bench.pulls.overheads().get("d0")


async def test_pulls_that_were_given_up_count_as_slow_ones(bench: Bench) -> None:
    """Else the mean is that of the fast ones, and the router plans slow ones for ever."""
    assert await measured(bench, "connects", 9.0, late=True) is None
    assert await measured(bench, "a", 0.5, late=True) == pytest.approx(0.5)
    assert await measured(bench, "b", 1.5, late=True) == pytest.approx(0.8)  # 0.3 of the difference
    # one that was given up early says nothing against it: it would have taken longer
    assert await measured(bench, "c", 0.1, late=True) == pytest.approx(0.8, rel=0.01)


@pytest.mark.parametrize(
    ("num_tokens", "tiers", "taken"),
    [
        (80, (), ()),
        (80, (("host", 32), ("disk", 16)), (("host", 32), ("disk", 16))),
        (40, (("host", 32), ("disk", 16)), (("host", 24), ("disk", 16))),
        (12, (("host", 32), ("disk", 16)), (("disk", 12),)),
        (0, (("host", 32),), ()),
    ],
)
def test_of_what_a_holder_has_a_reader_takes_the_end(num_tokens: int, tiers: Any, taken: Any) -> None:
    assert _of_the_last(num_tokens, tiers) == taken
