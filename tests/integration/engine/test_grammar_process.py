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

from diptych.common.grammar import Grammar, GrammarKind
from diptych.engine.grammar.compiler import ChildProcess, GrammarCompiler, GrammarLimits
from diptych.engine.grammar.program import FirstToken

waiting = sys.modules["diptych_test_waiting"]


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
            """Processes: one, or two if the first was so slow to start that a spare was started."""
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
