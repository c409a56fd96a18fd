"""Grammars to programs, on the worker's event loop: a bounded cache, a few compiling processes, a time and a memory cap.

compile(grammar) -> cached? -> yes: Program
                         |--> being compiled? -> wait for the same result
                         |--> a process -> answer within time_cap_s of its CPU time -> loaded on a thread -> cache
                                     |--> "no": refused, and remembered as such
                                     |--> too much: killed, refused, and remembered for a minute
                                     |--> too late, without CPU time: killed, a retry may succeed, and not remembered
                                     |--> it is gone: once more on a new one; gone again: refused, and not remembered
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import socket
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from diptych.common import child
from diptych.common.errors import DiptychError, InvalidRequestError, NoWorkerError, OverloadedError
from diptych.common.grammar import Grammar, GrammarKind
from diptych.engine.grammar.process import BEGAN, READY
from diptych.engine.grammar.program import AfterText, Program, first_mask
from diptych.engine.grammar.regex_size import MAX_REPEATS, repeats

log = structlog.get_logger(__name__)

_START_S = 120.0
"""For a compiling process to import its libraries, on a machine that is busy."""
WARM_UP_S = 10.0
"""So long a worker that is ready but for it waits for its first compiling process: it can serve all else."""
_RETRY_S = 5.0
_CPU_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_MAX_FRAME = 1 << 30
_MAX_REFUSED = 256
_TOO_SLOW_S = 60.0
_WALL_FACTOR = 6.0
"""A compilation may take so many times its cap of CPU time: what a busy machine holds up is no fault of the grammar."""
_LONG_S = 1.0
"""Most grammars take milliseconds."""
_QUICK_CPU_S, _NICE = 1.0, 10
"""A compilation begins as one thread among those of the worker, which may use every core: with a lower priority it would
hardly get anywhere. After so many seconds of CPU time the worker's own threads come first."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Args:
    time_cap_s, memory_bytes: of one compilation; seconds of CPU time.
    cache_bytes: of compiled grammars that are kept.
    max_waiting: grammars that are compiled or wait for it; more are refused with OverloadedError.
    """

    time_cap_s: float = 5.0
    memory_bytes: int = 1 << 30
    cache_bytes: int = 64 << 20
    max_waiting: int = 64
    num_processes: int = 2


class Compiling(Protocol):
    """One compiling process."""

    async def compile(self, grammar: Grammar) -> bytes:
        """Raises: InvalidRequestError; ConnectionError when the process is gone or does not begin; TimeoutError when it has
        begun and computed for longer than it may; OverloadedError when it got too little CPU time to end."""
        ...

    async def prepare(self) -> None:
        """Have it up before there is anything to compile. Raises: NoWorkerError."""
        ...

    @property
    def spent(self) -> bool:
        """It has compiled for so long that its priority was lowered, for good: not to be used again."""
        ...

    def kill(self) -> None: ...


class GrammarCompiler:
    """Args:
    start: starts a compiling process. load: makes a program of what it answers (takes a while; called on a thread).
    after_text: wraps a program that holds only after a text.
    """

    def __init__(
        self,
        start: Callable[[], Compiling],
        load: Callable[[bytes], Program],
        after_text: Callable[[Program, str], AfterText],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._start, self._load, self._after_text = start, load, after_text
        self._limits = limits or GrammarLimits()
        self._programs: OrderedDict[bytes, Program] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Why, and until when (on the loop's clock)."""
        self._pending: dict[bytes, asyncio.Task[Program]] = {}
        self._idle: list[Compiling] = []
        self._busy: set[Compiling] = set()
        self._spare: asyncio.Task[None] | None = None
        """Brings up a process before it is needed: the first, and one after a process that may not live long."""
        self._free = asyncio.Semaphore(self._limits.num_processes)
        self._changed = asyncio.Event()
        """A process has become idle, or has ended."""
        self._closed = False

    @property
    def cached_bytes(self) -> int:
        return sum(program.size_bytes for program in self._programs.values())

    async def compile(self, grammar: Grammar) -> Program:
        """Raises: InvalidRequestError naming `grammar`, OverloadedError; NoWorkerError when no compiling process comes up."""
        key = hashlib.blake2b(
            f"{grammar.kind.value}\0{grammar.compact}\0{grammar.source}".encode(), digest_size=16
        ).digest()
        program = self._programs.get(key)
        if program is None:
            program = await self._wait_for(key, grammar)
        else:
            self._programs.move_to_end(key)
        return self._after_text(program, grammar.free_until) if grammar.free_until else program

    async def compile_with_mask(self, grammar: Grammar) -> tuple[Program, bytes]:
        """Also the mask of the first token. Raises: as `compile` does."""
        program = await self.compile(grammar)
        return program, await asyncio.get_running_loop().run_in_executor(None, first_mask, program)

    def warm_up(self) -> None:
        """Have a compiling process come up, so that the first grammar finds it there. It takes a while; what this process
        imports is there already (Loaders.warm_up)."""
        self._have_another()

    async def warmed_up(self, within_s: float = WARM_UP_S) -> None:
        """Return once that process is up; also when it does not come up, or not in time."""
        if self._spare is not None:
            await asyncio.wait({self._spare}, timeout=within_s)

    async def _wait_for(self, key: bytes, grammar: Grammar) -> Program:
        if grammar.kind is GrammarKind.REGEX and repeats(grammar.source) > MAX_REPEATS:
            # It may well compile in time, and then be too slow to follow when the answer has begun.
            rule = f"grammar: its counted repetitions multiply to more than {MAX_REPEATS}"
            raise InvalidRequestError(rule, param="grammar")
        why, until = self._refused.get(key, ("", 0.0))
        if asyncio.get_running_loop().time() < until:
            raise InvalidRequestError(why, param="grammar")
        task = self._pending.get(key)
        if task is None:
            if self._closed:
                raise NoWorkerError("this worker shuts down", retry_after_s=1.0)
            if len(self._pending) >= self._limits.max_waiting:
                raise OverloadedError("too many grammars are waiting to be compiled", retry_after_s=1.0)
            task = self._pending[key] = asyncio.create_task(self._compile(key, grammar), name="compile a grammar")
            task.add_done_callback(lambda done: self._done(key, done))
        # One who leaves must not take the others' result away.
        return await asyncio.shield(task)

    def _done(self, key: bytes, task: asyncio.Task[Program]) -> None:
        self._pending.pop(key, None)
        if not task.cancelled():
            task.exception()  # retrieved, also when no caller waits any more

    async def _compile(self, key: bytes, grammar: Grammar) -> Program:
        async with self._free:
            compiled = await self._in_process(key, grammar)
        program = await asyncio.get_running_loop().run_in_executor(None, self._load, compiled)
        self._programs[key] = program
        while len(self._programs) > 1 and self.cached_bytes > self._limits.cache_bytes:
            self._programs.popitem(last=False)
        return program

    def _remember(self, key: bytes, why: str, for_s: float) -> None:
        self._refused[key] = (why, asyncio.get_running_loop().time() + for_s)
        self._refused.move_to_end(key)
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    async def _in_process(self, key: bytes, grammar: Grammar) -> bytes:
        try:
            return await self._on(await self._process(), key, grammar)
        except ConnectionError as error:  # it may have been killed, or have died while it was idle: no grammar's fault
            log.warning("a compiling process is gone", error=repr(error))
        try:
            return await self._on(self._start(), key, grammar)
        except ConnectionError as error:
            log.warning("a compiling process is gone, too", error=repr(error))
            raise InvalidRequestError(
                "grammar: the process that compiles it ended twice; it may take too much memory", param="grammar"
            ) from error

    async def _process(self) -> Compiling:
        """One that is up, where there is one or will be: most grammars take milliseconds, and to start a process takes a second
        of CPU time. After one that takes long the next one is coming (_on)."""
        while not self._idle and (self._busy or self._spare is not None):
            self._changed.clear()
            await self._changed.wait()
        return self._idle.pop() if self._idle else self._start()

    def _have_another(self) -> None:
        if not self._closed and not self._idle and self._spare is None:
            self._spare = asyncio.create_task(self._bring_up(self._start()), name="spare compiling process")

    async def _bring_up(self, process: Compiling) -> None:
        is_up = False
        try:
            await process.prepare()
            is_up = True
        except DiptychError as error:
            log.warning("a process that compiles grammars does not come up before it is needed", error=error.message)
        finally:
            self._spare = None
            if is_up and not self._closed:
                self._idle.append(process)
            else:
                process.kill()
            self._changed.set()

    async def _on(self, process: Compiling, key: bytes, grammar: Grammar) -> bytes:
        """Raises: ConnectionError when the process is gone."""
        self._busy.add(process)
        healthy = False
        long: asyncio.TimerHandle | None = None
        try:
            await process.prepare()  # its start may take long, and says nothing of the grammar
            # What takes long may be stopped by its time cap: have the next process up by then.
            long = asyncio.get_running_loop().call_later(_LONG_S, self._have_another)
            compiled = await process.compile(grammar)
            healthy = True
            return compiled
        except InvalidRequestError as error:
            healthy = True
            self._remember(key, error.message, math.inf)
            raise
        except TimeoutError:
            why = f"grammar: compiling it takes more than {self._limits.time_cap_s:g} s of CPU time"
            self._remember(key, why, _TOO_SLOW_S)
            raise InvalidRequestError(why, param="grammar") from None
        finally:
            if long is not None:
                long.cancel()
            self._busy.discard(process)
            if healthy and not process.spent and not self._closed:
                self._idle.append(process)
            else:
                process.kill()
            self._changed.set()

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [*self._pending.values(), *filter(None, (self._spare,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in (*self._idle, *self._busy):
            process.kill()
        self._idle.clear()


class ChildProcess:
    """See Compiling. The process starts with the first grammar, and ends with the event loop's thread."""

    def __init__(self, backend: str, model: str, limits: GrammarLimits) -> None:
        self._args = (
            backend, model, str(limits.memory_bytes), str(int(limits.time_cap_s) + 2),
        )  # fmt: skip
        self._time_cap_s = limits.time_cap_s
        self.spent = False
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def compile(self, grammar: Grammar) -> bytes:
        """Raises: also NoWorkerError when the process does not come up."""
        await self.prepare()
        values = {"kind": grammar.kind.value, "source": grammar.source, "compact": grammar.compact}
        try:
            async with asyncio.timeout(self._time_cap_s):
                await self._send(json.dumps(values).encode())
                if await self._receive() != BEGAN:
                    raise ConnectionError("it says something unexpected")
        except TimeoutError:  # stopped, or starved: no grammar's fault
            raise ConnectionError("it does not begin") from None
        answer = await self._within_cap()
        if answer[:1] != b"+":
            raise InvalidRequestError(answer[1:].decode(), param="grammar")
        return answer[1:]

    async def _within_cap(self) -> bytes:
        now = asyncio.get_running_loop().time
        began, computed_before = now(), self._cpu_s()
        receiving = asyncio.create_task(self._receive(), name="compiled grammar")
        try:
            while True:
                used_s = self._cpu_s() - computed_before
                left_s = self._time_cap_s - used_s
                if left_s <= 0:
                    raise TimeoutError
                if not self.spent:
                    self._give_way(used_s)
                    left_s = min(left_s, _QUICK_CPU_S)
                if now() - began > _WALL_FACTOR * self._time_cap_s:
                    raise OverloadedError("grammar: this machine is too busy to compile it now", retry_after_s=_RETRY_S)
                done, _ = await asyncio.wait({receiving}, timeout=max(left_s, _CPU_TICK_S))
                if done:
                    return receiving.result()
        finally:
            receiving.cancel()

    def _give_way(self, used_s: float) -> None:
        if used_s >= _QUICK_CPU_S and self._process is not None:
            self.spent = True
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)

    def _cpu_s(self) -> float:
        """CPU seconds of the process so far. Raises: ConnectionError when it is gone."""
        assert self._process is not None
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise ConnectionError("it is gone") from error
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) * _CPU_TICK_S

    async def prepare(self) -> None:
        """See Compiling."""
        if self._process is None or self._process.poll() is not None:  # it died while it was idle
            await self._started()

    async def _started(self) -> None:
        self._hang_up()
        ours, theirs = socket.socketpair()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                # Not the event loop's own subprocesses: uvloop forks, and this process holds UCX and gRPC (common/child.py).
                self._process = child.start(
                    (sys.executable, "-P", "-m", "diptych.engine.grammar.process", *self._args),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    env=child.environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
                )
            async with asyncio.timeout(_START_S):
                word = await self._receive()
        except (OSError, TimeoutError) as error:
            # Another worker may have one that is up already; so may we, a little later.
            raise NoWorkerError(
                "the process that compiles grammars does not come up", retry_after_s=_RETRY_S
            ) from error
        if word != READY:
            raise NoWorkerError("the process that compiles grammars says something unexpected")

    def kill(self) -> None:
        self._hang_up()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            asyncio.get_running_loop().run_in_executor(
                None, self._process.wait
            )  # without wait() the process stays a zombie

    def _hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _send(self, frame: bytes) -> None:
        assert self._writer is not None
        self._writer.write(struct.pack(">I", len(frame)) + frame)
        await self._writer.drain()

    async def _receive(self) -> bytes:
        assert self._reader is not None
        assert self._process is not None
        try:
            (size,) = struct.unpack(">I", await self._reader.readexactly(4))
            if size > _MAX_FRAME:
                raise ConnectionError("a frame of an impossible size")
            return await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise ConnectionError(f"it ended with {self._process.poll()}") from None
