"""The processes of one router (--router-processes N): each is a router of its own, behind the same two ports.

    connection --SO_REUSEPORT--> process 0 | process 1 | ...      each: its view of the cluster, its row in the store
    process --FOLDER/K-------> process K     Explain, Metrics, Status, Move: what only it knows, or has
    process --FOLDER/parent--> their parent  HoldKey: idempotency keys, which outlive the process

Any process answers for all: `explain` asks the others for what it has not placed itself, /metrics and /status.json hold
what all of them report. Each call has a deadline; a process that does not answer is left out, and the status says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import msgspec

from diptych.common.errors import InternalError, OverloadedError
from diptych.router.processes.merge import merged_exposition, merged_status
from diptych.router.requests.idempotency import IdempotencyKeys, Outcome
from diptych.rpc.channels import new_server, open_channel
from diptych.rpc.errors import errors_to_status, from_rpc_error, typed_error
from diptych.rpc.stubs import RouterParentStub, RouterProcessStub, add_router_parent, add_router_process
from diptych.rpc.v1 import router_pb2, router_process_pb2

MOVE_S = 15.0
"""Deadline of a move: longer than the relay's own."""
ANSWER_S = 1.0
"""Deadline of a process's answer to another: well below a scraper's."""
KEY_S = 5.0
"""Deadline of the parent's answer: it only looks up."""

_T = TypeVar("_T")


class OwnAnswers(Protocol):
    """What a process tells the others: see Frontend."""

    def explain_own(self, request_id: str, tenant: str) -> router_pb2.ExplainResponse: ...

    def status(self, tenant: str) -> dict[str, Any]: ...

    def exposition(self) -> bytes: ...

    async def move_own(self, request_id: str, to: str) -> router_pb2.MoveResponse | None: ...


def parent_address(folder: Path) -> str:
    return f"unix:{folder / 'parent'}"


def process_socket(folder: Path, number: int) -> Path:
    """Exists once the process serves."""
    return folder / str(number)


class Siblings:
    """The other processes of this router, and their parent.

    Args:
        folder: of their sockets; only this user can open it.
        number: of this process, from 0.
        count: of all of them.
    """

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self.number, self.count = number, count
        self._folder = folder
        self._server: grpc.aio.Server | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._others: list[Any] = []
        self._parent: Any = None
        self._reports: set[asyncio.Task[None]] = set()

    def connect(self) -> None:
        """Open the channels, on the event loop. Once."""
        for number in range(self.count):
            if number != self.number:
                self._others.append(RouterProcessStub(self._channel(f"unix:{process_socket(self._folder, number)}")))
        self._parent = RouterParentStub(self._channel(parent_address(self._folder)))

    def _channel(self, address: str) -> grpc.aio.Channel:
        self._channels.append(open_channel(address))
        return self._channels[-1]

    async def serve(self, own: OwnAnswers) -> None:
        """Answer the others from now on; the parent takes it as a sign that this process serves."""
        self._server = new_server()
        add_router_process(_ProcessService(own), self._server)
        self._server.add_insecure_port(f"unix:{process_socket(self._folder, self.number)}")
        await self._server.start()

    async def close(self) -> None:
        """Idempotent."""
        if self._reports:
            await asyncio.wait(self._reports, timeout=ANSWER_S)
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    async def explain(self, request_id: str, tenant: str) -> list[router_pb2.ExplainResponse]:
        """From the other processes that know a request of the tenant by this id or label."""
        request = router_process_pb2.ExplainOwnRequest(request_id=request_id, tenant=tenant)
        return await self._each(lambda other: other.Explain(request, timeout=ANSWER_S))

    async def exposition(self, own: bytes) -> bytes:
        """The body of /metrics, of all processes."""
        request = router_process_pb2.MetricsRequest()
        answers = await self._each(lambda other: other.Metrics(request, timeout=ANSWER_S))
        return merged_exposition([own, *(answer.exposition for answer in answers)])

    async def status(self, own: dict[str, Any], tenant: str) -> dict[str, Any]:
        """/status.json, of all processes."""
        request = router_process_pb2.StatusRequest(tenant=tenant)
        answers = await self._each(lambda other: other.Status(request, timeout=ANSWER_S))
        return merged_status(own, [msgspec.json.decode(answer.status) for answer in answers], self.count)

    async def move(self, request_id: str, to: str) -> router_pb2.MoveResponse | None:
        """By the process that has the request; None: no other one has. Raises: its error."""
        request = router_pb2.MoveRequest(request_id=request_id, to=to)
        for other in self._others:
            try:
                moved: router_pb2.MoveResponse = await other.Move(request, timeout=MOVE_S)
            except grpc.aio.AioRpcError as error:
                if typed_error(error) is None:
                    continue  # it does not answer: another process, or none, has the request
                raise from_rpc_error(error) from None
            if moved.before:
                return moved
        return None

    async def _each(self, ask: Callable[[Any], Coroutine[Any, Any, _T]]) -> list[_T]:
        """The answers of the others that have one."""

        async def asked(other: Any) -> _T | None:
            try:
                return await ask(other)
            except grpc.aio.AioRpcError:
                return None

        answers = await asyncio.gather(*map(asked, self._others))
        return [answer for answer in answers if answer is not None]

    @asynccontextmanager
    async def hold(self, tenant: str, key: str) -> AsyncIterator[Outcome]:
        """See IdempotencyKeys.running: the parent keeps the keys of all processes."""
        outcome, call = Outcome(), self._parent.HoldKey()
        try:
            try:
                async with asyncio.timeout(KEY_S):
                    await call.write(router_process_pb2.HoldKeyRequest(tenant=tenant, key=key))
                    if await call.read() is grpc.aio.EOF:
                        raise InternalError(f"the key was not held: {(await call.code()).name}")
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
            except TimeoutError:
                raise OverloadedError("the idempotency key could not be checked in time", retry_after_s=1.0) from None
            yield outcome
        finally:
            if outcome.well:
                report = asyncio.create_task(_report_success(call))
                self._reports.add(report)
                report.add_done_callback(self._reports.discard)
            else:
                call.cancel()


