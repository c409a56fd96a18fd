"""Lookaside: the router places a request and signs a ticket, the decode worker streams the answer to the client directly.

    place --ticket--> visit decode --Accepted--> Started, tokens, End --> Finished
      |                  |-- refused, lost, broken: before or in the middle of the answer
      `-- no ticket -----'---> the router's own Generate, with the same seed: what the caller has already is held back

What is the caller's fault (a bad value, no key, no quota, the deadline) is never tried a second way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from diptych.client import wire
from diptych.client.direct_stream import DirectRequest, DirectStream
from diptych.client.exchange import Exchange
from diptych.client.placing import Placer
from diptych.common.errors import DiptychError, RequestDeadlineError
from diptych.rpc.errors import from_failure
from diptych.rpc.v1 import decode_pb2, router_pb2

PLACE_PATIENCE_S = 5.0
"""For an answer to a placement, before the router is asked to do it all."""
_ANOTHER_WAY = frozenset({"TICKET_REFUSED", "STALE_REFERENCE", "WORKER_LOST", "NO_WORKER", "OVERLOADED", "UNREACHABLE"})


class Lookaside:
    """Of one client; belongs to one event loop.

    Args:
        router: the channel to the router.
        tls: for decode workers that speak TLS.
    """

    def __init__(
        self,
        router: Any,
        *,
        address: str,
        metadata: tuple[tuple[str, str], ...],
        tls: wire.Tls | None,
    ) -> None:
        self._tls = tls
        self._channels: list[Any] = []
        self._doorways: dict[str, DirectStream] = {}
        self._placer = Placer(
            lambda: wire.placements_method(router)(metadata=metadata), lambda error: wire.typed(error, address)
        )

    async def begin(self, request: router_pb2.GenerateRequest, remaining_s: float) -> DirectAnswer:
        """Raises: DiptychError."""
        began = asyncio.get_running_loop().time()
        placed = await self._placer.place(request, remaining_s, min(remaining_s, PLACE_PATIENCE_S))
        return DirectAnswer(placed, self._doorway(placed).visit(placed.attempt, placed.ticket, remaining_s), began)

    def _doorway(self, placed: router_pb2.Placed) -> DirectStream:
        doorway = self._doorways.get(placed.address)
        if doorway is None:
            if not placed.tls:
                channel = grpc.aio.insecure_channel(placed.address, options=wire.options())
            else:
                tls = self._tls or wire.Tls()
                channel = grpc.aio.secure_channel(placed.address, tls.credentials(), options=wire.tls_options(tls))
            self._channels.append(channel)
            doorway = DirectStream(lambda: wire.attach_method(channel)(), placed.address)
            self._doorways[placed.address] = doorway
        return doorway

    async def close(self) -> None:
        await asyncio.gather(self._placer.close(), *(doorway.close() for doorway in self._doorways.values()))
        for channel in self._channels:
            await channel.close()


class DirectAnswer:
    """An answer as decode tells it, in the router's words.

    Args:
        began: when the router was asked, on the loop's clock.
    """

    def __init__(self, placed: router_pb2.Placed, visit: DirectRequest, began: float) -> None:
        self._placed = placed
        self._began = began
        self._visit = visit
        self._over = False

    @property
    def seed(self) -> int:
        return self._placed.seed

    async def next(self) -> tuple[str, Any]:
        """(field of GenerateResponse, its value); ("", None) at the end. Raises: DiptychError."""
        if self._over:
            return "", None
        return self._told(await self._visit.next())

    async def whole(self, exchange: Exchange) -> None:
        """Tell the exchange all that `next` would give; an error is raised by the next `next`."""

        def tell(event: decode_pb2.Event) -> None:
            if event.HasField("tokens"):
                exchange.on_unseen_tokens(event.tokens)
                return
            kind, told = self._told(event)
            if kind != "failure":
                exchange.on_event(kind, told)

        await self._visit.whole(tell)

    def _told(self, event: decode_pb2.Event) -> tuple[str, Any]:
        kind = event.WhichOneof("event")
        if kind == "tokens":
            return kind, event.tokens
        if kind == "accepted":
            placed = self._placed
            return "started", router_pb2.Started(
                request_id=placed.request_id,
                model=placed.model,
                prompt_tokens=placed.prompt_tokens,
                seed=placed.seed,
            )
        if kind != "end":
            return kind or "", getattr(event, kind) if kind else None
        if event.end.HasField("failure"):
            self._visit.fail(from_failure(event.end.failure))
            return "failure", event.end.failure
        self._over = True
        finished = event.end.finished
        if self._placed.HasField("explanation"):
            mine = self._placed.explanation
            mine.notes.extend(finished.explanation.notes)
            del finished.explanation.notes[:]
            finished.explanation.MergeFrom(mine)
            finished.explanation.cached_tokens = finished.usage.cached_tokens
            if self._visit.first_token_at is not None:
                finished.explanation.ttft_s = self._visit.first_token_at - self._began
        else:
            finished.ClearField("explanation")
        return "finished", finished

    def cancel(self) -> None:
        self._visit.leave()


class RoutedAnswer:
    """An answer as the router relays it."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address
        self.pieces: Sequence[router_pb2.Piece] = ()
        """Of the event that came last."""

    async def next(self) -> tuple[str, Any]:
        """("", None) at the end. Raises: DiptychError."""
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise wire.typed(error, self._address) from None
        if message is grpc.aio.EOF:
            return "", None
        kind = message.WhichOneof("event") or "an unknown event"
        self.pieces = message.pieces
        return kind, getattr(message, kind, None)

    def cancel(self) -> None:
        self._call.cancel()  # of no effect after the end


def goes_another_way(error: DiptychError, request: router_pb2.GenerateRequest, *, placing: bool) -> bool:
    """Whether the router's own Generate may still bring the answer."""
    if placing:  # what the router itself sheds it would shed again
        return error.reason in _ANOTHER_WAY - {"OVERLOADED"} or isinstance(error, RequestDeadlineError)
    return error.reason in _ANOTHER_WAY and request.failure_policy != router_pb2.FAILURE_POLICY_FAIL


Answer = DirectAnswer | RoutedAnswer
