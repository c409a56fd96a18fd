"""Placements: many in flight over one stream to the router, matched by id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from diptych.client.errors import UnreachableError
from diptych.client.pipe import Pipe
from diptych.common.errors import DiptychError, RequestDeadlineError
from diptych.rpc.errors import from_failure
from diptych.rpc.v1 import router_pb2


class Placer(Pipe):
    """The placements of one client, over one stream to the router.

    Args:
        open_call: opens Router.Placements.
        typed: converts the error of a failed call.
    """

    def __init__(self, open_call: Callable[[], Any], typed: Callable[[grpc.RpcError], DiptychError]) -> None:
        super().__init__(open_call)
        self._typed = typed
        self._number = 0
        self._waiting: dict[int, asyncio.Future[router_pb2.Placed]] = {}
        self._places: list[router_pb2.PlaceRequest] = []
        self._withdrawn: list[int] = []

    async def place(
        self, request: router_pb2.GenerateRequest, remaining_s: float, patience_s: float
    ) -> router_pb2.Placed:
        """Place one request.

        Args:
            remaining_s: until the request's deadline.
            patience_s: until the answer is given up and the placement withdrawn.
        Raises: DiptychError; UnreachableError when the stream broke.
        """
        self._number += 1
        number = self._number
        answer: asyncio.Future[router_pb2.Placed] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._places.append(router_pb2.PlaceRequest(id=number, request=request, remaining_s=remaining_s))
        self._send()
        timer = asyncio.get_running_loop().call_later(patience_s, self._give_up, number)
        try:
            return await answer
        finally:
            timer.cancel()
            if self._waiting.pop(number, None) is not None and self._call is not None:
                self._withdrawn.append(number)
                self._send()

    def _give_up(self, number: int) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_exception(RequestDeadlineError("the router did not place the request in time"))

    def _outgoing(self) -> router_pb2.PlacementsRequest | None:
        if not self._places and not self._withdrawn:
            return None
        message = router_pb2.PlacementsRequest(places=self._places, withdrawn=self._withdrawn)
        self._places, self._withdrawn = [], []
        return message

    def _incoming(self, message: router_pb2.PlacementsResponse) -> None:
        for reply in message.replies:
            answer = self._waiting.pop(reply.id, None)
            if answer is None or answer.done():
                continue  # the caller gave up: the ticket expires unused
            if reply.HasField("placed"):
                answer.set_result(reply.placed)
            else:
                answer.set_exception(from_failure(reply.failure))

    def _broken(self, error: grpc.RpcError | None) -> None:
        self._places, self._withdrawn = [], []
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                why = self._typed(error) if error is not None else UnreachableError("the router closed the stream")
                answer.set_exception(why)