async def _report_success(call: Any) -> None:
    try:
        async with asyncio.timeout(KEY_S):
            await call.write(router_process_pb2.HoldKeyRequest(succeeded=True))
            await call.done_writing()
            await call.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        return  # the parent has ended, and this process with it
    finally:
        call.cancel()


class _ProcessService:
    """RouterProcess."""

    def __init__(self, own: OwnAnswers) -> None:
        self._own = own

    async def Explain(
        self, request: router_process_pb2.ExplainOwnRequest, context: grpc.aio.ServicerContext
    ) -> router_pb2.ExplainResponse:
        async with errors_to_status(context):
            return self._own.explain_own(request.request_id, request.tenant)

    async def Metrics(
        self, request: router_process_pb2.MetricsRequest, context: grpc.aio.ServicerContext
    ) -> router_process_pb2.MetricsResponse:
        return router_process_pb2.MetricsResponse(exposition=self._own.exposition())

    async def Status(
        self, request: router_process_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> router_process_pb2.StatusResponse:
        return router_process_pb2.StatusResponse(status=msgspec.json.encode(self._own.status(request.tenant)))

    async def Move(self, request: router_pb2.MoveRequest, context: grpc.aio.ServicerContext) -> router_pb2.MoveResponse:
        async with errors_to_status(context):
            return await self._own.move_own(request.request_id, request.to) or router_pb2.MoveResponse()


class _ParentService:
    """RouterParent."""

    def __init__(self, keys: IdempotencyKeys) -> None:
        self._keys = keys

    async def HoldKey(
        self, requests: AsyncIterator[router_process_pb2.HoldKeyRequest], context: grpc.aio.ServicerContext
    ) -> None:
        async with errors_to_status(context):
            first = await anext(requests, None)
            if first is None:
                return
            with self._keys.running(first.tenant, first.key) as outcome:
                await context.write(router_process_pb2.HoldKeyResponse())
                async for last in requests:
                    outcome.well = last.succeeded


async def serve_parent(folder: Path, keys: IdempotencyKeys) -> grpc.aio.Server:
    """The parent's server, which its caller stops."""
    server = new_server()
    add_router_parent(_ParentService(keys), server)
    server.add_insecure_port(parent_address(folder))
    await server.start()
    return server
