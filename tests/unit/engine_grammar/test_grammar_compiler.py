"""The compiler's cache, bounds and ends, with processes that are played."""

from __future__ import annotations

import asyncio

import pytest

from diptych.common.errors import InvalidRequestError, NoWorkerError, OverloadedError
from diptych.common.grammar import Grammar, GrammarKind
from diptych.engine.grammar import compiler as compiler_module
from diptych.engine.grammar.compiler import ChildProcess, GrammarCompiler, GrammarLimits
from diptych.engine.grammar.program import FirstToken
from diptych_tests import waiting


class Played:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.killed = False
        self.gone = False
        self.spent = False

    async def compile(self, grammar: Grammar) -> bytes:
        self._stage.compiled.append(grammar.source)
        if gate := self._stage.gates.get(grammar.source):
            await gate.wait()
        if self.gone:
            raise ConnectionError("it ended with -9")
        outcome = self._stage.outcomes.get(grammar.source)
        if outcome is not None:
            raise outcome
        return bytes(self._stage.size)

    async def prepare(self) -> None:
        self._stage.prepared += 1
        if self._stage.slow_start is not None:
            await self._stage.slow_start.wait()

    def kill(self) -> None:
        self.killed = True


class Stage:
    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.processes: list[Played] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.outcomes: dict[str, Exception] = {}
        self.size = 400
        self.prepared = 0
        self.slow_start: asyncio.Event | None = None

    def start(self) -> Played:
        self.processes.append(Played(self))
        return self.processes[-1]

    def compiler(self, **limits) -> GrammarCompiler:
        return GrammarCompiler(self.start, FirstToken, lambda program, text: program, GrammarLimits(**limits))


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


async def test_a_grammar_is_compiled_once_also_for_many_at_a_time() -> None:
    stage = Stage()
    compiler = stage.compiler()
    stage.gates["a"] = asyncio.Event()
    waiting = [asyncio.create_task(compiler.compile(regex("a"))) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    stage.gates["a"].set()
    first, second = await asyncio.gather(*waiting[1:])
    assert first is second
    assert await compiler.compile(regex("a")) is first
    assert stage.compiled == ["a"]
    await compiler.close()
    assert stage.processes[0].killed


async def test_a_process_whose_priority_was_lowered_is_not_used_again() -> None:
    stage = Stage()
    compiler = stage.compiler(num_processes=1)
    stage.gates["long"] = asyncio.Event()
    compiling = asyncio.create_task(compiler.compile(regex("long")))
    await waiting.until(lambda: stage.compiled)
    stage.processes[0].spent = True
    stage.gates["long"].set()
    await compiling
    assert stage.processes[0].killed
    await compiler.compile(regex("next"))
    assert [process.killed for process in stage.processes] == [True, False]
    await compiler.close()


async def test_the_cache_is_bounded_and_the_least_used_goes_first() -> None:
    stage = Stage()
    compiler = stage.compiler(cache_bytes=1000)
    for source in ("a", "b", "a", "c", "a", "b"):
        await compiler.compile(regex(source))
    assert stage.compiled == ["a", "b", "c", "b"]
    assert compiler.cached_bytes <= 1000
    await compiler.close()


async def test_what_a_busy_machine_holds_up_may_be_tried_again_at_once() -> None:
    stage = Stage()
    stage.outcomes["held"] = OverloadedError("grammar: this machine is too busy to compile it now", retry_after_s=5.0)
    compiler = stage.compiler(num_processes=1)
    for _ in range(2):
        with pytest.raises(OverloadedError, match="too busy"):
            await compiler.compile(regex("held"))
    assert stage.compiled == ["held", "held"]
    assert all(process.killed for process in stage.processes)
    await compiler.close()


@pytest.mark.parametrize(
    ("outcome", "words", "survives"),
    [
        (InvalidRequestError("grammar: no", param="grammar"), "grammar: no", True),
        (TimeoutError(), "more than 5 s", False),
    ],
)
async def test_what_cannot_be_compiled_is_remembered_and_takes_its_process_with_it(outcome, words, survives) -> None:
    stage = Stage()
    stage.outcomes["bad"] = outcome
    compiler = stage.compiler(num_processes=1)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            await compiler.compile(regex("bad"))
        assert caught.value.param == "grammar"
    assert stage.compiled == ["bad"]
    await compiler.compile(regex("good"))
    assert stage.processes[0].killed is not survives
    assert len(stage.processes) == (1 if survives else 2)
    await compiler.close()


async def test_a_process_that_died_while_idle_is_no_grammars_fault() -> None:
    stage = Stage()
    compiler = stage.compiler(num_processes=1)
    await compiler.compile(regex("first"))
    stage.processes[0].gone = True
    await compiler.compile(regex("next"))
    assert stage.compiled == ["first", "next", "next"]
    assert [process.killed for process in stage.processes] == [True, False]
    await compiler.close()


async def test_a_refusal_of_a_dead_process_is_never_remembered() -> None:
    """The grammar may have brought it down, or somebody else: it gets its two processes again each time."""
    stage = Stage()
    stage.outcomes["bad"] = ConnectionError("it ended with -6")
    compiler = stage.compiler(num_processes=1)
    for times in (1, 2):
        with pytest.raises(InvalidRequestError, match="ended twice") as caught:
            await compiler.compile(regex("bad"))
        assert caught.value.param == "grammar"
        assert stage.compiled == ["bad"] * 2 * times
    assert all(process.killed for process in stage.processes)
    del stage.outcomes["bad"]
    await compiler.compile(regex("bad"))
    await compiler.close()


async def test_the_next_process_comes_up_while_a_grammar_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_LONG_S", 0.0)
    stage = Stage()
    compiler = stage.compiler(num_processes=1)
    stage.gates["slow"] = asyncio.Event()
    stage.outcomes["slow"] = TimeoutError()
    slow = asyncio.create_task(compiler.compile(regex("slow")))
    while stage.prepared < 2:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0)
    stage.gates["slow"].set()
    with pytest.raises(InvalidRequestError, match="more than 5 s"):
        await slow
    await compiler.compile(regex("innocent"))
    assert [process.killed for process in stage.processes] == [True, False]
    await compiler.close()
    assert stage.processes[1].killed


