"""Outgoing events to one router: everything since the last write goes into one StepBatch.

A slow reader gets fewer, larger batches: tokens of one attempt are merged, so the buffer holds at most one Accepted and
one End for each attempt, and one TokenDelta for each of its choices. Beyond `max_bytes` the router counts as lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from diptych.common.errors import OverloadedError
from diptych.engine.messages import TokensOut
from diptych.rpc.convert import logprobs_to_proto
from diptych.rpc.v1 import decode_pb2, router_pb2, types_pb2

_EVENT_BYTES = 64
_MAX_BATCH_BYTES = 4 * 1024 * 1024
"""Half of the largest message: answers that were kept for another router come whole."""


class Events(Protocol):
    """Events sent by an attempt; see Outbox."""

    def accepted(self, attempt: str) -> None: ...

    def tokens(self, event: TokensOut, cached_tokens: int = 0) -> None: ...

    def prompt_logprobs(self, attempt: str, entries: types_pb2.PromptLogprobs) -> None: ...

    def choice_finished(self, attempt: str, finished: types_pb2.ChoiceFinished) -> None: ...

    def end(self, attempt: str, end: decode_pb2.End) -> None: ...


class Outbox:
    """The buffer of one stream. `max_bytes`: bound on the buffered events (an estimate of their encoded size).
    `on_overflow`: called once when the bound is exceeded; the buffer is dropped and `next_batch` raises."""

    def __init__(self, *, max_bytes: int = 32 * 1024 * 1024, on_overflow: Callable[[], None] | None = None) -> None:
        self._max_bytes = max_bytes
        self._on_overflow = on_overflow
        self._events: list[decode_pb2.Event] = []
        self._tokens: dict[tuple[str, int], decode_pb2.Event] = {}
        self._bytes = 0
        self._endpoint: decode_pb2.DirectEndpoint | None = None
        self._ticket_statuses: dict[str, decode_pb2.TicketStatus] = {}
        self._ready = asyncio.Event()
        self._closed = False
        self.overflowed = False

    def direct_endpoint(self, endpoint: decode_pb2.DirectEndpoint) -> None:
        """Set the current address for clients; only the latest is sent."""
        self._endpoint = endpoint
        self._ready.set()

    def ticket_status(self, status: decode_pb2.TicketStatus) -> None:
        """Status of a ticket's attempt; buffered ones of one attempt are merged."""
        if self._closed or self.overflowed:
            return
        self._ticket_statuses.setdefault(status.attempt, decode_pb2.TicketStatus()).MergeFrom(status)
        self._grow(status.ByteSize() + _EVENT_BYTES)

    def accepted(self, attempt: str) -> None:
        self._append(decode_pb2.Event(attempt=attempt, accepted=decode_pb2.Accepted()), _EVENT_BYTES)

    def tokens(self, event: TokensOut, cached_tokens: int = 0) -> None:
        """Append tokens; a buffered event of the same choice is extended. `cached_tokens`: of the prompt; with the
        attempt's first tokens."""
        waiting = self._tokens.get((event.attempt, event.choice))
        logprobs = [logprobs_to_proto(entry) for entry in event.logprobs]
        size = 5 * len(event.token_ids) + len(event.text) + sum(entry.ByteSize() for entry in logprobs)
        if waiting is not None:
            waiting.tokens.token_ids.extend(event.token_ids)
            waiting.tokens.text += event.text
            waiting.tokens.logprobs.extend(logprobs)
            self._grow(size)
            return
        delta = router_pb2.TokenDelta(
            offset=event.offset, token_ids=event.token_ids, text=event.text, choice=event.choice, logprobs=logprobs
        )
        message = decode_pb2.Event(attempt=event.attempt, tokens=delta, cached_tokens=cached_tokens)
        self._tokens[event.attempt, event.choice] = message
        self._append(message, size + _EVENT_BYTES)

    def prompt_logprobs(self, attempt: str, entries: types_pb2.PromptLogprobs) -> None:
        event = decode_pb2.Event(attempt=attempt, prompt_logprobs=entries)
        self._append(event, entries.ByteSize() + _EVENT_BYTES)

    def choice_finished(self, attempt: str, finished: types_pb2.ChoiceFinished) -> None:
        self._append(decode_pb2.Event(attempt=attempt, choice_finished=finished), _EVENT_BYTES)

    def end(self, attempt: str, end: decode_pb2.End) -> None:
        self._append(decode_pb2.Event(attempt=attempt, end=end), end.ByteSize() + _EVENT_BYTES)

    def forget(self, attempt: str) -> None:
        """Drop the buffered events of an attempt."""
        self._events = [event for event in self._events if event.attempt != attempt]
        self._tokens = {key: event for key, event in self._tokens.items() if key[0] != attempt}

    def close(self) -> None:
        """No more events: `next_batch` empties the buffer, then returns None."""
        self._closed = True
        self._ready.set()

    async def next_batch(self) -> decode_pb2.StepBatch | None:
        """All buffered events, oldest first, or as many as fit into a message; waits for one. None: closed and empty. Raises:
        OverloadedError when the router fell too far behind."""
        while not (self._events or self._ticket_statuses or self._endpoint or self.overflowed):
            if self._closed:
                return None
            self._ready.clear()
            await self._ready.wait()
        if self.overflowed:
            raise OverloadedError(f"the router reads too slowly: more than {self._max_bytes} bytes wait for it")
        now = len(self._events) if self._bytes <= _MAX_BATCH_BYTES else self._num_fitting()
        batch = decode_pb2.StepBatch(
            events=self._events[:now], direct_endpoint=self._endpoint, ticket_status=self._ticket_statuses.values()
        )
        self._events, self._ticket_statuses, self._endpoint = self._events[now:], {}, None
        self._tokens = {}
        self._bytes = sum(event.ByteSize() + _EVENT_BYTES for event in self._events)
        return batch

    def _num_fitting(self) -> int:
        """Events that make one message; at least one."""
        size = 0
        for number, event in enumerate(self._events):
            size += event.ByteSize()
            if size > _MAX_BATCH_BYTES and number:
                return number
        return len(self._events)

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
            self._events, self._ticket_statuses, self._tokens = [], {}, {}
            if self._on_overflow is not None:
                self._on_overflow()
