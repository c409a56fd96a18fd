"""Child processes that answer each line on stdin by one line of JSON on stdout: both ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from diptych_tests import waiting

SUPPORT = Path(__file__).resolve().parents[1]
PIPE = asyncio.subprocess.PIPE


class LineProcess:
    """A module of this package as a child process; `hello` is its first answer."""

    def __init__(self, process: asyncio.subprocess.Process, hello: dict[str, Any]) -> None:
        self.process = process
        self.hello = hello

    @classmethod
    async def spawn(cls, module: str, arguments: object, *, inside: tuple[str, ...] = (), quiet: bool = False) -> Self:
        """`inside`: a command that runs its arguments somewhere else, for example in another namespace."""
        path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
        process = await asyncio.create_subprocess_exec(
            *inside, sys.executable, "-P", "-m", f"diptych_tests.{module}", json.dumps(arguments),
            stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL if quiet else None,
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path},
        )  # fmt: skip
        assert process.stdout is not None
        hello = await asyncio.wait_for(process.stdout.readline(), waiting.DEADLINE_S)
        assert hello, f"{module} did not start"
        return cls(process, json.loads(hello))

    async def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(await asyncio.wait_for(self.process.stdout.readline(), waiting.DEADLINE_S))
        return answer

    async def freeze(self) -> None:
        """SIGSTOP, and wait until every thread is stopped."""

        def stopped() -> bool:
            tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

        self.process.send_signal(signal.SIGSTOP)
        await waiting.until(stopped, "every thread is stopped")

    async def stop(self) -> None:
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), waiting.DEADLINE_S)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
                raise


async def commands() -> AsyncIterator[list[str]]:
    """In the child: the words of each line on stdin, until it is closed."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while words := (await reader.readline()).decode().split():
        yield words


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)
