"""The real compiling process: what it holds of the worker, and its death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import uvloop
from tokenizers import Tokenizer, models, pre_tokenizers

from diptych.common.errors import InvalidRequestError, OverloadedError
from diptych.common.grammar import Grammar, GrammarKind, Tag, Tags
from diptych.common.text.tokenizer import ModelTokenizer
from diptych.engine.grammar import process as process_module
from diptych.engine.grammar.backends import Compilers
from diptych.engine.grammar.compiler import ChildProcess, GrammarCompiler, GrammarLimits
from diptych.engine.grammar.process import BEGAN
from diptych.engine.grammar.program import FirstToken
from diptych.engine.grammar.vocabulary import vocabulary_of
from diptych_tests import waiting


@pytest.fixture
def model(tmp_path: Path) -> Path:
    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 257, "eos_token_id": 256}))
    return tmp_path


def sockets(pid: int) -> set[str]:
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        link = os.readlink(fd)
        found |= {link} if link.startswith("socket:") else set()
    return found


def test_it_holds_none_of_the_workers_sockets_and_its_death_is_nobodys_fault(model: Path) -> None:
    limits = GrammarLimits(num_processes=1, time_cap_s=3.0)
    started: list[ChildProcess] = []

    def start() -> ChildProcess:
        started.append(ChildProcess("llguidance", str(model), limits))
        return started[-1]

    async def story() -> None:
        compiler = GrammarCompiler(start, lambda _: FirstToken(bytes(64)), lambda program, text: program, limits)  # type: ignore[arg-type, return-value]

        async def idle() -> set[int]:
            """Processes: one, or two if a grammar took so long that another was started."""
            await waiting.until(lambda: compiler._spare is None)
            return {one._process.pid for one in compiler._idle}  # type: ignore[attr-defined]

        try:
            await compiler.compile(Grammar(GrammarKind.REGEX, "a"))
            first = await idle()
            for pid in first:
                assert f"socket:[{os.fstat(listener.fileno()).st_ino}]" not in sockets(pid)
                os.kill(pid, signal.SIGSTOP)  # its end is not noticed before it is written to
                os.kill(pid, signal.SIGKILL)
            await compiler.compile(Grammar(GrammarKind.REGEX, "b"))
            others = await idle() - first
            assert others
            for pid in others:
                os.kill(pid, signal.SIGSTOP)  # it cannot begin: no grammar's fault either
            await compiler.compile(Grammar(GrammarKind.REGEX, "c"))
            assert await idle() - first - others
        finally:
            await compiler.close()
            for one in started:
                assert one._process is not None
                await asyncio.to_thread(one._process.wait, 30)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        os.set_inheritable(listener.fileno(), True)  # as libraries make them
        uvloop.run(story())


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA),
    "compact schema": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA, compact=True),
    "regex": Grammar(GrammarKind.REGEX, "[a-z]+@(x|yy)"),
    "choice": Grammar(GrammarKind.CHOICE, '["a", "b"]'),
    "EBNF": Grammar(GrammarKind.EBNF, 'root ::= "a" [0-9]+'),
    "Lark": Grammar(GrammarKind.EBNF, 'start: "a" DIGITS\nDIGITS: /[0-9]{2}/'),
    "tags": Grammar(GrammarKind.TAGS, Tags((Tag("<a>", SCHEMA, "</a>"),), trigger="<a>").dump()),
    "tags or JSON": Grammar(GrammarKind.TAGS, Tags((Tag("<a>", SCHEMA, "</a>"),), instead=SCHEMA).dump()),
    "broken regex": Grammar(GrammarKind.REGEX, "(("),
    "broken schema": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": 1}'),
    "broken EBNF": Grammar(GrammarKind.EBNF, "root ::= ("),
}


def mapped_files(process: ChildProcess) -> str:
    assert process._process is not None
    return Path(f"/proc/{process._process.pid}/maps").read_text()


async def test_it_compiles_without_torch_what_xgrammar_compiles_with_it(model: Path) -> None:
    whole = Compilers("xgrammar", vocabulary_of(ModelTokenizer(model)))
    process = ChildProcess("xgrammar", str(model), GrammarLimits(time_cap_s=60.0))
    try:
        for name, grammar in GRAMMARS.items():
            try:
                expected: bytes | str = whole.compile(grammar)
            except InvalidRequestError as error:
                expected = error.message
            try:
                found: bytes | str = await process.compile(grammar)
            except InvalidRequestError as error:
                found = error.message
            assert found == expected, name
        loaded = mapped_files(process)
        assert "xgrammar" in loaded
        assert "libtorch" not in loaded
    finally:
        process.kill()


def test_an_xgrammar_that_needs_torch_is_imported_whole(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class BecameAnother(Exception):
        pass

    def execv(program: str, arguments: list[str]) -> None:
        assert program == sys.executable
        assert arguments == [*sys.orig_argv, "whole"]
        raise BecameAnother

    def refuse() -> None:
        raise ImportError("import of torch halted")

    monkeypatch.setattr(process_module, "import_alone", refuse)
    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(BecameAnother):
        process_module.main("auto", "no folder", 1, 1)
    assert "import of torch halted" in capfd.readouterr().err


async def test_the_process_compiles_with_the_whole_library_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = ChildProcess("xgrammar", str(model), GrammarLimits(time_cap_s=60.0))
    monkeypatch.setattr(process, "_args", (*process._args, "whole"))
    try:
        assert (await process.compile(GRAMMARS["choice"]))[:1] == b"x"
        assert "libtorch" in mapped_files(process)
    finally:
        process.kill()


async def test_a_compilation_that_gets_no_cpu_time_is_no_fault_of_its_grammar(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ChildProcess("llguidance", str(model), GrammarLimits(time_cap_s=0.2))
    receive = process._receive

    async def stopped_once_begun() -> bytes:
        frame = await receive()
        assert frame == BEGAN
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(process, "_receive", asyncio.Event().wait)  # nothing more arrives
        return frame

    try:
        await process.prepare()
        monkeypatch.setattr(process, "_receive", stopped_once_begun)
        with pytest.raises(OverloadedError, match="too busy") as caught:
            await process.compile(Grammar(GrammarKind.REGEX, "a"))
        assert caught.value.retry_after_s is not None
    finally:
        process.kill()


async def test_a_compilation_is_capped_by_its_cpu_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = ChildProcess("llguidance", str(model), GrammarLimits(time_cap_s=0.2))
    used = iter((1.0, 1.1, 1.3))

    async def nothing_after_the_beginning() -> bytes:
        monkeypatch.setattr(process, "_receive", asyncio.Event().wait)
        return BEGAN

    try:
        await process.prepare()
        monkeypatch.setattr(process, "_cpu_s", lambda: next(used))
        monkeypatch.setattr(process, "_receive", nothing_after_the_beginning)
        with pytest.raises(TimeoutError):
            await process.compile(Grammar(GrammarKind.REGEX, "a"))
        assert next(used, None) is None
    finally:
        process.kill()


async def test_a_long_compilation_gives_way_to_the_worker(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one does not: on a machine whose cores the worker uses up it would hardly get anywhere."""
    process, own = (
        ChildProcess("llguidance", str(model), GrammarLimits(time_cap_s=5.0)),
        os.getpriority(os.PRIO_PROCESS, 0),
    )
    try:
        await process.compile(GRAMMARS["schema"])
        assert process._process is not None
        assert (os.getpriority(os.PRIO_PROCESS, process._process.pid), process.spent) == (own, False)
        used = iter((1.0, 2.1))
        monkeypatch.setattr(process, "_cpu_s", lambda: next(used))
        await process.compile(GRAMMARS["regex"])
        assert (os.getpriority(os.PRIO_PROCESS, process._process.pid), process.spent) == (max(own, 10), True)
    finally:
        process.kill()
