"""Placements for clients that stream from decode themselves: one call, or many over one long-lived stream.

messages in -> each placement: prepare, grant -> replies, in any order; those ready during a write go into one message
a client that does not read its replies is not read either; after UNREAD_S its stream ends with OVERLOADED
a broken stream ends its unanswered placements; issued tickets stay valid
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial

import grpc
import structlog

from diptych.common.errors import DiptychError, InternalError, NoWorkerError, OverloadedError
from diptych.router.api.auth.authenticator import current_caller
from diptych.router.api.grpc.requests import parse, spec_from
from diptych.router.api.interface import RouterApi
from diptych.router.api.packed_ids import PackedIds
from diptych.router.requests.lookaside import MAX_UNREDEEMED
from diptych.router.requests.messages import ValidatedRequest
from diptych.rpc.errors import errors_to_status, to_failure
from diptych.rpc.v1 import router_pb2

log = structlog.get_logger(__name__)

_MAX_IN_FLIGHT = 4096
MAX_UNREAD_BYTES = 1024 * 1024
"""Bytes of unsent replies beyond which reading pauses. A message that was read is still completed."""
UNREAD_S = 30.0
_TOGETHER, _TOKENS_TOGETHER = 32, 32_768
_MAX_REMEMBERED, _MAX_REMEMBERED_BYTES = 256, 512


class PlacementStream:
    """One client's stream."""

    def __init__(self, router_api: RouterApi) -> None:
        self._router_api = router_api
        self._tenant = current_caller.get().tenant
        self._replies: list[bytes] = []
        """Each is an encoded PlacementsResponse: concatenated they are one."""
        self._unread_bytes = 0
        self._ready = asyncio.Event()
        self._written = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closed = False
        self.closed = False
        """No more replies are written."""
        self._granted: deque[str] = deque(maxlen=MAX_UNREDEEMED)
        """The latest attempts."""
        self._before: dict[bytes, ValidatedRequest] = {}
        """A prepared request by all its fields but the token ids: requests of a stream mostly repeat them."""

    async def read(self, bodies: AsyncIterator[bytes]) -> None:
        """Read until the client closes its side. Raises: InvalidRequestError for an invalid message."""
        try:
            async for body in bodies:
                message = parse(router_pb2.PlacementsRequest, body)
                await self._take(message.places)
                for number in message.withdrawn:
                    if task := self._tasks.pop(number, None):
                        task.cancel()
                while self._unread_bytes > MAX_UNREAD_BYTES:
                    self._written.clear()
                    await self._written.wait()
        finally:
            self._closed = True
            self._ready.set()

    async def _take(self, places: Iterable[router_pb2.PlaceRequest]) -> None:
        """Handle one message. Requests with token ids need no waiting and are placed together, in batches, so that
        replies are sent in between and other clients are not blocked."""
        ready: list[tuple[int, ValidatedRequest]] = []
        num_tokens = 0
        for request in places:
            if request.request.WhichOneof("input") == "token_ids":
                if (prepared := await self._prepared(request)) is not None:
                    ready.append((request.id, prepared))
                    num_tokens += len(prepared.prompt.token_ids)
                if len(ready) >= _TOGETHER or num_tokens >= _TOKENS_TOGETHER:
                    self._place(ready)
                    ready, num_tokens = [], 0
                    await asyncio.sleep(0)
            elif len(self._tasks) >= _MAX_IN_FLIGHT:
                self._refuse(
                    request.id, OverloadedError("too many pending placements on this stream", retry_after_s=1.0)
                )
            else:
                task = self._tasks[request.id] = asyncio.create_task(self._answer(request))
                task.add_done_callback(partial(self._forget, request.id))
        if ready:
            self._place(ready)

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(number) is task:
            del self._tasks[number]

    async def _answer(self, request: router_pb2.PlaceRequest) -> None:
        if (prepared := await self._prepared(request)) is not None:
            self._place([(request.id, prepared)])

    async def _prepared(self, request: router_pb2.PlaceRequest) -> ValidatedRequest | None:
        """None: it was rejected."""
        try:
            return await self._prepare(request)
        except DiptychError as error:
            self._refuse(request.id, error)
        except Exception as error:  # one placement must not fail the stream's others
            self._fail([request.id], error)
        return None

    async def _prepare(self, request: router_pb2.PlaceRequest) -> ValidatedRequest:
        """Raises: DiptychError."""
        asked = request.request
        if not _may_repeat(asked):
            return await _prepare(self._router_api, request, self._tenant)
        prompt = PackedIds.of(asked.token_ids)
        asked.ClearField("token_ids")
        rest = asked.SerializeToString()
        before = self._before.get(rest)
        if before is not None:
            draws_seed, remaining_s = not asked.sampling.HasField("seed"), request.remaining_s or None
            return self._router_api.prepare_again(before, prompt, remaining_s, draws_seed=draws_seed)
        asked.token_ids.MergeFromString(prompt.packed)
        prepared = await _prepare(self._router_api, request, self._tenant)
        if len(rest) <= _MAX_REMEMBERED_BYTES:
            if len(self._before) >= _MAX_REMEMBERED:
                self._before.clear()
            self._before[rest] = prepared
        return prepared

    def _place(self, ready: Sequence[tuple[int, ValidatedRequest]]) -> None:
        try:
            outcomes = self._router_api.place([prepared for _, prepared in ready])
        except Exception as error:
            self._fail([number for number, _ in ready], error)
            return
        replies = []
        for (number, _), outcome in zip(ready, outcomes, strict=True):
            if isinstance(outcome, DiptychError):
                replies.append(router_pb2.PlaceReply(id=number, failure=to_failure(outcome)))
            else:
                self._granted.append(outcome.attempt)
                replies.append(router_pb2.PlaceReply(id=number, placed=outcome))
        self._reply(replies)

    def _fail(self, numbers: Iterable[int], error: Exception) -> None:
        """A bug."""
        log.error("placements failed", error=repr(error), exc_info=error)
        for number in numbers:
            self._refuse(number, InternalError("internal error"))

    def _refuse(self, number: int, error: DiptychError) -> None:
        self._reply([router_pb2.PlaceReply(id=number, failure=to_failure(error))])

    def _reply(self, replies: Sequence[router_pb2.PlaceReply]) -> None:
        encoded = router_pb2.PlacementsResponse(replies=replies).SerializeToString()
        self._replies.append(encoded)
        self._unread_bytes += len(encoded)
        self._ready.set()

    async def next(self) -> bytes | None:
        """A PlacementsResponse with all replies that are ready; waits for one. None: the client has closed its side,
        and all is sent."""
        while not self._replies:
            if self._closed and not self._tasks:
                return None
            self._ready.clear()
            if self._closed:
                await asyncio.wait(list(self._tasks.values()), return_when=asyncio.FIRST_COMPLETED)
            else:
                await self._ready.wait()
        replies, self._replies = self._replies, []
        self._unread_bytes = 0
        self._written.set()
        return replies[0] if len(replies) == 1 else b"".join(replies)

    def close(self) -> None:
        self.closed = True
        for task in self._tasks.values():
            task.cancel()
        self._router_api.tickets_left(self._granted)


