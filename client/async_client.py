"""The asyncio client. One client belongs to one event loop and serves any number of concurrent calls over one
connection."""

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
from diptych.client.exchange import Attempts, Exchange, ReadOnce, RetryPolicy
from diptych.client.lookaside import Answer, DirectAnswer, Lookaside, RoutedAnswer, may_fall_back
from diptych.client.request import GenerateOptions, build_request
from diptych.client.request_parts import may_stream_directly
from diptych.client.types import Completion, Delta, ModelInfo, models_from
from diptych.common.errors import DiptychError, RequestCancelledError
from diptych.rpc.errors import from_failure
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
        retry: tries after UNAVAILABLE, before the first message, and of streams with resume=True.
        api_key: None: the one in DIPTYCH_API_KEY, if it is set.
        tls: None: plain text.
        lookaside: the router only places requests and signs a ticket for each; answers come from decode workers directly.
            Where that fails the router relays the answer, or the rest of it.
    """

    def __init__(
        self,
        address: str = wire.DEFAULT_ADDRESS,
        *,
        timeout_s: float = wire.DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        api_key: str | None = None,
        tls: wire.Tls | None = None,
        lookaside: bool = False,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._rng = Random()
        self._metadata = wire.metadata(api_key)
        self._tls = tls
        self._channel: Any = None
        self._uses_lookaside = lookaside
        self._lookaside: Lookaside | None = None

    async def generate(self, **options: Unpack[GenerateOptions]) -> Completion:
        """Wait for the whole answer. Keywords: see GenerateOptions. Raises: DiptychError, see diptych.client.errors."""
        async with self.stream(**options) as stream:
            stream._without_deltas = True
            async for _ in stream:
                pass
            return stream.result

    def stream(self, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Stream an answer. The call begins with the first iteration. Keywords: see GenerateOptions.

        Raises: InvalidRequestError at once for values that cannot be sent; everything else while iterating.
        """
        request = build_request(options)
        timeout_s = options.get("timeout_s")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return AsyncStream(self, request, timeout_s, resume=bool(options.get("resume")))

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
        if self._lookaside is not None:
            await self._lookaside.close()
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

    async def _answer(self, request: router_pb2.GenerateRequest, exchange: Exchange, *, directly: bool) -> Answer:
        """Open the call at the decode worker (lookaside) or at the router. Raises: DiptychError."""
        channel = self._connected()
        if directly and self._uses_lookaside and may_stream_directly(request):
            if self._lookaside is None:
                self._lookaside = Lookaside(channel, address=self.address, metadata=self._metadata, tls=self._tls)
            try:
                return await self._lookaside.begin(request, exchange.remaining_s())
            except DiptychError as error:
                if not may_fall_back(error, request, placing=True):
                    raise
        call = wire.generate_method(channel)(request, timeout=exchange.remaining_s(), metadata=self._metadata)
        return RoutedAnswer(call, self.address)

    def _attempts(self, timeout_s: float) -> Attempts:
        return Attempts(timeout_s, self._retry, time.monotonic, self._rng)


class AsyncStream(ReadOnce):
    """One streamed answer: iterate it (once), then read `result`.

    Leaving the iteration before its end, in whatever way (break, an exception, cancellation, `aclose`, the end of an
    `async with` block, garbage collection), cancels the request in the whole cluster.
    """

    def __init__(
        self, client: AsyncClient, request: router_pb2.GenerateRequest, timeout_s: float, *, resume: bool
    ) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._resume = resume
        self._answer: Answer | None = None
        self._directly = True
        self._without_deltas = False
        """True: deltas are not delivered; DirectAnswer collects the answer and wakes the task once, at its end."""
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _Deltas(self, self._begin(self._client._attempts(self._timeout_s), self._request, resume=self._resume))

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
        if self._answer is not None:
            self._answer.cancel()

    async def _next(self, exchange: Exchange) -> Delta:
        while True:
            if self._closed:
                raise RequestCancelledError("the stream was closed")
            try:
                return await self._next_of(exchange)
            except DiptychError as error:
                pause = self._pause_before_retry(exchange, error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closed and not (task and task.cancelling()):
                    # The call was cancelled (by `aclose` in another task), not this task.
                    raise RequestCancelledError("the stream was closed") from None
                raise
            await asyncio.sleep(pause)

    async def _next_of(self, exchange: Exchange) -> Delta:
        """Raises: StopAsyncIteration at the end, DiptychError."""
        if self._answer is None:
            self._answer = await self._client._answer(exchange.request, exchange, directly=self._directly)
            if self._closed:
                self._answer.cancel()
        if self._without_deltas and isinstance(self._answer, DirectAnswer):
            await self._answer.forward_all(exchange)
        while True:
            kind, event = await self._answer.next()
            if kind == "failure":
                raise from_failure(event)
            if not kind:
                exchange.on_end()
                raise StopAsyncIteration
            pieces = self._answer.pieces if isinstance(self._answer, RoutedAnswer) else ()
            delta = exchange.on_event(kind, event, pieces)
            if delta is not None:
                return delta

    def _pause_before_retry(self, exchange: Exchange, error: DiptychError) -> float:
        """Seconds to wait before the request is sent again, to the router or to a worker. Raises: `error` when it is
        final."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.cancel()  # after a protocol violation the call is still open; no effect on an ended one
        if isinstance(answer, DirectAnswer) and may_fall_back(error, self._request, placing=False):
            self._directly = False
            self._request.sampling.seed = answer.seed  # the same seed draws the same tokens
            exchange.resume()
            return 0.0
        return exchange.on_error(error)


class _Deltas(AsyncIterator[Delta]):
    """The iterator of one `async for`. The loop holds the only reference, so leaving the loop deletes it, which cancels
    the call."""

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
        # Garbage collection may run on any thread, but the call belongs to the loop's thread.
        with contextlib.suppress(RuntimeError):  # a closed loop has no calls left to cancel
            self._loop.call_soon_threadsafe(self._stream._cancel)
