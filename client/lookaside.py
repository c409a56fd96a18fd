"""Lookaside: the router places a request and signs a ticket; the decode worker streams the answer to the client.

    place --ticket--> redeem at decode --Accepted--> Started, tokens, End --> Finished
      |                  |-- refused, lost, broken: before or during the answer
      `-- no ticket -----'---> the router's Generate, with the same seed; tokens that the caller already has are dropped

Errors of the caller (a bad value, no key, no quota, the deadline) do not fall back to the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
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
"""Seconds to wait for a placement before falling back to the router's Generate."""
_FALLBACK_REASONS = frozenset(
    {"TICKET_REFUSED", "STALE_REFERENCE", "WORKER_LOST", "WORKER_DRAINED", "NO_WORKER", "OVERLOADED", "UNREACHABLE"}
)


class Lookaside:
    """The direct streams of one client; belongs to one event loop.

    Args:
        router: the channel to the router in use, and its address.
        tls: for decode workers that use TLS.
    """

    def __init__(
        self,
        router: Callable[[], tuple[Any, str]],
        *,
        metadata: tuple[tuple[str, str], ...],
        tls: wire.Tls | None,
    ) -> None:
        self._tls = tls
        self._channels: list[Any] = []
        self._streams: dict[str, DirectStream] = {}
        self._placer = Placer(
            lambda: wire.placements_method(router()[0])(metadata=metadata), lambda error: wire.typed(error, router()[1])
        )

    async def begin(self, request: router_pb2.GenerateRequest, remaining_s: float) -> DirectAnswer:
        """Raises: DiptychError."""
        began = asyncio.get_running_loop().time()
        placed = await self._placer.place(request, remaining_s, min(remaining_s, PLACE_PATIENCE_S))
        return DirectAnswer(placed, self._stream_to(placed).redeem(placed.attempt, placed.ticket, remaining_s), began)

    def _stream_to(self, placed: router_pb2.Placed) -> DirectStream:
        stream = self._streams.get(placed.address)
        if stream is None:
            if not placed.tls:
                channel = grpc.aio.insecure_channel(placed.address, options=wire.options())
            else:
                tls = self._tls or wire.Tls()
                channel = grpc.aio.secure_channel(placed.address, tls.credentials(), options=wire.tls_options(tls))
            self._channels.append(channel)
            stream = DirectStream(lambda: wire.attach_method(channel)(), placed.address)
            self._streams[placed.address] = stream
        return stream

    async def close(self) -> None:
        await asyncio.gather(self._placer.close(), *(stream.close() for stream in self._streams.values()))
        for channel in self._channels:
            await channel.close()


class DirectAnswer:
    """An answer from a decode worker, converted to the events of GenerateResponse.

    Args:
        began: when the placement was requested, on the loop's clock.
    """

    def __init__(self, placed: router_pb2.Placed, direct: DirectRequest, began: float) -> None:
        self._placed = placed
        self._began = began
        self._direct = direct
        self._over = False

    @property
    def seed(self) -> int:
        return self._placed.seed

    async def next(self) -> tuple[str, Any]:
        """(field of GenerateResponse, its value); ("", None) at the end. Raises: DiptychError."""
        if self._over:
            return "", None
        return self._converted(await self._direct.next())

    async def forward_all(self, exchange: Exchange) -> None:
        """Pass all events to the exchange. An error is raised by the following `next`."""

        def forward(event: decode_pb2.Event) -> None:
            if event.HasField("tokens"):
                exchange.on_unseen_tokens(event.tokens)
                return
            kind, value = self._converted(event)
            if kind != "failure":
                exchange.on_event(kind, value)

        await self._direct.forward_all(forward)

    def _converted(self, event: decode_pb2.Event) -> tuple[str, Any]:
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
                adapter=placed.adapter,
                adapter_version=placed.adapter_version,
            )
        if kind != "end":
            return kind or "", getattr(event, kind) if kind else None
        if event.end.HasField("failure"):
            self._direct.fail(from_failure(event.end.failure))
            return "failure", event.end.failure
        self._over = True
        finished = event.end.finished
        if self._placed.HasField("explanation"):
            mine = self._placed.explanation
            mine.notes.extend(finished.explanation.notes)
            del finished.explanation.notes[:]
            finished.explanation.MergeFrom(mine)
            finished.explanation.cached_tokens = finished.usage.cached_tokens
            if self._direct.first_token_at is not None:
                finished.explanation.ttft_s = self._direct.first_token_at - self._began
            finished.explanation.total_s = asyncio.get_running_loop().time() - self._began
            finished.explanation.longest_gap_s = self._direct.longest_gap_s
        else:
            finished.ClearField("explanation")
        return "finished", finished

    def cancel(self) -> None:
        self._direct.leave()


class RoutedAnswer:
    """An answer relayed by the router."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self.address = address
        self.pieces: Sequence[router_pb2.Piece] = ()
        """Those of the last event."""

    async def next(self) -> tuple[str, Any]:
        """("", None) at the end. Raises: DiptychError."""
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise wire.typed(error, self.address) from None
        if message is grpc.aio.EOF:
            return "", None
        kind = message.WhichOneof("event") or "an unknown event"
        self.pieces = message.pieces
        return kind, getattr(message, kind, None)

    def cancel(self) -> None:
        self._call.cancel()  # no effect after the end


def may_fall_back(error: DiptychError, request: router_pb2.GenerateRequest, *, placing: bool) -> bool:
    """Whether the router's Generate may still serve the request after this error."""
    if placing:  # a router that shed the placement would shed the request, too
        return error.reason in _FALLBACK_REASONS - {"OVERLOADED"} or isinstance(error, RequestDeadlineError)
    return error.reason in _FALLBACK_REASONS and request.failure_policy != router_pb2.FAILURE_POLICY_FAIL


Answer = DirectAnswer | RoutedAnswer
