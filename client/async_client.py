"""The asyncio client. One client belongs to one event loop and holds one connection for any number of concurrent
calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from random import Random
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from diptych.client import wire
from diptych.client.errors import StreamBrokenError
from diptych.client.exchange import Attempts, Exchange, RetryPolicy
from diptych.client.request import GenerateOptions, build_request
from diptych.client.types import Completion, Delta, ModelInfo, models_from
from diptych.common.errors import RequestCancelledError
from diptych.rpc.v1 import router_pb2


class AsyncClient:
    """A connection to a Diptych router.

        async with AsyncClient("127.0.0.1:50050") as client:
            print((await client.generate(prompt="Once upon a time", max_tokens=32)).text)
            async for delta in client.stream(messages=[{"role": "user", "content": "Hi!"}]):
                print(delta.text, end="", flush=True)

    Args:
        address: host:port of the router's gRPC server. Nothing is connected before the first call.
        timeout_s: deadline of `generate` and `stream` calls that do not bring their own.
        retry: tries after UNAVAILABLE, before the first message only.
        api_key: None: the one in DIPTYCH_API_KEY, if it is set.
        tls: None: plain text.
    """

    def __init__(
        self,
        address: str = wire.DEFAULT_ADDRESS,
        *,
        timeout_s: float = wire.DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        api_key: str | None = None,
        tls: wire.Tls | None = None,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._rng = Random()
        self._metadata = wire.metadata(api_key)
        self._tls = tls
        self._channel: Any = None

    async def generate(self, **options: Unpack[GenerateOptions]) -> Completion:
        """Wait for the whole answer. Keywords: see GenerateOptions. Raises: DiptychError, see diptych.client.errors."""
        async with self.stream(**options) as stream:
            async for _ in stream:
                pass
            return stream.result

    def stream(self, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """An answer as it grows. The call begins with the first step of the iteration. Keywords: see GenerateOptions.

        Raises: InvalidRequestError at once for values that cannot be sent; everything else while iterating.
        """
        request = build_request(options)
        timeout_s = options.get("timeout_s")
        return AsyncStream(self, request, self._timeout_s if timeout_s is None else timeout_s)

    async def list_models(self, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> list[ModelInfo]:
        """The models that the cluster serves now. Raises: DiptychError."""
        attempts = self._attempts(timeout_s)
        while True:
            try:
                method = wire.list_models_method(self._connected())
                return models_from(
                    await method(
                        router_pb2.ListModelsRequest(), timeout=attempts.remaining_s(), metadata=self._metadata
                    )
                )
            except grpc.RpcError as error:
                pause = attempts.pause_after(wire.typed(error, self.address))
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def _connected(self) -> Any:
        if self._channel is None:  # made here and not in __init__: an aio channel belongs to the running loop
            if self._tls is None:
                self._channel = grpc.aio.insecure_channel(self.address, options=wire.options())
            else:
                credentials, options = self._tls.credentials(), wire.tls_options(self._tls)
                self._channel = grpc.aio.secure_channel(self.address, credentials, options=options)
        return self._channel

    def _attempts(self, timeout_s: float) -> Attempts:
        return Attempts(timeout_s, self._retry, time.monotonic, self._rng)


class AsyncStream:
    """One streamed answer: iterate it (once), then read `result`.

    Leaving the iteration before its end, in whatever way (break, an exception, cancellation, `aclose`, the end of an
    `async with` block, garbage collection), cancels the request in the whole cluster.
    """

    def __init__(self, client: AsyncClient, request: router_pb2.GenerateRequest, timeout_s: float) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._exchange: Exchange | None = None
        self._call: Any = None
        self._closed = False

    @property
    def request_id(self) -> str:
        """The router's id of this request; empty before its first message."""
        return self._exchange.request_id if self._exchange else ""

    @property
    def result(self) -> Completion:
        """The whole answer. Raises: StreamBrokenError while the stream has not ended properly."""
        if self._exchange is None:
            raise StreamBrokenError("there is no result: the stream was not read")
        return self._exchange.result()

    def __aiter__(self) -> AsyncIterator[Delta]:
        if self._exchange is not None:
            raise RuntimeError("a stream can be iterated once")
        self._exchange = Exchange(self._client._attempts(self._timeout_s))
        return _Deltas(self, self._exchange)

    async def aclose(self) -> None:
        """Cancel the call unless it has ended. Idempotent."""
        self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._cancel()

    def _cancel(self) -> None:
        self._closed = True
        if self._call is not None:
            self._call.cancel()  # of no effect after the end

    async def _next(self, exchange: Exchange) -> Delta:
        while True:
            if self._closed:
                raise RequestCancelledError("the stream was closed")
            try:
                if self._call is None:
                    method = wire.generate_method(self._client._connected())
                    self._call = method(self._request, timeout=exchange.remaining_s(), metadata=self._client._metadata)
                while (message := await self._call.read()) is not grpc.aio.EOF:
                    delta = exchange.on_message(message)
                    if delta is not None:
                        return delta
                exchange.on_end()
                raise StopAsyncIteration
            except grpc.RpcError as error:
                pause = exchange.on_error(wire.typed(error, self._client.address))
                self._call = None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closed and not (task and task.cancelling()):
                    # not our task was cancelled but the call, by aclose() elsewhere
                    raise RequestCancelledError("the stream was closed") from None
                raise
            await asyncio.sleep(pause)


class _Deltas(AsyncIterator[Delta]):
    """The iterator of one `async for`: nothing else holds it, so leaving the loop drops it, and dropping it cancels the
    call."""

    def __init__(self, stream: AsyncStream, exchange: Exchange) -> None:
        self._stream = stream
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()

    async def __anext__(self) -> Delta:
        try:
            return await self._stream._next(self._exchange)
        except StopAsyncIteration:
            raise
        except BaseException:
            self._stream._cancel()
            raise

    def __del__(self) -> None:
        # The collector may run on any thread; the call belongs to the loop's.
        with contextlib.suppress(RuntimeError):  # a loop that is closed has no call left to cancel
            self._loop.call_soon_threadsafe(self._stream._cancel)
