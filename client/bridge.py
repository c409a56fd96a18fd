"""The async client for callers without an event loop. A background thread runs the loop; a queue carries the deltas."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from diptych.client.async_client import AsyncClient, AsyncStream
from diptych.client.request import GenerateOptions
from diptych.client.types import Completion, Delta
from diptych.common.errors import RequestCancelledError

_CLOSE_S = 5.0
_T = TypeVar("_T")


class Bridge:
    """Runs an AsyncClient on a background thread.

    Args:
        make: makes the client, on the loop's thread. The thread starts with the first stream.
    """

    def __init__(self, make: Callable[[], AsyncClient]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: AsyncClient | None = None

    def stream(self, options: GenerateOptions) -> BridgedStream:
        """Raises: InvalidRequestError for values that cannot be sent."""
        with self._lock:
            if self._client is None:
                loop = self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=loop.run_forever, name="diptych-lookaside", daemon=True)
                self._thread.start()
                self._client = self._make()
        return BridgedStream(self, self._client.stream(**options))

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        if self._loop is None or self._loop.is_closed():
            work.close()
            raise RequestCancelledError("the client was closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel running calls and end the thread. Idempotent."""
        with self._lock:
            loop, thread, client = self._loop, self._thread, self._client
            self._loop = self._thread = self._client = None
        if loop is None or thread is None or client is None:
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_wind_up(client), loop).result(_CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_S)
        if not thread.is_alive():
            loop.close()


async def _wind_up(client: AsyncClient) -> None:
    await client.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class BridgedStream:
    """See Stream."""

    def __init__(self, bridge: Bridge, stream: AsyncStream) -> None:
        self._bridge = bridge
        self._stream = stream
        self._deltas: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self._pump: Future[None] | None = None
        self._closed = False

    @property
    def request_id(self) -> str:
        """The router's id of this request; empty before its first message."""
        return self._stream.request_id

    @property
    def result(self) -> Completion:
        """The whole answer. Raises: StreamBrokenError unless the stream has ended properly."""
        return self._stream.result

    def __iter__(self) -> Iterator[Delta]:
        if self._pump is not None:
            raise RuntimeError("a stream can be iterated once")
        self._pump = self._bridge.submit(_pump(self._stream, self._deltas))
        return _BridgedDeltas(self)

    def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent; safe from another thread."""
        self._closed = True
        if self._pump is not None:
            self._pump.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


async def _pump(stream: AsyncStream, deltas: queue.SimpleQueue[Delta | BaseException]) -> None:
    try:
        async with stream:
            async for delta in stream:
                deltas.put(delta)
        deltas.put(StopIteration())
    except asyncio.CancelledError:
        deltas.put(RequestCancelledError("the stream was closed"))
        raise
    except Exception as error:
        deltas.put(error)


class _BridgedDeltas(Iterator[Delta]):
    """The iterator of one `for`; deleting it cancels the request."""

    def __init__(self, stream: BridgedStream) -> None:
        self._stream = stream
        self._over = False

    def __next__(self) -> Delta:
        if self._over:
            raise StopIteration
        try:
            found = self._stream._deltas.get()
        except KeyboardInterrupt:
            self._stream.close()
            raise
        if isinstance(found, Delta):
            return found
        self._over = True
        raise found

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a closed loop has no calls left to cancel
            self._stream.close()
