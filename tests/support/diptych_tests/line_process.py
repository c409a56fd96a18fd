"""Child processes that answer each line on stdin by one line of JSON on stdout: both ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from diptych.common import child
from diptych_tests import fork_server, waiting


class LineProcess:
    """A module of this package as a child process; `hello` is its first answer."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | fork_server.ForkedProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process = process
        self.hello: dict[str, Any] = {}
        self._reader, self._writer = reader, writer

    @classmethod
    async def spawn(cls, module: str, arguments: object, *, inside: tuple[str, ...] = (), quiet: bool = False) -> Self:
        """`inside`: a command that runs its arguments somewhere else, for example in another namespace."""
        command = [*inside, sys.executable, "-P", "-m", f"diptych_tests.{module}", json.dumps(arguments)]
        path = os.pathsep.join(filter(None, (str(fork_server.SUPPORT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
        ours, theirs = socket.socketpair()
        with theirs:
            streams = {"stdin": theirs.fileno(), "stdout": theirs.fileno(), "stderr": child.DEVNULL if quiet else None}
            process = fork_server.start(command, env=env, **streams)
        found = cls(process, *await asyncio.open_unix_connection(sock=ours))
        try:
            found.hello = await found.answer()
        except BaseException:
            await found.stop()
            raise
        return found

    async def ask(self, line: str) -> dict[str, Any]:
        self._writer.write(line.encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        line = await asyncio.wait_for(self._reader.readline(), waiting.DEADLINE_S)
        assert line, f"process {self.process.pid} has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def freeze(self) -> None:
        """SIGSTOP, and wait until every thread is stopped."""

        def stopped() -> bool:
            tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

        self.process.send_signal(signal.SIGSTOP)
        await waiting.until(stopped, "every thread is stopped")

    async def ended(self) -> None:
        """Until it has ended: killed, or by itself."""
        await waiting.until(lambda: self.process.poll() is not None, "the process has ended")
        self._writer.close()

    async def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self._writer.write_eof()
        try:
            await self.ended()
        except TimeoutError:
            self.process.kill()
            await self.ended()
            raise


async def commands() -> AsyncIterator[list[str]]:
    """In the child: the words of each line on stdin, until it is closed."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while words := (await reader.readline()).decode().split():
        yield words


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)