async def serve_placements(
    router_api: RouterApi, bodies: AsyncIterator[bytes], context: grpc.aio.ServicerContext
) -> None:
    stream = PlacementStream(router_api)
    reader = asyncio.create_task(stream.read(bodies), name="placements reader")
    async with errors_to_status(context):  # outermost: errors wait until earlier replies are read
        try:
            while (message := await stream.next()) is not None:
                await _write(context, message)
            await reader  # an invalid message of the client ends the call with an error
        finally:
            reader.cancel()
            stream.close()
            await asyncio.gather(reader, return_exceptions=True)


async def _write(context: grpc.aio.ServicerContext, message: bytes) -> None:
    """Raises: OverloadedError."""
    try:
        async with asyncio.timeout(UNREAD_S):
            await context.write(message)
    except TimeoutError:
        raise OverloadedError(f"the replies of this stream were not read for {UNREAD_S:.0f} s") from None


async def place(router_api: RouterApi, request: router_pb2.PlaceRequest, tenant: str) -> router_pb2.Placed:
    """Raises: DiptychError."""
    (outcome,) = router_api.place([await _prepare(router_api, request, tenant)])
    if isinstance(outcome, DiptychError):
        raise outcome
    return outcome


def _may_repeat(asked: router_pb2.GenerateRequest) -> bool:
    """Whether it has no request-specific fields except token ids and perhaps a seed."""
    return (
        asked.WhichOneof("input") == "token_ids"
        and asked.sampling.HasField("max_tokens")
        and not asked.request_id
        and not asked.idempotency_key
        and not asked.HasField("resume_after")
    )


async def _prepare(router_api: RouterApi, request: router_pb2.PlaceRequest, tenant: str) -> ValidatedRequest:
    asked = request.request
    spec, offer = spec_from(asked, request.remaining_s or None, router_api.features(asked.model, tenant), tenant)
    if offer.names or (asked.split and asked.WhichOneof("input") == "chat"):
        raise NoWorkerError("no ticket: the router splits this answer")
    if asked.idempotency_key:
        raise NoWorkerError("no ticket: the router keeps idempotency keys")
    return await router_api.prepare(spec)
