"""A grpc.aio channel between two nodes of the world: GetInfo, Prefill and Fetch, with what gRPC makes of a lost peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
from handoff_sim.laws import Law
from handoff_sim.links import Links, Node

from diptych.common.errors import DiptychError, NoWorkerError
from diptych.rpc.errors import to_failure
from diptych.rpc.v1 import prefill_pb2

if TYPE_CHECKING:
    from handoff_sim.nodes import WorkerNode


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class SimChannel:
    """Args: server: the node at the address; None: none listens."""

    def __init__(self, links: Links, client: Node, server: WorkerNode | None) -> None:
        self.links, self.client, self.server = links, client, server
        self.calls: dict[SimCall, None] = {}

    def unary_unary(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        return self._get_info

    def unary_stream(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        return lambda request, timeout, metadata=(): SimCall(self, request, timeout)

    async def close(self) -> None:
        for call in list(self.calls):
            call.end(asyncio.CancelledError())

    async def _get_info(self, request: object, timeout: float) -> Any:
        server, loop = self.server, self.links.loop
        await asyncio.sleep(self.links.delay())
        if server is None or server.node.dead:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "connection refused")
        answer: asyncio.Future[Any] = loop.create_future()

        def arrived() -> None:
            info = server.info()
            self.links.deliver(server.node, self.client, self.links.delay(), lambda: done(info))

        def done(info: Any) -> None:
            if not answer.done():
                answer.set_result(info)

        self.links.deliver(self.client, server.node, self.links.delay(), arrived)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None


class SimCall:
    """One Prefill or Fetch call, both ends."""

    def __init__(
        self, channel: SimChannel, request: prefill_pb2.PrefillRequest | prefill_pb2.FetchRequest, timeout: float
    ) -> None:
        self._channel, self._links = channel, channel.links
        self._request = type(request).FromString(request.SerializeToString())
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._ended = False
        self._task: asyncio.Task[None] | None = None
        self._not_before = 0.0
        channel.calls[self] = None
        late = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self._timer = self._links.loop.call_later(timeout, self.end, late)
        if channel.server is None or channel.server.node.dead:
            self._links.loop.call_later(self._links.delay(), self.end, _lost())
            return
        channel.server.calls[self] = None
        self._links.deliver(channel.client, channel.server.node, self._links.delay(), self._start)

    # ---- decode's end ----

    def __aiter__(self) -> SimCall:
        return self

    async def __anext__(self) -> prefill_pb2.PrefillEvent:
        item = await self._inbox.get()
        if isinstance(item, BaseException):
            raise item
        return prefill_pb2.PrefillEvent.FromString(item)

    def cancel(self) -> None:
        self.end(asyncio.CancelledError())

    def end(self, how: BaseException) -> None:
        """Decode's end is over; prefill's end is cancelled when it is notified."""
        if self._ended:
            return
        self._ended = True
        self._timer.cancel()
        self._channel.calls.pop(self, None)
        self._inbox.put_nowait(how)
        server = self._channel.server
        if server is not None:
            self._links.deliver(self._channel.client, server.node, self._links.delay(), self.abort)

    # ---- prefill's end ----

    def _start(self) -> None:
        if not self._ended or self._task is None:
            self._task = self._links.loop.create_task(self._serve(), name="prefill call")
        if self._ended:
            self.abort()

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def broken(self) -> None:
        """The connection broke: both ends are notified."""
        self.abort()
        server = self._channel.server
        assert server is not None
        self._links.deliver(server.node, self._channel.client, self._links.delay(), lambda: self.end(_lost()))

    async def _serve(self) -> None:
        server, request = self._channel.server, self._request
        assert server is not None
        drains, is_refused = server.drains, False
        try:
            served = (
                server.handoffs.fetch(request)
                if isinstance(request, prefill_pb2.FetchRequest)
                else server.handoffs.serve(request)
            )
            async with aclosing(served) as events:
                async for event in events:
                    self._say(event)
        except DiptychError as error:
            is_refused = isinstance(error, NoWorkerError)
            self._say(prefill_pb2.PrefillEvent(failure=to_failure(error)))
        finally:
            server.calls.pop(self, None)
        if drains and is_refused == isinstance(request, prefill_pb2.FetchRequest):
            what = "refused" if is_refused else "took"
            server.context.report(Law.DRAINS, f"{server.ref.worker_id} drains and {what} {request.attempt}")
        self._say(None)

    def _say(self, event: prefill_pb2.PrefillEvent | None) -> None:
        """In order, whatever the delays."""
        server = self._channel.server
        assert server is not None
        if server.node.dead:
            return
        loop = self._links.loop
        at = self._not_before = max(loop.time() + self._links.delay(), self._not_before + 1e-9)
        raw = None if event is None else event.SerializeToString()
        self._links.deliver(server.node, self._channel.client, at - loop.time(), lambda: self._hear(raw))

    def _hear(self, raw: bytes | None) -> None:
        if self._ended:
            return
        if raw is None:
            self.end(StopAsyncIteration())
        else:
            self._inbox.put_nowait(raw)


def _lost() -> grpc.aio.AioRpcError:
    return rpc_error(grpc.StatusCode.UNAVAILABLE, "connection lost")
