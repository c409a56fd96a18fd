"""One long-lived bidirectional stream, shared by many requests: opened when it is first used, opened again after it broke.

    CLOSED --send--> OPEN --read fails, peer closes--> CLOSED (everybody who waits hears why) --send--> OPEN ...

What is sent while a write is under way goes out together in the next one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio


class Pipe(ABC):
    """Args:
    open_call: opens the call; the reason of its end is a grpc.RpcError.
    """

    def __init__(self, open_call: Callable[[], Any]) -> None:
        self._open_call = open_call
        self._call: Any = None
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._wake = asyncio.Event()

    def _send(self) -> None:
        """Something is there for `_outgoing`."""
        if self._call is None:
            call = self._call = self._open_call()
            self._tasks = (
                asyncio.create_task(self._read(call), name="pipe reader"),
                asyncio.create_task(self._write(call), name="pipe writer"),
            )
        self._wake.set()

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if (message := self._outgoing()) is not None:
                    await call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the reader knows why

    async def _read(self, call: Any) -> None:
        error: grpc.RpcError | None = None
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._incoming(message)
        except grpc.RpcError as failure:
            error = failure
        finally:
            call.cancel()
            if self._call is call:
                self._call = None
                self._tasks[1].cancel()
                self._broken(error)

    @abstractmethod
    def _outgoing(self) -> Any:
        """The next message, with all that waits; None: nothing does."""

    @abstractmethod
    def _incoming(self, message: Any) -> None: ...

    @abstractmethod
    def _broken(self, error: grpc.RpcError | None) -> None:
        """The stream ended; None: its other side closed it. Nothing that waited will be answered."""

    async def close(self) -> None:
        """Idempotent; whoever waits hears of it."""
        tasks, self._tasks = self._tasks, ()
        if self._call is not None:
            self._call.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