@pytest.mark.parametrize("warm", [True, False], ids=["warmed up", "at the first grammar"])
async def test_a_slow_start_of_a_process_starts_no_second_one(monkeypatch: pytest.MonkeyPatch, warm: bool) -> None:
    monkeypatch.setattr(compiler_module, "_LONG_S", 0.0)
    stage = Stage()
    stage.slow_start = asyncio.Event()
    compiler = stage.compiler()
    if warm:
        compiler.warm_up()
    compiled = asyncio.create_task(compiler.compile(regex("a")))
    for _ in range(20):  # turns of the loop: a timer of 0 s is long over
        await asyncio.sleep(0)
    assert stage.prepared == 1
    stage.slow_start.set()
    await compiled
    assert len(stage.processes) == 1
    await compiler.close()


async def test_the_first_process_is_waited_for_but_not_for_ever() -> None:
    stage = Stage()
    stage.slow_start = asyncio.Event()
    compiler = stage.compiler()
    await compiler.warmed_up()
    assert stage.prepared == 0, "nobody asked for one"
    compiler.warm_up()
    await compiler.warmed_up(within_s=0.001)
    up = asyncio.create_task(compiler.warmed_up())
    await asyncio.sleep(0)
    assert not up.done()
    stage.slow_start.set()
    await up
    await compiler.compile(regex("a"))
    assert len(stage.processes) == 1
    await compiler.close()


@pytest.mark.parametrize("long_s", [60.0, 0.0], ids=["quick", "long"])
async def test_a_grammar_waits_for_the_process_that_is_up_unless_it_is_busy_for_long(
    monkeypatch: pytest.MonkeyPatch, long_s: float
) -> None:
    monkeypatch.setattr(compiler_module, "_LONG_S", long_s)
    stage = Stage()
    stage.gates["a"] = asyncio.Event()
    compiler = stage.compiler()
    first = asyncio.create_task(compiler.compile(regex("a")))
    second = asyncio.create_task(compiler.compile(regex("b")))
    if long_s:
        for _ in range(20):  # turns of the loop: another process would have begun
            await asyncio.sleep(0)
        assert (stage.compiled, len(stage.processes)) == (["a"], 1)
    else:
        await second
    stage.gates["a"].set()
    await asyncio.gather(first, second)
    assert (stage.compiled, len(stage.processes)) == (["a", "b"], 1 if long_s else 2)
    await compiler.close()


async def test_what_was_too_slow_may_try_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.outcomes["slow"] = TimeoutError()
    compiler = stage.compiler()
    with pytest.raises(InvalidRequestError, match="more than 5 s"):
        await compiler.compile(regex("slow"))
    del stage.outcomes["slow"]
    with pytest.raises(InvalidRequestError, match="more than 5 s"):
        await compiler.compile(regex("slow"))
    loop = asyncio.get_running_loop()
    later = loop.time() + 61
    monkeypatch.setattr(loop, "time", lambda: later)
    await compiler.compile(regex("slow"))
    assert stage.compiled == ["slow", "slow"]
    monkeypatch.undo()
    await compiler.close()


async def test_the_queue_is_bounded_and_closing_ends_what_waits() -> None:
    stage = Stage()
    compiler = stage.compiler(max_waiting=2, num_processes=1)
    stage.gates["a"] = asyncio.Event()
    waiting = [asyncio.create_task(compiler.compile(regex(source))) for source in ("a", "b")]
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await compiler.compile(regex("c"))
    await compiler.close()
    assert all(
        isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*waiting, return_exceptions=True)
    )
    assert stage.processes[0].killed


async def test_a_process_that_does_not_come_up_refuses_nothing_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module.sys, "executable", "/bin/false")
    limits = GrammarLimits(num_processes=1)
    started: list[ChildProcess] = []

    def start() -> ChildProcess:
        started.append(ChildProcess("auto", "model", limits))
        return started[-1]

    compiler = GrammarCompiler(start, FirstToken, lambda program, text: program, limits)  # type: ignore[arg-type, return-value]
    for _ in range(2):
        with pytest.raises(NoWorkerError) as caught:
            await compiler.compile(regex("a"))
        assert (caught.value.http_status, caught.value.retry_after_s) == (503, 5.0)
    assert len(started) == 2
    await compiler.close()
