"""Events on their way to one router: everything that happened since the last write goes into one StepBatch.

A router that reads slowly gets fewer, larger batches: tokens of one attempt are merged, so the buffer holds at most one
Accepted and one End for each attempt, and one TokenDelta for each of its choices. Past `max_bytes` the router counts as lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from diptych.common.errors import OverloadedError
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2

_EVENT_BYTES = 64


class Events(Protocol):
    """What an attempt says; see Outbox."""

    def accepted(self, attempt: str) -> None: ...

    def tokens(
        self,
        attempt: str,
        offset: int,
        token_ids: tuple[int, ...],
        text: str,
        choice: int = 0,
        logprobs: Sequence[types_pb2.TokenLogprobs] = (),
        cached_tokens: int = 0,
    ) -> None: ...

    def prompt_logprobs(self, attempt: str, entries: types_pb2.PromptLogprobs) -> None: ...

    def choice_finished(self, attempt: str, finished: types_pb2.ChoiceFinished) -> None: ...

    def end(self, attempt: str, end: decode_pb2.End) -> None: ...


class Outbox:
    """Args:
    max_bytes: bound on what waits (an estimate of the encoded size).
    on_overflow: called once when it is passed; what waits is dropped and `next_batch` raises.
    """

    def __init__(self, *, max_bytes: int = 32 * 1024 * 1024, on_overflow: Callable[[], None] | None = None) -> None:
        self._max_bytes = max_bytes
        self._on_overflow = on_overflow
        self._events: list[decode_pb2.Event] = []
        self._tokens: dict[tuple[str, int], decode_pb2.Event] = {}
        self._bytes = 0
        self._door: decode_pb2.DirectEndpoint | None = None
        self._news: dict[str, decode_pb2.TicketStatus] = {}
        self._ready = asyncio.Event()
        self._closed = False
        self.overflowed = False

    def door(self, door: decode_pb2.DirectEndpoint) -> None:
        """The clients' door as it is now; the latest counts."""
        self._door = door
        self._ready.set()

    def news(self, news: decode_pb2.TicketStatus) -> None:
        """Of an attempt that a client brought; one message for what waits of it."""
        if self._closed or self.overflowed:
            return
        self._news.setdefault(news.attempt, decode_pb2.TicketStatus()).MergeFrom(news)
        self._grow(news.ByteSize() + _EVENT_BYTES)

    def accepted(self, attempt: str) -> None:
        self._append(decode_pb2.Event(attempt=attempt, accepted=decode_pb2.Accepted()), _EVENT_BYTES)

    def tokens(
        self,
        attempt: str,
        offset: int,
        token_ids: tuple[int, ...],
        text: str,
        choice: int = 0,
        logprobs: Sequence[types_pb2.TokenLogprobs] = (),
        cached_tokens: int = 0,
    ) -> None:
        """Append tokens; an event of the same choice that still waits is extended. `cached_tokens`: of the prompt; with the
        attempt's first tokens."""
        waiting = self._tokens.get((attempt, choice))
        size = 5 * len(token_ids) + len(text) + sum(entry.ByteSize() for entry in logprobs)
        if waiting is not None:
            waiting.tokens.token_ids.extend(token_ids)
            waiting.tokens.text += text
            waiting.tokens.logprobs.extend(logprobs)
            self._grow(size)
            return
        delta = router_pb2.TokenDelta(offset=offset, token_ids=token_ids, text=text, choice=choice, logprobs=logprobs)
        event = decode_pb2.Event(attempt=attempt, tokens=delta, cached_tokens=cached_tokens)
        self._tokens[attempt, choice] = event
        self._append(event, size + _EVENT_BYTES)

    def prompt_logprobs(self, attempt: str, entries: types_pb2.PromptLogprobs) -> None:
        event = decode_pb2.Event(attempt=attempt, prompt_logprobs=entries)
        self._append(event, entries.ByteSize() + _EVENT_BYTES)

    def choice_finished(self, attempt: str, finished: types_pb2.ChoiceFinished) -> None:
        self._append(decode_pb2.Event(attempt=attempt, choice_finished=finished), _EVENT_BYTES)

    def end(self, attempt: str, end: decode_pb2.End) -> None:
        self._append(decode_pb2.Event(attempt=attempt, end=end), end.ByteSize() + _EVENT_BYTES)

    def close(self) -> None:
        """No more events will come: `next_batch` empties the buffer, then returns None."""
        self._closed = True
        self._ready.set()

    async def next_batch(self) -> decode_pb2.StepBatch | None:
        """All events that wait, oldest first; waits for one. None: closed and empty.

        Raises: OverloadedError when the router fell too far behind.
        """
        while not (self._events or self._news or self._door or self.overflowed):
            if self._closed:
                return None
            self._ready.clear()
            await self._ready.wait()
        if self.overflowed:
            raise OverloadedError(f"the router reads too slowly: more than {self._max_bytes} bytes wait for it")
        batch = decode_pb2.StepBatch(events=self._events, direct_endpoint=self._door, ticket_status=self._news.values())
        self._events, self._news, self._door = [], {}, None
        self._tokens = {}
        self._bytes = 0
        return batch

    def _append(self, event: decode_pb2.Event, size: int) -> None:
        if self._closed or self.overflowed:
            return
        self._events.append(event)
        self._grow(size)

    def _grow(self, size: int) -> None:
        self._bytes += size
        self._ready.set()
        if self._bytes > self._max_bytes and not self.overflowed:
            self.overflowed = True
            self._events, self._news, self._tokens = [], {}, {}
            if self._on_overflow is not None:
                self._on_overflow()
