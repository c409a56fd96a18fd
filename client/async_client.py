"""The asyncio client. One client belongs to one event loop and serves any number of concurrent calls over one
connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from diptych.client import adapters as calls
from diptych.client import wire
from diptych.client.adapters import Adapter, adapter_from, adapters_from
from diptych.client.errors import UnreachableError
from diptych.client.exchange import CUT, Attempts, Exchange, ReadOnce, RetryPolicy
from diptych.client.lookaside import Answer, DirectAnswer, Lookaside, RoutedAnswer, may_fall_back
from diptych.client.request import GenerateOptions, build_request
from diptych.client.request_parts import may_stream_directly
from diptych.client.routers import HEALTH_TIMEOUT_S, Routers, health_method, is_serving
from diptych.client.sessions import SessionBase, session_defaults
from diptych.client.types import ClosedSession, Completion, Delta, ModelInfo, Usage, closed_from, models_from
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
        address: host:port of the router's gRPC server, or of several routers of one cluster: where one fails or does not
            serve, calls go to the next that is healthy, and streams go on there. Nothing is connected before the first call.
        timeout_s: deadline of `generate` and `stream` calls that do not bring their own.
        retry: tries after UNAVAILABLE, before the first message, and of streams with resume=True.
        api_key: None: the one in DIPTYCH_API_KEY, if it is set.
        tls: None: plain text.
        lookaside: the router only places requests and signs a ticket for each; answers come from decode workers directly.
            Where that fails the router relays the answer, or the rest of it.
    """

    def __init__(
        self,
        address: str | Sequence[str] = wire.DEFAULT_ADDRESS,
        *,
        timeout_s: float = wire.DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        api_key: str | None = None,
        tls: wire.Tls | None = None,
        lookaside: bool = False,
    ) -> None:
        self._routers = Routers(address)
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._rng = Random()
        self._metadata = wire.metadata(api_key)
        self._tls = tls
        self._channels: dict[str, Any] = {}
        self._uses_lookaside = lookaside
        self._lookaside: Lookaside | None = None

    @property
    def address(self) -> str:
        """Of the router in use."""
        return self._routers.current

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
        return self._stream(build_request(options), options)

    def _stream(self, request: router_pb2.GenerateRequest, options: GenerateOptions) -> AsyncStream:
        timeout_s = options.get("timeout_s")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        resume = options.get("resume")
        return AsyncStream(self, request, timeout_s, resume=self._routers.several if resume is None else resume)

    async def prefetch(self, **options: Unpack[GenerateOptions]) -> Usage:
        """Tell the cluster that this prompt comes next: its KV is computed, and claimed as by cache_ttl_s. Keywords: as for the
        request that follows; those of the answer have no effect. Returns: with the prompt tokens, and those that were cached
        already. Raises: DiptychError; OverloadedError where requests wait: then the hint is dropped."""
        request = build_request(options)
        request.prefetch = True
        async with self._stream(request, options) as stream:
            async for _ in stream:
                pass
            return stream.result.usage

    def session(
        self, session_id: str = "", *, cache_ttl_s: float | None = None, cache_priority: int | None = None
    ) -> AsyncSession:
        """Requests whose KV is claimed together in the workers' caches: see docs/api.md. Nothing is sent yet.

        Args:
            session_id: "": a new one.
            cache_ttl_s, cache_priority: of its requests that bring none of their own; see GenerateOptions.
        """
        return AsyncSession(self, session_defaults(session_id, cache_ttl_s, cache_priority))

    async def close_session(self, session_id: str, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> ClosedSession:
        """End a session: at all workers its claims end, and what only it has claimed is freed. Raises: DiptychError."""
        request = wire.close_session_request(session_id)
        return closed_from(await self._call(wire.close_session_method, request, timeout_s))

    async def list_models(self, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> list[ModelInfo]:
        """The models that the cluster serves now. Raises: DiptychError."""
        return models_from(await self._call(wire.list_models_method, router_pb2.ListModelsRequest(), timeout_s))

    async def list_adapters(self, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> list[Adapter]:
        """The adapters that this key may use, with their versions. Raises: DiptychError."""
        return adapters_from(await self._call(calls.LIST, router_pb2.ListAdaptersRequest(), timeout_s))

    async def load_adapter(
        self,
        name: str,
        folder: str,
        *,
        model: str = "",
        in_place: bool = False,
        canary_share: float = 0.0,
        timeout_s: float = calls.LOAD_TIMEOUT_S,
    ) -> Adapter:
        """Load a LoRA adapter at all workers and serve it under a name. Needs an admin key.

        Args:
            folder: an absolute path on the workers' machines, in one of their --lora-dir folders.
            model: name of the base model; "": the only one.
            in_place: replace the stable version of a name that exists.
            canary_share: above 0: the loaded version answers this share of the requests, and the stable one the others.
        Raises: InvalidRequestError naming what is wrong with the files or the name; DiptychError.
        """
        request = calls.add_request(name, folder, model, in_place, canary_share)
        return adapter_from(await self._call(calls.ADD, request, timeout_s))

    async def unload_adapter(self, name: str, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> Adapter:
        """Serve the adapter no longer; answers that run end well. Needs an admin key. Returns: what it was. Raises:
        ModelNotFoundError; DiptychError."""
        return adapter_from(await self._call(calls.REMOVE, calls.remove_request(name), timeout_s))

    async def set_adapter_canary(
        self, name: str, version: int, share: float, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S
    ) -> Adapter:
        """Have a kept version answer a share of the requests; share 0.0 ends the canary. Needs an admin key. Raises:
        DiptychError."""
        return adapter_from(await self._call(calls.ROUTE, calls.canary_request(name, version, share), timeout_s))

    async def promote_adapter(self, name: str, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> Adapter:
        """The canary answers all requests from now on. Needs an admin key. Raises: DiptychError."""
        return adapter_from(await self._call(calls.ROUTE, calls.promotion_request(name), timeout_s))

    async def roll_back_adapter(
        self, name: str, version: int = 0, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S
    ) -> Adapter:
        """End the canary; without one, serve the version again that was stable before. Nothing is loaded. Needs an admin key.

        Args: version: above 0: this kept version becomes the stable one in any case.
        Raises: DiptychError.
        """
        return adapter_from(await self._call(calls.ROUTE, calls.rollback_request(name, version), timeout_s))

    async def _call(self, method_of: Callable[[Any], Callable[..., Any]], request: object, timeout_s: float) -> Any:
        """A call with one answer, which may be made twice. Raises: DiptychError."""
        attempts = self._attempts(timeout_s)
        while True:
            address = self.address
            try:
                method = method_of(self._connected(address))
                return await method(request, timeout=attempts.remaining_s(), metadata=self._metadata)
            except grpc.RpcError as error:
                failure = wire.typed(error, address)
                pause = attempts.pause_after(failure)
            await asyncio.sleep(pause)
            await self._turn_from(address, failure)

    async def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        if self._lookaside is not None:
            await self._lookaside.close()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def _connected(self, address: str) -> Any:
        """The channel to this router."""
        channel = self._channels.get(address)
        if channel is None:  # made here and not in __init__: an aio channel belongs to the running loop
            if self._tls is None:
                channel = grpc.aio.insecure_channel(address, options=wire.options())
            else:
                credentials, options = self._tls.credentials(), wire.tls_options(self._tls)
                channel = grpc.aio.secure_channel(address, credentials, options=options)
            self._channels[address] = channel
        return channel

    async def _turn_from(self, address: str, error: DiptychError) -> None:
        """After a failed call: use another router, if there is one that serves. A router that answers with a typed error is
        asked first."""
        if not self._routers.several or error.grpc_code not in CUT:
            return
        order = self._routers.in_order(address)
        for other in order if isinstance(error, UnreachableError) else (address, *order[:-1]):
            try:
                check = health_method(self._connected(other))
                if is_serving(await check(b"", timeout=HEALTH_TIMEOUT_S, metadata=self._metadata)):
                    self._routers.use(address, other)
                    return
            except grpc.RpcError:
                continue
        self._routers.use(address, order[0])

    async def _answer(self, request: router_pb2.GenerateRequest, exchange: Exchange, *, directly: bool) -> Answer:
        """Open the call at the decode worker (lookaside) or at the router. Raises: DiptychError."""
        if directly and self._uses_lookaside and may_stream_directly(request):
            if self._lookaside is None:
                self._lookaside = Lookaside(
                    lambda: (self._connected(self.address), self.address), metadata=self._metadata, tls=self._tls
                )
            try:
                return await self._lookaside.begin(request, exchange.remaining_s())
            except DiptychError as error:
                if not may_fall_back(error, request, placing=True):
                    raise
                await self._turn_from(self.address, error)
        address = self.address
        method = wire.generate_method(self._connected(address))
        call = method(request, timeout=exchange.remaining_s(), metadata=self._metadata)
        return RoutedAnswer(call, address)

    def _attempts(self, timeout_s: float) -> Attempts:
        return Attempts(timeout_s, self._retry, time.monotonic, self._rng)


class AsyncSession(SessionBase):
    """A session of an AsyncClient, made by `AsyncClient.session`. As Session."""

    def __init__(self, client: AsyncClient, defaults: Mapping[str, Any]) -> None:
        super().__init__(defaults)
        self._client = client

    async def generate(self, **options: Unpack[GenerateOptions]) -> Completion:
        """See AsyncClient.generate."""
        return await self._client.generate(**self._with(options))

    def stream(self, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """See AsyncClient.stream."""
        return self._client.stream(**self._with(options))

    async def prefetch(self, **options: Unpack[GenerateOptions]) -> Usage:
        """See AsyncClient.prefetch."""
        return await self._client.prefetch(**self._with(options))

    async def close(self) -> ClosedSession:
        """See AsyncClient.close_session."""
        return await self._client.close_session(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


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
                address = self._answer.address if isinstance(self._answer, RoutedAnswer) else ""
                failure, pause = error, self._pause_before_retry(exchange, error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._closed and not (task and task.cancelling()):
                    # The call was cancelled (by `aclose` in another task), not this task.
                    raise RequestCancelledError("the stream was closed") from None
                raise
            await asyncio.sleep(pause)
            if address:
                await self._client._turn_from(address, failure)

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
