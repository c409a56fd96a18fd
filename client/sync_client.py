"""The synchronous client. Thread-safe; one client holds one connection for any number of concurrent calls."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from diptych.client import adapters as calls
from diptych.client import wire
from diptych.client.adapters import Adapter, adapter_from, adapters_from
from diptych.client.async_client import AsyncClient
from diptych.client.bridge import Bridge, BridgedStream
from diptych.client.errors import UnreachableError
from diptych.client.exchange import CUT, Attempts, Exchange, ReadOnce, RetryPolicy
from diptych.client.request import GenerateOptions, build_request
from diptych.client.routers import HEALTH_TIMEOUT_S, Routers, health_method, is_serving
from diptych.client.sessions import SessionBase, session_defaults
from diptych.client.types import ClosedSession, Completion, Delta, ModelInfo, Usage, closed_from, models_from
from diptych.common.errors import DiptychError, RequestCancelledError
from diptych.rpc.v1 import router_pb2


class Client:
    """A connection to a Diptych router.

        with Client("127.0.0.1:50050") as client:
            print(client.generate(prompt="Once upon a time", max_tokens=32).text)
            for delta in client.stream(messages=[{"role": "user", "content": "Hi!"}]):
                print(delta.text, end="", flush=True)

    Args:
        address: host:port of the router's gRPC server, or of several routers of one cluster: where one fails or does not
            serve, calls go to the next that is healthy, and streams go on there. Nothing is connected before the first call.
        timeout_s: deadline of `generate` and `stream` calls that do not bring their own.
        retry: tries after UNAVAILABLE, before the first message, and of streams with resume=True.
        api_key: None: the one in DIPTYCH_API_KEY, if it is set.
        tls: None: plain text.
        lookaside: the router only places requests and signs a ticket for each; answers come from decode workers directly.
            Where that fails the router relays the answer, or the rest of it. They are read on a thread of the client's own.
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
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._bridge = (
            Bridge(
                lambda: AsyncClient(address, timeout_s=timeout_s, retry=retry, api_key=api_key, tls=tls, lookaside=True)
            )
            if lookaside
            else None
        )

    @property
    def address(self) -> str:
        """Of the router in use."""
        return self._routers.current

    def generate(self, **options: Unpack[GenerateOptions]) -> Completion:
        """Wait for the whole answer. Keywords: see GenerateOptions. Raises: DiptychError, see diptych.client.errors."""
        with self.stream(**options) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(self, **options: Unpack[GenerateOptions]) -> Stream | BridgedStream:
        """Stream an answer. The call begins with the first iteration. Keywords: see GenerateOptions.

        Raises: InvalidRequestError at once for values that cannot be sent; everything else while iterating.
        """
        if self._bridge is not None:
            return self._bridge.stream(options)
        return self._stream(build_request(options), options)

    def _stream(self, request: router_pb2.GenerateRequest, options: GenerateOptions) -> Stream:
        timeout_s = options.get("timeout_s")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        resume = options.get("resume")
        return Stream(self, request, timeout_s, resume=self._routers.several if resume is None else resume)

    def prefetch(self, **options: Unpack[GenerateOptions]) -> Usage:
        """Tell the cluster that this prompt comes next: its KV is computed, and claimed as by cache_ttl_s. Keywords: as for the
        request that follows; those of the answer have no effect. Returns: with the prompt tokens, and those that were cached
        already. Raises: DiptychError; OverloadedError where requests wait: then the hint is dropped."""
        request = build_request(options)
        request.prefetch = True
        with self._stream(request, options) as stream:
            for _ in stream:
                pass
            return stream.result.usage

    def session(
        self, session_id: str = "", *, cache_ttl_s: float | None = None, cache_priority: int | None = None
    ) -> Session:
        """Requests whose KV is claimed together in the workers' caches: see docs/api.md. Nothing is sent yet.

        Args:
            session_id: "": a new one.
            cache_ttl_s, cache_priority: of its requests that bring none of their own; see GenerateOptions.
        """
        return Session(self, session_defaults(session_id, cache_ttl_s, cache_priority))

    def close_session(self, session_id: str, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> ClosedSession:
        """End a session: at all workers its claims end, and what only it has claimed is freed. Raises: DiptychError."""
        request = wire.close_session_request(session_id)
        return closed_from(self._call(wire.close_session_method, request, timeout_s))

    def list_models(self, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> list[ModelInfo]:
        """The models that the cluster serves now. Raises: DiptychError."""
        return models_from(self._call(wire.list_models_method, router_pb2.ListModelsRequest(), timeout_s))

    def list_adapters(self, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> list[Adapter]:
        """The adapters that this key may use, with their versions. Raises: DiptychError."""
        return adapters_from(self._call(calls.LIST, router_pb2.ListAdaptersRequest(), timeout_s))

    def load_adapter(
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
        return adapter_from(self._call(calls.ADD, request, timeout_s))

    def unload_adapter(self, name: str, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> Adapter:
        """Serve the adapter no longer; answers that run end well. Needs an admin key. Returns: what it was. Raises:
        ModelNotFoundError; DiptychError."""
        return adapter_from(self._call(calls.REMOVE, calls.remove_request(name), timeout_s))

    def set_adapter_canary(
        self, name: str, version: int, share: float, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S
    ) -> Adapter:
        """Have a kept version answer a share of the requests; share 0.0 ends the canary. Needs an admin key. Raises:
        DiptychError."""
        return adapter_from(self._call(calls.ROUTE, calls.canary_request(name, version, share), timeout_s))

    def promote_adapter(self, name: str, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S) -> Adapter:
        """The canary answers all requests from now on. Needs an admin key. Raises: DiptychError."""
        return adapter_from(self._call(calls.ROUTE, calls.promotion_request(name), timeout_s))

    def roll_back_adapter(
        self, name: str, version: int = 0, *, timeout_s: float = wire.DEFAULT_LIST_TIMEOUT_S
    ) -> Adapter:
        """End the canary; without one, serve the version again that was stable before. Nothing is loaded. Needs an admin key.

        Args: version: above 0: this kept version becomes the stable one in any case.
        Raises: DiptychError.
        """
        return adapter_from(self._call(calls.ROUTE, calls.rollback_request(name, version), timeout_s))

    def _call(self, method_of: Callable[[Any], Callable[..., Any]], request: object, timeout_s: float) -> Any:
        """A call with one answer, which may be made twice. Raises: DiptychError."""
        attempts = self._attempts(timeout_s)
        while True:
            address = self.address
            try:
                method = method_of(self._connected(address))
                return method(request, timeout=attempts.remaining_s(), metadata=self._metadata)
            except grpc.RpcError as error:
                failure = wire.typed(error, address)
                pause = attempts.pause_after(failure)
            time.sleep(pause)
            self._turn_from(address, failure)

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        if self._bridge is not None:
            self._bridge.close()
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def _connected(self, address: str) -> grpc.Channel:
        """The channel to this router."""
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                if self._tls is None:
                    channel = grpc.insecure_channel(address, options=wire.options())
                else:
                    credentials, options = self._tls.credentials(), wire.tls_options(self._tls)
                    channel = grpc.secure_channel(address, credentials, options=options)
                self._channels[address] = channel
            return channel

    def _turn_from(self, address: str, error: DiptychError) -> None:
        """After a failed call: use another router, if there is one that serves. A router that answers with a typed error is
        asked first."""
        if not self._routers.several or error.grpc_code not in CUT:
            return
        order = self._routers.in_order(address)
        for other in order if isinstance(error, UnreachableError) else (address, *order[:-1]):
            try:
                check = health_method(self._connected(other))
                if is_serving(check(b"", timeout=HEALTH_TIMEOUT_S, metadata=self._metadata)):
                    self._routers.use(address, other)
                    return
            except grpc.RpcError:
                continue
        self._routers.use(address, order[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _attempts(self, timeout_s: float) -> Attempts:
        return Attempts(timeout_s, self._retry, time.monotonic, self._rng)


class Session(SessionBase):
    """A session of a Client, made by `Client.session`. Its requests have its session_id, and its cache_ttl_s and cache_priority
    where they bring none of their own. Leaving the `with` block closes it."""

    def __init__(self, client: Client, defaults: Mapping[str, Any]) -> None:
        super().__init__(defaults)
        self._client = client

    def generate(self, **options: Unpack[GenerateOptions]) -> Completion:
        """See Client.generate."""
        return self._client.generate(**self._with(options))

    def stream(self, **options: Unpack[GenerateOptions]) -> Stream | BridgedStream:
        """See Client.stream."""
        return self._client.stream(**self._with(options))

    def prefetch(self, **options: Unpack[GenerateOptions]) -> Usage:
        """See Client.prefetch."""
        return self._client.prefetch(**self._with(options))

    def close(self) -> ClosedSession:
        """See Client.close_session."""
        return self._client.close_session(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Stream(ReadOnce):
    """One streamed answer: iterate it (once), then read `result`.

    Leaving the iteration before its end, in whatever way (break, an exception, `close`, the end of a `with` block,
    garbage collection), cancels the request in the whole cluster.
    """

    def __init__(self, client: Client, request: router_pb2.GenerateRequest, timeout_s: float, *, resume: bool) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._resume = resume
        self._call: Any = None
        self._address = ""
        """Of the router of the call."""
        self._closed = False

    def __iter__(self) -> Iterator[Delta]:
        return _Deltas(self, self._begin(self._client._attempts(self._timeout_s), self._request, resume=self._resume))

    def close(self) -> None:
        """Cancel the call unless it has ended. Idempotent; safe from another thread."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()  # no effect after the end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _next(self, exchange: Exchange) -> Delta:
        while True:
            if self._closed:
                raise RequestCancelledError("the stream was closed")
            try:
                if self._call is None:
                    client, self._address = self._client, self._client.address
                    method = wire.generate_method(client._connected(self._address))
                    self._call = method(exchange.request, timeout=exchange.remaining_s(), metadata=client._metadata)
                    if self._closed:
                        self._call.cancel()
                for message in self._call:
                    delta = exchange.on_message(message)
                    if delta is not None:
                        return delta
                exchange.on_end()
                raise StopIteration
            except grpc.RpcError as error:
                failure = wire.typed(error, self._address)
                pause = exchange.on_error(failure)
                self._call = None
            time.sleep(pause)
            self._client._turn_from(self._address, failure)


class _Deltas(Iterator[Delta]):
    """The iterator of one `for`. The loop holds the only reference, so leaving the loop deletes it, which cancels the
    call."""

    def __init__(self, stream: Stream, exchange: Exchange) -> None:
        self._stream = stream
        self._exchange = exchange

    def __next__(self) -> Delta:
        try:
            return self._stream._next(self._exchange)
        except (DiptychError, KeyboardInterrupt):
            self._stream.close()
            raise

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a closed channel has no calls left to cancel
            self._stream.close()
