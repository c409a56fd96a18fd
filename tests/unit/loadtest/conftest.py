"""Targets that need no network, and a loop that needs no time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from diptych.loadtest.figures.record import Outcome, RequestRecord
from diptych.loadtest.targets.target import Accepted, Ask, Chunk, Ended, Event, TargetError
from diptych.loadtest.virtual_loop import run_virtual


@dataclass
class ScriptedTarget:
    """First token after `first_s`, then `per_chunk` tokens every per_chunk * token_s. `fault` may raise or cut."""

    first_s: float = 0.1
    token_s: float = 0.02
    per_chunk: int = 4
    says: str = "ids"
    """ids: chunks carry token ids. usage: only the end has the count. nothing: no count."""
    fault: Callable[[int], str] = lambda number: ""
    slots: int = 0
    cached_tokens: int | None = 0
    """Reported by the server for each prompt; None: not reported."""
    label: str = "scripted"
    url: str = "http://scripted"
    asks: list[Ask] = field(default_factory=list)
    left: int = 0
    running: int = 0
    peak: int = 0

    async def open(self) -> str:
        return "scripted-model"

    async def close(self) -> None:
        return None

    async def send(self, ask: Ask) -> AsyncGenerator[Event, None]:
        self.asks.append(ask)
        fault = self.fault(len(self.asks) - 1)
        self.running += 1
        self.peak = max(self.peak, self.running)
        done = False
        try:
            if fault == "refuse":
                raise TargetError(Outcome.REFUSED, "HTTP 529: shed", status=529)
            yield Accepted()
            await asyncio.sleep(self.first_s)  # sleep: virtual time
            sent = 0
            for tokens in self._chunks(ask.max_tokens):
                if sent:
                    await asyncio.sleep(self.token_s * tokens)  # sleep: virtual time
                if fault == "cut" and sent:
                    raise TargetError(Outcome.CUT, "the stream ended without [DONE]")
                sent += tokens
                ids = (7,) * tokens if self.says == "ids" else ()
                yield Chunk("ab" * tokens, ids, tokens if self.says == "ids" else None)
            done = True
            total = None if self.says == "nothing" else sent
            yield Ended("length", len(ask.token_ids) or None, total, self.cached_tokens)
        finally:
            self.running -= 1
            self.left += not done and fault == ""

    def _chunks(self, total: int) -> list[int]:
        rest = total - 1
        chunks = [1] + [self.per_chunk] * (rest // self.per_chunk)
        return chunks + ([rest % self.per_chunk] if rest % self.per_chunk else [])


@pytest.fixture
def scripted() -> type[ScriptedTarget]:
    return ScriptedTarget


@pytest.fixture
def virtual() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine on a clock that jumps; no sockets."""
    return lambda main: run_virtual(main, grace_s=0.0)


@pytest.fixture
def record() -> Callable[..., RequestRecord]:
    """A whole answer: 100 ms to the first token, then chunks of the given tokens, 20 ms a token."""

    def make(index: int = 0, at: float = 0.0, chunks: tuple[int, ...] = (1, 4, 4), **more: Any) -> RequestRecord:
        made = RequestRecord(index, "t", at, sent_s=at, input_tokens=10, outcome=Outcome.OK)
        now = at + 0.1
        for number, tokens in enumerate(chunks):
            now += 0.02 * tokens if number else 0.0
            made.chunk_times.append(now)
            made.chunk_tokens.append(tokens)
        made.end_s = now
        for name, value in more.items():
            setattr(made, name, value)
        return made

    return make
