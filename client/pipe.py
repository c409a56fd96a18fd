"""One long-lived bidirectional stream, shared by many requests. It is opened on first use, and again after a failure.

    CLOSED --send--> OPEN --read fails, peer closes--> CLOSED (pending requests fail with the reason) --send--> OPEN ...

Messages queued during a write are sent together in the next one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio


class Pipe(ABC):
    """A stream that is opened when needed; subclasses fill and read it.

    Args:
        open_call: opens the call. When it fails, the reason is a grpc.RpcError.
    """

    def __init__(self, open_call: Callable[[], Any]) -> None:
        self._open_call = open_call
        self._call: Any = None
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._wake = asyncio.Event()

    def _send(self) -> None:
        """Call it when `_outgoing` has something to send."""
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
            pass  # the reader reports the reason

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
        """The next message, with everything queued; None: nothing is queued."""

    @abstractmethod
    def _incoming(self, message: Any) -> None: ...

    @abstractmethod
    def _broken(self, error: grpc.RpcError | None) -> None:
        """The stream ended; pending requests get no answer. `error` is None when the peer closed it."""

    async def close(self) -> None:
        """Close the stream; pending requests fail. Idempotent."""
        tasks, self._tasks = self._tasks, ()
        if self._call is not None:
            self._call.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
